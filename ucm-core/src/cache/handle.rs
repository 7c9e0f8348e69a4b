//! The handle: a participant in a control plane, from join to leave.

use core::fmt;
use core::mem::ManuallyDrop;

use crate::cache::token::Eviction;
use crate::crash::crash_point;
use crate::host::Host;
use crate::participant::{Introduction, ParticipantEntry, ParticipantId};
use crate::segment::attach::ControlPlane;
use crate::segment::counters::{Counter, CounterBlock};
use crate::slot::meta::SlotMeta;
use crate::sync::AtomicU8;

/// Which place of the participant table a joiner wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// That of this rank, `0..local_rank_size`.
    Rank(u32),
    /// Any behind the ranks': scouts.
    Any,
}

/// Why joining did not work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum JoinError {
    /// The rank is alive already.
    RankTaken {
        /// Which rank.
        rank: u32,
        /// Its process id, in its own namespace.
        pid: u32,
    },
    /// There is no such rank here.
    RankOutOfRange {
        /// Which rank.
        rank: u32,
        /// How many there are.
        local_rank_size: u32,
    },
    /// The segment was found wrong while it was in use.
    Poisoned,
    /// Every place is taken by a live participant.
    TableFull {
        /// How many places there are.
        participants: u32,
    },
}

impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RankTaken { rank, pid } => write!(
                f,
                "rank {rank} is taken by a live process (pid {pid}); give each process its own rank"
            ),
            Self::RankOutOfRange { rank, local_rank_size } => write!(
                f,
                "rank {rank} is out of range: local_rank_size is {local_rank_size}, \
                 so ranks are 0..={}",
                local_rank_size.saturating_sub(1)
            ),
            Self::Poisoned => f.write_str(crate::cache::POISONED),
            Self::TableFull { participants } => write!(
                f,
                "all {participants} places for participants are taken; raise `participants`"
            ),
        }
    }
}

impl core::error::Error for JoinError {}

/// A participant. Threads of one process may share it by reference.
///
/// Dropping it leaves, as [`leave`](Self::leave) does.
pub struct Cache<'m, H: Host> {
    pub(crate) plane: ControlPlane<'m>,
    pub(crate) me: ParticipantId,
    pub(crate) host: H,
    /// My lock byte. Dropped last of all, in `Drop`.
    claim: ManuallyDrop<H::Claim>,
    pub(crate) on_evict: Option<fn(&H, &Eviction)>,
}

impl<'m, H: Host> Cache<'m, H> {
    /// Takes part: takes the lock byte of a place, repairs what a dead
    /// predecessor left there, and enters the table.
    pub fn join(
        plane: ControlPlane<'m>,
        host: H,
        place: Place,
        who: Introduction,
    ) -> Result<Self, JoinError> {
        if plane.is_poisoned() {
            return Err(JoinError::Poisoned);
        }
        let shape = plane.geometry().shape;
        let places = match place {
            Place::Rank(rank) if rank >= shape.local_rank_size => {
                return Err(JoinError::RankOutOfRange {
                    rank,
                    local_rank_size: shape.local_rank_size,
                });
            }
            Place::Rank(rank) => rank..rank + 1,
            Place::Any => shape.local_rank_size..shape.participants,
        };
        for me in places.filter_map(ParticipantId::new) {
            let Some(claim) = host.try_claim(me) else { continue };
            crash_point!(JoinLocked);
            let mut cache =
                Self { plane, me, host, claim: ManuallyDrop::new(claim), on_evict: None };
            // The byte is mine, so whoever the entry still names is dead.
            if cache.entry(me).is_live() {
                cache.repair(me);
                cache.entry(me).vacate();
            }
            cache.plane.pins.admit(me);
            crash_point!(JoinAdmitted);
            cache.entry(me).occupy(&who);
            crash_point!(JoinOccupied);
            cache.on_evict = None;
            return Ok(cache);
        }
        Err(match place {
            Place::Rank(rank) => JoinError::RankTaken {
                rank,
                pid: plane.participants.get(rank as usize).map_or(0, |entry| entry.view().pid),
            },
            Place::Any => JoinError::TableFull { participants: shape.participants },
        })
    }

    /// Leaves: gives back every pin and claim, frees the entry, drops the byte.
    pub fn leave(self) {
        drop(self);
    }

    /// Has `observer` called after every eviction of a READY shard. The time it
    /// gets is from just before, so that an event order can be built from it.
    pub fn observe_evictions(&mut self, observer: fn(&H, &Eviction)) {
        self.on_evict = Some(observer);
    }

    /// My place.
    pub fn me(&self) -> ParticipantId {
        self.me
    }

    /// The host I was given.
    pub fn host(&self) -> &H {
        &self.host
    }

    /// The host I was given, to change before others share me.
    pub fn host_mut(&mut self) -> &mut H {
        &mut self.host
    }

    /// The control plane.
    pub fn plane(&self) -> &ControlPlane<'m> {
        &self.plane
    }

    /// Adds to one of my counters.
    #[inline]
    pub fn add(&self, counter: Counter, n: u64) {
        self.counters().add(counter, n);
    }

    fn counters(&self) -> &'m CounterBlock {
        &self.plane.counters[self.me.index() as usize]
    }

    pub(crate) fn entry(&self, participant: ParticipantId) -> &'m ParticipantEntry {
        &self.plane.participants[participant.index() as usize]
    }

    /// The metadata of a slot; `slot` comes from the index (checked there) or a token.
    #[inline(always)]
    pub(crate) fn meta(&self, slot: u32) -> &'m SlotMeta {
        &self.plane.slots[slot as usize]
    }

    #[inline(always)]
    pub(crate) fn access(&self, slot: u32) -> &'m AtomicU8 {
        &self.plane.access[slot as usize]
    }
}

impl<H: Host> Drop for Cache<'_, H> {
    fn drop(&mut self) {
        // Tokens that were never given back, and loads that nobody will
        // finish, are treated as a dead participant's would be.
        self.repair(self.me);
        crash_point!(LeaveRepaired);
        self.entry(self.me).vacate();
        // SAFETY: dropped here once; the byte goes after everything else.
        unsafe { ManuallyDrop::drop(&mut self.claim) }
    }
}

impl<H: Host> fmt::Debug for Cache<'_, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").field("me", &self.me).finish_non_exhaustive()
    }
}
