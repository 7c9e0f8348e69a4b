//! A slot's metadata: one cache line of atomics.

use crate::describe::describe;
use crate::key::{BlockId, ShardKey};
use crate::ptr::Shared;
use crate::slot::word::{Generation, Word};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// One slot. Its owner writes; everybody reads. The state word has this line
/// to itself as far as hot writers go: the rest changes only when the slot does.
#[repr(C, align(64))]
pub struct SlotMeta {
    state: AtomicU32,
    shard: AtomicU32,
    key_low: AtomicU64,
    key_high: AtomicU64,
    /// `generation << 32 | code` of the last failure.
    error: AtomicU64,
    quarantine_until_ns: AtomicU64,
    checksum: AtomicU64,
    length_bytes: AtomicU32,
    reserved: [u32; 3],
}

// SAFETY: atomics only.
unsafe impl Shared for SlotMeta {}

describe!(SlotMeta, size 64, align 64, {
    0: state: AtomicU32,
    4: shard: AtomicU32,
    8: key_low: AtomicU64,
    16: key_high: AtomicU64,
    24: error: AtomicU64,
    32: quarantine_until_ns: AtomicU64,
    40: checksum: AtomicU64,
    48: length_bytes: AtomicU32,
    52: reserved: [u32; 3],
});

/// Why a load failed: the backend's number, or one of the constants here.
/// Positive numbers are errno values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoadErrorCode(pub i32);

impl LoadErrorCode {
    /// The owner died while it was loading.
    pub const OWNER_DIED: Self = Self(-1);
    /// The owner let go of the slot without filling it.
    pub const ABANDONED: Self = Self(-2);
    /// The backend does not have the shard.
    pub const NOT_FOUND: Self = Self(-3);
    /// The bytes did not match their checksum.
    pub const CHECKSUM: Self = Self(-4);
    /// The backend did not answer in time.
    pub const TIMED_OUT: Self = Self(-5);
    /// The stored object is not what its name says.
    pub const BAD_OBJECT: Self = Self(-6);
    /// A later failure has overwritten the code that was asked for.
    pub const UNKNOWN: Self = Self(-7);
}

impl core::fmt::Display for LoadErrorCode {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::OWNER_DIED => f.write_str("the loading rank died"),
            Self::ABANDONED => f.write_str("the loading rank gave up"),
            Self::NOT_FOUND => f.write_str("not in the backend"),
            Self::CHECKSUM => f.write_str("checksum mismatch"),
            Self::TIMED_OUT => f.write_str("the backend timed out"),
            Self::BAD_OBJECT => f.write_str("the stored object is malformed"),
            Self::UNKNOWN => f.write_str("unknown (overwritten by a later failure)"),
            Self(code) => write!(f, "error {code}"),
        }
    }
}

impl SlotMeta {
    #[cfg(ucm_loom)]
    pub(crate) unsafe fn init(at: *mut Self) {
        let n = || AtomicU32::new(0);
        let w = || AtomicU64::new(0);
        let meta = Self {
            state: n(),
            shard: n(),
            key_low: w(),
            key_high: w(),
            error: w(),
            quarantine_until_ns: w(),
            checksum: w(),
            length_bytes: n(),
            reserved: [0; 3],
        };
        // SAFETY: the caller owns `at`.
        unsafe { at.write(meta) }
    }

    /// The state word, for sleeping on.
    #[inline(always)]
    pub(crate) fn state_word(&self) -> &AtomicU32 {
        &self.state
    }

    /// The state now. SeqCst is for whoever has just pinned or tagged.
    #[inline(always)]
    pub(crate) fn load(&self, ordering: Ordering) -> Word {
        Word(self.state.load(ordering))
    }

    /// One step of the state machine; `false` when somebody was faster.
    #[inline(always)]
    pub(crate) fn exchange(&self, from: Word, to: Word) -> bool {
        self.state.compare_exchange(from.0, to.0, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Whether the slot carries `key`. Means something only while the slot
    /// cannot change (pinned and keyed), or between two equal state words.
    #[inline(always)]
    pub(crate) fn has_key(&self, key: &ShardKey) -> bool {
        let (low, high) = key.block.words();
        self.key_low.load(Ordering::Relaxed) == low
            && self.key_high.load(Ordering::Relaxed) == high
            && self.shard.load(Ordering::Relaxed) == key.shard
    }

    /// The key the slot carries, under the same condition.
    pub(crate) fn key(&self) -> ShardKey {
        let low = self.key_low.load(Ordering::Relaxed);
        let high = self.key_high.load(Ordering::Relaxed);
        ShardKey::new(BlockId::from_words(low, high), self.shard.load(Ordering::Relaxed))
    }

    /// Writes the key. The caller has claimed the slot.
    pub(crate) fn set_key(&self, key: &ShardKey) {
        let (low, high) = key.block.words();
        // SYNC(slot.key): Release, so that a watcher that reads any of these
        // words and then (after its Acquire fence) the state again sees at
        // least the claim that came before them; Relaxed stores could show it
        // a new key between two old state words. Pairs with the fence in
        // `Watcher::probe`.
        self.key_low.store(low, Ordering::Release);
        self.key_high.store(high, Ordering::Release);
        self.shard.store(key.shard, Ordering::Release);
    }

    /// Stores why the load of `generation` failed. Comes before the state says so.
    pub(crate) fn set_error(&self, generation: Generation, code: LoadErrorCode) {
        let word = u64::from(generation.number()) << 32 | u64::from(code.0 as u32);
        // Relaxed: the state's exchange releases it.
        self.error.store(word, Ordering::Relaxed);
    }

    /// Why the load of `generation` failed, read after the state said so.
    pub(crate) fn error(&self, generation: Generation) -> LoadErrorCode {
        let word = self.error.load(Ordering::Relaxed);
        if (word >> 32) as u32 == generation.number() {
            LoadErrorCode(word as u32 as i32)
        } else {
            LoadErrorCode::UNKNOWN
        }
    }

    pub(crate) fn set_quarantine_until_ns(&self, until_ns: u64) {
        self.quarantine_until_ns.store(until_ns, Ordering::Relaxed);
    }

    pub(crate) fn quarantine_until_ns(&self) -> u64 {
        self.quarantine_until_ns.load(Ordering::Relaxed)
    }

    /// What the owner says of the bytes; published by the state.
    pub(crate) fn set_payload(&self, length_bytes: u32, checksum: u64) {
        self.length_bytes.store(length_bytes, Ordering::Relaxed);
        self.checksum.store(checksum, Ordering::Relaxed);
    }

    pub(crate) fn payload(&self) -> (u32, u64) {
        (self.length_bytes.load(Ordering::Relaxed), self.checksum.load(Ordering::Relaxed))
    }
}
