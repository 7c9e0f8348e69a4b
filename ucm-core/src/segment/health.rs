//! A segment that turns out wrong while it is in use: who looks, what is looked at, who is told.
//!
//! Whatever can only be there by a stray write (a header that has changed, a
//! state that no move leads to, an index entry that names no slot) makes the
//! segment *poisoned*: one word that everybody reads before a get. From then
//! on it serves nobody and repairs nothing; a new segment takes its place.
//!
//! Looking costs, so it happens where time is lost anyway: when a slice of
//! waiting or a round of attempts has passed in vain, when somebody is reaped,
//! and by a janitor, a part at a time. Each of these is *always* wrong, also on
//! a segment that others are changing at the moment: a moment is no finding.

use core::ops::Range;

use crate::cache::handle::Cache;
use crate::host::Host;
use crate::segment::attach::ControlPlane;
use crate::segment::header::{ABI_VERSION, HEALTH_POISONED, LAYOUT_FINGERPRINT, MAGIC};
use crate::sync::{AtomicU32, Ordering};

/// Says to everybody that the segment is not to be believed any more.
#[cold]
pub(crate) fn poison(health: &AtomicU32) {
    // Relaxed: nothing is published by it, and whoever sees it late has lost
    // nothing that it had before.
    health.store(HEALTH_POISONED, Ordering::Relaxed);
}

impl ControlPlane<'_> {
    /// Whether somebody found the segment wrong while using it. One load of a
    /// line that is written at most once.
    #[inline(always)]
    pub fn is_poisoned(&self) -> bool {
        // It decides about no interleaving, so the model checker need not explore it.
        !cfg!(ucm_loom) && self.header.health.load(Ordering::Relaxed) == HEALTH_POISONED
    }

    /// Marks the segment: everybody's requests are misses or typed errors from
    /// here on, and nobody attaches to it any more.
    pub fn poison(&self) {
        poison(&self.header.health);
    }

    /// Whether the header is still what it was when this view was made. What
    /// decides anything was copied then; a change can only be a stray write.
    pub fn is_header_intact(&self) -> bool {
        let (header, relaxed) = (self.header, Ordering::Relaxed);
        let shape = self.geometry().shape;
        let numbers = [
            (header.magic.load(relaxed), MAGIC),
            (header.layout_fingerprint.load(relaxed), LAYOUT_FINGERPRINT),
            (header.config_fingerprint.load(relaxed), self.geometry().config_fingerprint()),
            (header.control_bytes.load(relaxed), self.geometry().control_bytes),
            (header.data_bytes.load(relaxed), self.geometry().data_bytes),
            (header.nonce.load(relaxed), self.nonce()),
            (header.content_tag.load(relaxed), shape.content_tag),
            (header.shard_bytes.load(relaxed), shape.shard_bytes),
            (header.io_quarantine_ns.load(relaxed), self.io_quarantine_ns()),
        ];
        let halves = [
            (header.abi_version.load(relaxed), ABI_VERSION),
            (header.slot_count.load(relaxed), shape.slot_count),
            (header.reserved_slots.load(relaxed), shape.reserved_slots),
            (header.shards_per_block.load(relaxed), shape.shards_per_block),
            (header.local_rank_size.load(relaxed), shape.local_rank_size),
            (header.participants.load(relaxed), shape.participants),
        ];
        numbers.iter().all(|(found, made)| found == made)
            && halves.iter().all(|(found, made)| found == made)
    }

    /// Looks at the header, at `slots`, and at as many buckets of the index;
    /// poisons the segment and says `false` if anything there is impossible.
    /// Both ranges are cut off at the end.
    pub fn inspect(&self, slots: Range<u32>) -> bool {
        let participants = self.geometry().shape.participants;
        let range = slots.start as usize..slots.end as usize;
        let cut = |len: usize| range.start.min(len)..range.end.min(len).max(range.start.min(len));
        let impossible = |at: usize| {
            let word = self.slots[at].load(Ordering::Relaxed);
            !word.is_possible(participants)
        };
        let wrong = !self.is_header_intact()
            || self.pins.is_beyond_table()
            || cut(self.slots.len()).any(impossible)
            || self.index.has_stray_entry(cut(self.index.bucket_count()));
        if wrong {
            self.poison();
        }
        !wrong
    }
}

impl<H: Host> Cache<'_, H> {
    /// A cold moment's look at what is cheap: the header, and that evictors
    /// still heed my pins.
    #[cold]
    pub(crate) fn check_health(&self) {
        if cfg!(ucm_loom) {
            return;
        }
        let sound = self.plane.is_header_intact() && self.plane.pins.is_admitted(self.me);
        if !sound {
            self.plane.poison();
        }
    }
}
