//! Counters: one block per participant, summed by whoever asks.

use crate::describe::describe;
use crate::limits::COUNTERS;
use crate::ptr::Shared;
use crate::sync::{AtomicU64, Ordering};

/// What is counted. The numbers stay when a participant leaves: its
/// successor counts on, and the sum over all blocks is the segment's history.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Counter {
    /// Slots taken from a key that was READY.
    Evictions,
    /// Shards this participant became owner of.
    Owned,
    /// Gets that found READY.
    Hits,
    /// Gets that found somebody else's load under way.
    Waits,
    /// Loads that were published READY.
    Published,
    /// Loads that were published FAILED.
    FailedLoads,
    /// READY hits forced back to the backend.
    ForcedReloads,
    /// Slots prepared ahead.
    Prepared,
    /// Prepared slots that a get took over.
    PreparedUsed,
    /// A reader took a tagged slot back.
    TagsCancelled,
    /// Insertions that met a twin and withdrew.
    Withdrawals,
    /// Insertions of others that a reader aborted.
    InsertsAborted,
    /// Insertions that found both buckets full and evicted there.
    BucketsFull,
    /// Participants reaped.
    Reaps,
    /// Claims, insertions and tags of the dead that were undone.
    ReapedClaims,
    /// Loads of the dead that went into quarantine.
    Quarantined,
    /// Pins of the dead that were taken back.
    ReapedPins,
    /// Waits that ended because the owner died.
    OwnerDeathsSeen,
    /// Publications that came after their owner had been reaped.
    LatePublishes,
    /// Allocations that found every slot pinned.
    NothingEvictable,
    /// Shards dumped.
    Dumped,
    /// Loads whose bytes did not match their checksum.
    ChecksumMismatches,
}

impl Counter {
    /// All of them, in order.
    pub const ALL: [Self; 22] = [
        Self::Evictions,
        Self::Owned,
        Self::Hits,
        Self::Waits,
        Self::Published,
        Self::FailedLoads,
        Self::ForcedReloads,
        Self::Prepared,
        Self::PreparedUsed,
        Self::TagsCancelled,
        Self::Withdrawals,
        Self::InsertsAborted,
        Self::BucketsFull,
        Self::Reaps,
        Self::ReapedClaims,
        Self::Quarantined,
        Self::ReapedPins,
        Self::OwnerDeathsSeen,
        Self::LatePublishes,
        Self::NothingEvictable,
        Self::Dumped,
        Self::ChecksumMismatches,
    ];
}

#[cfg(not(ucm_loom))]
static_assertions::const_assert!(Counter::ALL.len() <= COUNTERS);

/// One participant's counters: four cache lines that nobody else writes.
#[repr(C, align(64))]
pub struct CounterBlock {
    values: [AtomicU64; COUNTERS],
}

// SAFETY: atomics only.
unsafe impl Shared for CounterBlock {}

describe!(CounterBlock, size 256, align 64, {
    0: values: [AtomicU64; COUNTERS],
});

impl CounterBlock {
    #[cfg(ucm_loom)]
    pub(crate) unsafe fn init(at: *mut Self) {
        // SAFETY: the caller owns `at`.
        unsafe { at.write(Self { values: core::array::from_fn(|_| AtomicU64::new(0)) }) }
    }

    /// Adds `n`.
    #[inline]
    pub fn add(&self, counter: Counter, n: u64) {
        // The model checker need not explore what decides nothing.
        #[cfg(not(ucm_loom))]
        self.values[counter as usize].fetch_add(n, Ordering::Relaxed);
        #[cfg(ucm_loom)]
        let _ = (counter, n);
    }

    /// The value now.
    pub fn get(&self, counter: Counter) -> u64 {
        self.values.get(counter as usize).map_or(0, |value| value.load(Ordering::Relaxed))
    }
}
