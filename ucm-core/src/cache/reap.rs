//! What the dead left behind, undone by a survivor.
//!
//! The byte of the dead is the right to reap it. The order is: slots it owned,
//! then its pins, then its table entry, last the byte; so that if the reaper
//! dies as well, the entry is still live and the next one starts again. Every
//! step is conditional on the dead one's word, or may be done twice.

use crate::cache::handle::Cache;
use crate::crash::crash_point;
use crate::host::Host;
use crate::participant::ParticipantId;
use crate::segment::counters::Counter;
use crate::segment::geometry::CacheShape;
use crate::slot::meta::LoadErrorCode;
use crate::slot::word::Status;
use crate::sync::Ordering;

/// What became of an attempt to reap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReapOutcome {
    /// Its byte is held: it lives, or somebody is reaping it.
    Held,
    /// There was nothing to do.
    NotThere,
    /// It is gone, and everything it held is free.
    Reaped,
}

impl<H: Host> Cache<'_, H> {
    /// Reaps `participant` if it is dead.
    pub fn reap(&self, participant: ParticipantId) -> ReapOutcome {
        let Some(entry) = self.plane.participants.get(participant.index() as usize) else {
            return ReapOutcome::NotThere;
        };
        if participant == self.me {
            return ReapOutcome::Held;
        }
        let Some(byte) = self.host.try_claim(participant) else { return ReapOutcome::Held };
        crash_point!(ReapStart);
        if !entry.is_live() {
            return ReapOutcome::NotThere;
        }
        self.repair(participant);
        crash_point!(ReapRepaired);
        entry.vacate();
        crash_point!(ReapVacated);
        self.add(Counter::Reaps, 1);
        drop(byte);
        ReapOutcome::Reaped
    }

    /// Reaps whoever is dead; returns how many that were. A live participant
    /// costs one look at its lock byte.
    pub fn reap_dead(&self) -> u32 {
        self.check_health();
        let mut reaped = 0;
        for index in 0..self.plane.geometry().shape.participants {
            let Some(participant) = ParticipantId::new(index) else { break };
            let suspect = participant != self.me
                && self.entry(participant).is_live()
                && !self.host.is_held(participant);
            if suspect && self.reap(participant) == ReapOutcome::Reaped {
                reaped += 1;
            }
        }
        reaped
    }

    /// Undoes everything of `dead`. The caller holds its byte.
    pub(crate) fn repair(&self, dead: ParticipantId) {
        let CacheShape { slot_count, participants, .. } = self.plane.geometry().shape;
        for slot in 0..slot_count {
            // Most slots are not its; one load tells.
            let word = self.meta(slot).load(Ordering::Relaxed);
            if !cfg!(ucm_loom) && !word.is_possible(participants) {
                self.plane.poison();
            }
            if word.owner() == Some(dead) {
                self.repair_slot(slot, dead);
                crash_point!(ReapSlot);
            }
        }
        let pins = self.plane.pins.clear_row(dead, slot_count);
        self.add(Counter::ReapedPins, pins);
    }

    fn repair_slot(&self, slot: u32, dead: ParticipantId) {
        let meta = self.meta(slot);
        let mut unlisted = false;
        // The only ones who still change the word are waiters (their bit),
        // readers (a tag off) and aborters (one step): so this ends soon.
        loop {
            let word = meta.load(Ordering::SeqCst);
            if word.owner() != Some(dead) {
                // A copy of the dead (a forked child) may have published
                // just now, after its entry was taken out. Nobody can find
                // the slot any more; whoever holds it may read on, because
                // a pinned FREE slot is not taken.
                if unlisted && word.status().is_evictable() {
                    if meta.exchange(word, word.released(Status::Free)) {
                        return;
                    }
                    continue;
                }
                return;
            }
            let (to, counter) = match word.status() {
                Status::Claimed | Status::Inserting => {
                    // The entry may be of the old key or the new one,
                    // whichever the slot carries; half a key names neither,
                    // and then there is no entry.
                    self.plane.index.remove(meta.key().hash(), slot);
                    (word.released(Status::Free), Counter::ReapedClaims)
                }
                Status::Loading => {
                    self.plane.index.remove(meta.key().hash(), slot);
                    unlisted = true;
                    meta.set_error(word.generation(), LoadErrorCode::OWNER_DIED);
                    let quarantine_ns = self.plane.io_quarantine_ns();
                    meta.set_quarantine_until_ns(self.host.now_ns().saturating_add(quarantine_ns));
                    (word.released(Status::Quarantined), Counter::Quarantined)
                }
                Status::Ready | Status::Failed | Status::Prepared => {
                    (word.untagged(), Counter::ReapedClaims)
                }
                Status::Free | Status::Quarantined => {
                    // No move of ours leads here; scribbled memory could.
                    (word.released(word.status()), Counter::ReapedClaims)
                }
            };
            crash_point!(ReapUnlisted);
            if meta.exchange(word, to) {
                self.add(counter, 1);
                if word.has_waiters() {
                    self.host.wake_all(meta.state_word());
                }
                return;
            }
        }
    }
}
