//! Checking everything: does the index agree with the slots, and who holds what?
//!
//! Meaningful when nobody is in the middle of something; on a live cache the
//! census is still right, and violations may be moments.

use crate::host::Liveness;
use crate::key::ShardKey;
use crate::participant::ParticipantId;
use crate::segment::attach::ControlPlane;
use crate::slot::word::{Status, Word};
use crate::sync::Ordering;

/// How many slots are in which state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Census {
    /// Hold nothing.
    pub free: u32,
    /// Between two keys.
    pub claimed: u32,
    /// Being made known.
    pub inserting: u32,
    /// Being filled.
    pub loading: u32,
    /// Filled.
    pub ready: u32,
    /// Failed.
    pub failed: u32,
    /// Prepared ahead.
    pub prepared: u32,
    /// Waiting for a dead loader's IO.
    pub quarantined: u32,
    /// Of all these, tagged by an evictor.
    pub tagged: u32,
}

impl Census {
    /// All slots.
    pub fn total(&self) -> u32 {
        self.free
            + self.claimed
            + self.inserting
            + self.loading
            + self.ready
            + self.failed
            + self.prepared
            + self.quarantined
    }

    fn count(&mut self, word: Word) {
        let place = match word.status() {
            Status::Free => &mut self.free,
            Status::Claimed => &mut self.claimed,
            Status::Inserting => &mut self.inserting,
            Status::Loading => &mut self.loading,
            Status::Ready => &mut self.ready,
            Status::Failed => &mut self.failed,
            Status::Prepared => &mut self.prepared,
            Status::Quarantined => &mut self.quarantined,
        };
        *place += 1;
        self.tagged += u32::from(word.status().is_evictable() && word.owner().is_some());
    }
}

/// Something that must not be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Violation {
    /// An index entry names no slot.
    EntryWithoutSlot {
        /// The entry's fingerprint.
        fingerprint: u64,
    },
    /// An entry names a slot whose key has another fingerprint.
    EntryOfAnotherKey {
        /// The slot.
        slot: u32,
    },
    /// An entry names a slot that stands for nothing.
    EntryOfUnkeyedSlot {
        /// The slot.
        slot: u32,
        /// Its state.
        status: Status,
    },
    /// A keyed slot has not exactly one entry.
    Entries {
        /// The slot.
        slot: u32,
        /// How many it has.
        entries: u32,
    },
    /// Two slots stand for one key.
    DuplicateKey {
        /// The key.
        key: ShardKey,
        /// The one.
        slot: u32,
        /// The other.
        other: u32,
    },
    /// A slot is owned or tagged by somebody dead.
    OwnerDead {
        /// The slot.
        slot: u32,
        /// Its state.
        status: Status,
        /// The owner.
        owner: ParticipantId,
    },
    /// Somebody dead holds pins.
    PinOfDead {
        /// The slot.
        slot: u32,
        /// Who.
        participant: ParticipantId,
        /// How many.
        pins: u16,
    },
    /// The waiters bit on a slot that nobody fills.
    StrayWaiters {
        /// The slot.
        slot: u32,
    },
}

/// An audit of a control plane.
pub struct Audit<'a, 'm> {
    plane: &'a ControlPlane<'m>,
}

impl<'a, 'm> Audit<'a, 'm> {
    /// Of `plane`.
    pub fn new(plane: &'a ControlPlane<'m>) -> Self {
        Self { plane }
    }

    /// How many slots are in which state.
    pub fn census(&self) -> Census {
        let mut census = Census::default();
        for meta in self.plane.slots {
            census.count(meta.load(Ordering::Acquire));
        }
        census
    }

    /// Pins held by `participant`, over all slots.
    pub fn pins_of(&self, participant: ParticipantId) -> u64 {
        (0..self.plane.slots.len() as u32)
            .map(|slot| u64::from(self.plane.pins.count(participant, slot)))
            .sum()
    }

    /// Pins held by anybody.
    pub fn pins(&self) -> u64 {
        self.everybody().map(|participant| self.pins_of(participant)).sum()
    }

    /// The key and state of `slot`, if it stands for one. The key is only
    /// certain while the slot does not change.
    pub fn slot(&self, slot: u32) -> Option<(ShardKey, Status)> {
        let meta = self.plane.slots.get(slot as usize)?;
        let status = meta.load(Ordering::Acquire).status();
        status.is_keyed().then(|| (meta.key(), status))
    }

    fn everybody(&self) -> impl Iterator<Item = ParticipantId> + use<'a, 'm> {
        (0..self.plane.geometry().shape.participants).map_while(ParticipantId::new)
    }

    /// Calls `report` with everything that is wrong. A byte of `liveness` that
    /// is held means alive. Quadratic nowhere: each keyed slot is looked up in
    /// its own two buckets.
    pub fn check(&self, liveness: &impl Liveness, mut report: impl FnMut(Violation)) {
        for (fingerprint, slot) in self.plane.index.all() {
            let Some(slot) = slot else {
                report(Violation::EntryWithoutSlot { fingerprint });
                continue;
            };
            let meta = &self.plane.slots[slot as usize];
            let status = meta.load(Ordering::Acquire).status();
            if u64::from(meta.key().hash().fingerprint()) != fingerprint {
                report(Violation::EntryOfAnotherKey { slot });
            } else if !status.is_keyed() && status != Status::Inserting {
                report(Violation::EntryOfUnkeyedSlot { slot, status });
            }
        }
        for (slot, meta) in (0_u32..).zip(self.plane.slots) {
            let word = meta.load(Ordering::Acquire);
            if word.has_waiters() && word.status() != Status::Loading {
                report(Violation::StrayWaiters { slot });
            }
            if let Some(owner) = word.owner()
                && !liveness.is_held(owner)
            {
                report(Violation::OwnerDead { slot, status: word.status(), owner });
            }
            if word.status().is_keyed() {
                self.check_keyed(slot, &meta.key(), &mut report);
            }
        }
        for participant in self.everybody().filter(|&participant| !liveness.is_held(participant)) {
            for slot in 0..self.plane.slots.len() as u32 {
                let pins = self.plane.pins.count(participant, slot);
                if pins != 0 {
                    report(Violation::PinOfDead { slot, participant, pins });
                }
            }
        }
    }

    fn check_keyed(&self, slot: u32, key: &ShardKey, report: &mut impl FnMut(Violation)) {
        let mut entries = 0;
        self.plane.index.find(key.hash(), |other| {
            if other == slot {
                entries += 1;
            } else if other > slot {
                let meta = &self.plane.slots[other as usize];
                if meta.load(Ordering::Acquire).status().is_keyed() && meta.key() == *key {
                    report(Violation::DuplicateKey { key: *key, slot, other });
                }
            }
            None::<()>
        });
        if entries != 1 {
            report(Violation::Entries { slot, entries });
        }
    }
}
