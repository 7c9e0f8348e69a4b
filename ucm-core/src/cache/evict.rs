//! Making room: tag, check, commit.
//!
//! A *tag* writes me into the owner field and leaves the status alone, so the
//! slot still serves its key; whoever pins it takes the tag off again. A
//! *commit* makes it CLAIMED: from there it never returns to its old key.

use crate::cache::handle::Cache;
use crate::cache::token::Eviction;
use crate::crash::crash_point;
use crate::evict::clock::{Pool, Sweep, spend_chance};
use crate::host::Host;
use crate::segment::counters::Counter;
use crate::slot::word::{Status, Word};
use crate::sync::{Ordering, seqcst_order};

/// A slot that is mine unless a reader wants it: tagged, or (if it held
/// nothing) claimed already.
pub(crate) struct Tagged {
    slot: u32,
    /// The word before the tag.
    before: Word,
}

/// A slot that is mine: CLAIMED, old entry out.
pub(crate) struct Victim {
    pub(crate) slot: u32,
    /// CLAIMED, by me.
    pub(crate) word: Word,
}

impl<H: Host> Cache<'_, H> {
    /// A slot that may go, chosen by CLOCK. `None`: none may.
    pub(crate) fn tag_victim(&self, pool: Pool) -> Option<Tagged> {
        let geometry = self.plane.geometry();
        let header = self.plane.header;
        let (hand, range) = match pool {
            Pool::Ordinary => (&header.hand, geometry.ordinary_slots()),
            Pool::WithReserve => (&header.reserve_hand, geometry.shape.slot_count),
        };
        Sweep::new(hand, range).find_map(|step| self.try_tag(step.slot, step.second_chance))
    }

    /// Tags `slot` if it holds nothing that anybody needs.
    pub(crate) fn try_tag(&self, slot: u32, second_chance: bool) -> Option<Tagged> {
        let meta = self.meta(slot);
        let before = meta.load(Ordering::SeqCst);
        match before.status() {
            Status::Free => {}
            Status::Quarantined => {
                if self.host.now_ns() < meta.quarantine_until_ns() {
                    return None;
                }
            }
            Status::Ready | Status::Failed | Status::Prepared => {
                if before.owner().is_some() {
                    return None; // somebody else's tag
                }
                if second_chance && spend_chance(self.access(slot)) {
                    return None;
                }
            }
            Status::Claimed | Status::Inserting | Status::Loading => return None,
        }
        // A first look, so that a pinned slot costs no exchange. Free and
        // quarantined slots may carry late pins too.
        if self.plane.pins.any(slot) {
            return None;
        }
        crash_point!(EvictChosen);
        let keyed = before.status().is_evictable();
        let tag = if keyed { before.tagged(self.me) } else { before.claimed(self.me) };
        // SYNC(pin/state): SeqCst; "I tag, then read the pins" against the
        // reader's "I pin, then read the state" (`PinTable::pin`).
        if !meta.exchange(before, tag) {
            return None;
        }
        seqcst_order(); // pin/state: I tagged, now I read the pins
        crash_point!(EvictTagged);
        let tagged = Tagged { slot, before };
        if self.plane.pins.any(slot) {
            crash_point!(EvictPinned);
            self.untag(tagged);
            return None;
        }
        Some(tagged)
    }

    /// Puts a tagged slot back as it was, in a new generation.
    pub(crate) fn untag(&self, tagged: Tagged) {
        let Tagged { slot, before } = tagged;
        let (from, to) = if before.status().is_evictable() {
            let tag = before.tagged(self.me);
            (tag, tag.untagged())
        } else {
            let claimed = before.claimed(self.me);
            (claimed, claimed.released(before.status()))
        };
        // Fails only if a reader took the tag off: just what we wanted.
        let _cancelled_already = self.meta(slot).exchange(from, to);
    }

    /// Makes a tagged slot mine for good and takes its old entry out of the
    /// index. `None`: a reader took it back.
    pub(crate) fn commit(&self, tagged: Tagged) -> Option<Victim> {
        let Tagged { slot, before } = tagged;
        let word = before.claimed(self.me);
        if before.status().is_evictable() {
            crash_point!(EvictCommitting);
            let meta = self.meta(slot);
            let before_ns = if self.on_evict.is_some() { self.host.now_ns() } else { 0 };
            if !meta.exchange(before.tagged(self.me), word) {
                return None;
            }
            crash_point!(EvictCommitted);
            let key = meta.key(); // mine now, so it cannot change under us
            self.plane.index.remove(key.hash(), slot);
            if before.status() == Status::Ready {
                self.add(Counter::Evictions, 1);
                if let Some(observer) = self.on_evict {
                    observer(&self.host, &Eviction { key, before_ns, by: self.me });
                }
            }
        }
        Some(Victim { slot, word })
    }

    /// Gives a claimed slot that no entry names back as FREE.
    pub(crate) fn set_free(&self, victim: Victim) {
        // Fails only for a participant that was taken for dead.
        let _reaped =
            self.meta(victim.slot).exchange(victim.word, victim.word.released(Status::Free));
    }
}
