//! Finding, publishing and removing entries.

use crate::index::bucket::{Bucket, Entry};
use crate::key::KeyHash;
use crate::limits::BUCKET_ENTRIES;
use crate::sync::Ordering;

/// A view of the index. `buckets.len()` is a power of two, at least two.
#[derive(Clone, Copy)]
pub(crate) struct Index<'m> {
    buckets: &'m [Bucket],
    mask: u32,
    slot_count: u32,
}

impl<'m> Index<'m> {
    pub(crate) fn new(buckets: &'m [Bucket], slot_count: u32) -> Self {
        debug_assert!(buckets.len().is_power_of_two() && buckets.len() >= 2);
        Self { buckets, mask: buckets.len() as u32 - 1, slot_count }
    }

    #[inline(always)]
    fn bucket(&self, number: u32) -> &'m Bucket {
        // Masked, so it is in range whatever the hash; the mask keeps the
        // bounds check from ever failing.
        &self.buckets[(number & self.mask) as usize]
    }

    #[inline(always)]
    fn both(&self, hash: KeyHash) -> [&'m Bucket; 2] {
        let (first, second) = hash.buckets(self.mask);
        [self.bucket(first), self.bucket(second)]
    }

    /// Bring the key's first bucket closer.
    #[inline(always)]
    pub(crate) fn prefetch(&self, hash: KeyHash) {
        let (first, second) = hash.buckets(self.mask);
        prefetch(self.bucket(first));
        prefetch(self.bucket(second));
    }

    /// Visits the slots whose entry may be the key's, until `visit` returns something.
    ///
    /// A bucket's fingerprints are compared all at once and without branches,
    /// so the common case (one match, in the first bucket) takes one
    /// predictable branch.
    #[inline(always)]
    pub(crate) fn find<R>(
        &self,
        hash: KeyHash,
        mut visit: impl FnMut(u32) -> Option<R>,
    ) -> Option<R> {
        for bucket in self.both(hash) {
            let mut matches = fingerprint_matches(bucket, hash.fingerprint());
            while matches != 0 {
                let at = matches.trailing_zeros() as usize;
                matches &= matches - 1;
                let cell = &bucket.entries[at % BUCKET_ENTRIES];
                // SYNC(index.entry): pairs with the SeqCst exchange in
                // `publish`; whoever finds the slot here sees its key.
                let entry = Entry(cell.load(Ordering::Acquire));
                if entry.fingerprint() != hash.fingerprint() {
                    continue;
                }
                if let Some(slot) = entry.slot(self.slot_count)
                    && let Some(result) = visit(slot)
                {
                    return Some(result);
                }
            }
        }
        None
    }

    /// As [`find`](Self::find), for an inserter that has just published and
    /// looks for twins: every entry is loaded SeqCst, behind that publication.
    pub(crate) fn find_after_publish<R>(
        &self,
        hash: KeyHash,
        mut visit: impl FnMut(u32) -> Option<R>,
    ) -> Option<R> {
        for bucket in self.both(hash) {
            for cell in &bucket.entries {
                let entry = Entry(cell.load(Ordering::SeqCst));
                if entry.fingerprint() == hash.fingerprint()
                    && let Some(slot) = entry.slot(self.slot_count)
                    && let Some(result) = visit(slot)
                {
                    return Some(result);
                }
            }
        }
        None
    }

    /// Every slot that the key's two buckets name, whatever its key.
    pub(crate) fn residents(&self, hash: KeyHash) -> impl Iterator<Item = u32> {
        let slot_count = self.slot_count;
        self.both(hash)
            .into_iter()
            .flat_map(|bucket| &bucket.entries)
            .filter_map(move |cell| Entry(cell.load(Ordering::SeqCst)).slot(slot_count))
    }

    /// Makes `slot` findable under `hash`: one exchange into an empty entry.
    /// `false` when both buckets are full.
    pub(crate) fn publish(&self, hash: KeyHash, slot: u32) -> bool {
        let entry = Entry::new(hash, slot);
        let [first, second] = self.both(hash);
        let empty = |bucket: &Bucket| {
            bucket
                .entries
                .iter()
                .filter(|cell| cell.load(Ordering::Relaxed) == Entry::EMPTY.0)
                .count()
        };
        // Others take empty entries too, so look again a few times.
        for _ in 0..BUCKET_ENTRIES {
            let (in_first, in_second) = (empty(first), empty(second));
            if in_first + in_second == 0 {
                return false;
            }
            // The first bucket unless it is nearly full: then most hits cost
            // one line. Else the emptier one.
            let roomy = in_first > BUCKET_ENTRIES / 4;
            let chosen = if roomy || in_first >= in_second { first } else { second };
            for cell in &chosen.entries {
                // SYNC(index.entry): SeqCst, and it publishes the slot's key to
                // the Acquire load in `find`; also one half of the twins' pair
                // (publish mine, then look for yours) with `find_after_publish`.
                let taken = cell.compare_exchange(
                    Entry::EMPTY.0,
                    entry.0,
                    Ordering::SeqCst,
                    Ordering::Relaxed,
                );
                if taken.is_ok() {
                    return true;
                }
            }
        }
        false
    }

    /// Takes the entry of `slot` under `hash` out, wherever it is. Idempotent.
    pub(crate) fn remove(&self, hash: KeyHash, slot: u32) {
        let entry = Entry::new(hash, slot);
        for cell in self.both(hash).into_iter().flat_map(|bucket| &bucket.entries) {
            if cell.load(Ordering::Relaxed) == entry.0 {
                let _already_out = cell.compare_exchange(
                    entry.0,
                    Entry::EMPTY.0,
                    Ordering::SeqCst,
                    Ordering::Relaxed,
                );
            }
        }
    }

    /// How many buckets there are.
    pub(crate) fn bucket_count(&self) -> usize {
        self.buckets.len()
    }

    /// Whether one of `buckets` (which exist) names a slot that does not.
    pub(crate) fn has_stray_entry(&self, buckets: core::ops::Range<usize>) -> bool {
        self.buckets[buckets].iter().flat_map(|bucket| &bucket.entries).any(|cell| {
            let entry = Entry(cell.load(Ordering::Relaxed));
            entry != Entry::EMPTY && entry.slot(self.slot_count).is_none()
        })
    }

    /// Every entry of the index with the slot it names, for an audit.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, Option<u32>)> {
        let slot_count = self.slot_count;
        self.buckets.iter().flat_map(|bucket| &bucket.entries).filter_map(move |cell| {
            let entry = Entry(cell.load(Ordering::SeqCst));
            (entry != Entry::EMPTY)
                .then(|| (u64::from(entry.fingerprint()), entry.slot(slot_count)))
        })
    }
}

/// A bit for every entry whose fingerprint is `fingerprint`: a hint, since an
/// entry may change at any moment; whoever acts on it loads the entry itself.
#[cfg(not(all(target_arch = "x86_64", target_feature = "sse2", not(miri), not(ucm_loom))))]
#[inline(always)]
fn fingerprint_matches(bucket: &Bucket, fingerprint: u32) -> u32 {
    matches_one_by_one(bucket, fingerprint)
}

/// As above, for all eight entries at once.
#[cfg(all(target_arch = "x86_64", target_feature = "sse2", not(miri), not(ucm_loom)))]
#[inline(always)]
fn fingerprint_matches(bucket: &Bucket, fingerprint: u32) -> u32 {
    const { assert!(BUCKET_ENTRIES == 8, "the code below takes one line of eight") };
    let matches: u32;
    // SAFETY: reads the 64 bytes of `bucket`, aligned to 64, and writes
    // registers only. The loads are the processor's, outside the language's
    // memory model, so racing with other threads' atomic stores is no data
    // race in it; a torn or stale word only makes the hint wrong.
    unsafe {
        core::arch::asm!(
            "movd {wanted}, {fingerprint:e}",
            "pshufd {wanted}, {wanted}, 0",
            // The high halves of entries 0 to 3, then of 4 to 7.
            "movaps {low}, [{bucket}]",
            "shufps {low}, [{bucket} + 16], 0xdd",
            "movaps {high}, [{bucket} + 32]",
            "shufps {high}, [{bucket} + 48], 0xdd",
            "pcmpeqd {low}, {wanted}",
            "pcmpeqd {high}, {wanted}",
            // Eight comparisons to eight bytes to eight bits.
            "packssdw {low}, {high}",
            "packsswb {low}, {low}",
            "pmovmskb {matches:e}, {low}",
            bucket = in(reg) core::ptr::from_ref(bucket),
            fingerprint = in(reg) fingerprint,
            matches = lateout(reg) matches,
            wanted = out(xmm_reg) _,
            low = out(xmm_reg) _,
            high = out(xmm_reg) _,
            options(nostack, readonly, pure, preserves_flags),
        );
    }
    matches & 0xff
}

#[allow(dead_code, reason = "the portable form, and the test's reference")]
#[inline(always)]
fn matches_one_by_one(bucket: &Bucket, fingerprint: u32) -> u32 {
    let mut matches = 0;
    for (at, cell) in bucket.entries.iter().enumerate() {
        let entry = Entry(cell.load(Ordering::Relaxed));
        matches |= u32::from(entry.fingerprint() == fingerprint) << at;
    }
    matches
}

/// Asks the processor to bring a line closer; a hint, and nothing elsewhere.
#[inline(always)]
pub(crate) fn prefetch<T>(what: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri), not(ucm_loom)))]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing architecturally and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(core::ptr::from_ref(what).cast()) }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri), not(ucm_loom))))]
    let _ = what;
}

#[cfg(all(test, not(ucm_loom)))]
mod tests {
    use super::*;
    use crate::sync::AtomicU64;

    #[test]
    fn all_at_once_finds_what_one_by_one_finds() {
        let mut state = 1_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 33
        };
        for _ in 0..2000 {
            // Few different fingerprints, so that several match; low halves
            // that look like fingerprints must not.
            let entries =
                core::array::from_fn(|_| AtomicU64::new(((random() % 3) << 32) | (random() % 3)));
            let bucket = Bucket { entries };
            for fingerprint in 0..4 {
                let expected = matches_one_by_one(&bucket, fingerprint);
                assert_eq!(fingerprint_matches(&bucket, fingerprint), expected);
            }
        }
    }
}
