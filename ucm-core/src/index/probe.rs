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

/// A bit for every entry whose fingerprint is `fingerprint`.
#[inline(always)]
fn fingerprint_matches(bucket: &Bucket, fingerprint: u32) -> u32 {
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
