//! The pin table: participant-major rows of 16-bit counters.
//!
//! A participant adds only to its own row, so ranks that share a hot key do
//! not share a cache line, and what a dead rank held vanishes with plain
//! stores. "Nobody holds it" means: zero in every row below the high-water mark.

use crate::index::probe::prefetch;
use crate::limits::MAX_PINS_PER_SLOT;
use crate::participant::ParticipantId;
use crate::segment::header::Header;
use crate::segment::health::poison;
use crate::sync::{AtomicU16, Ordering};

/// A view of the pins. `pins.len()` is `participants x row`.
#[derive(Clone, Copy)]
pub(crate) struct PinTable<'m> {
    pins: &'m [AtomicU16],
    row: u32,
    participants: u32,
    header: &'m Header,
}

/// A participant may not hold more pins on one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyPins;

impl<'m> PinTable<'m> {
    pub(crate) fn new(
        pins: &'m [AtomicU16],
        row: u32,
        participants: u32,
        header: &'m Header,
    ) -> Self {
        Self { pins, row, participants, header }
    }

    /// `slot` is below the slot count, which is at most `row`; participants
    /// are below the table's length: so the index is always in range.
    #[inline(always)]
    fn counter(&self, participant: u32, slot: u32) -> &'m AtomicU16 {
        &self.pins[participant as usize * self.row as usize + slot as usize]
    }

    #[inline(always)]
    pub(crate) fn prefetch(&self, me: ParticipantId, slot: u32) {
        prefetch(self.counter(me.index(), slot));
    }

    /// One more pin of `me`. The caller then loads the slot's state, SeqCst,
    /// and believes only what that says.
    #[inline(always)]
    pub(crate) fn pin(&self, me: ParticipantId, slot: u32) -> Result<(), TooManyPins> {
        let counter = self.counter(me.index(), slot);
        // SYNC(pin/state): SeqCst. "I pin, then read the state" against the
        // evictor's "I tag the state, then read the pins" (`any`): in the one
        // total order at least one of the two sees the other.
        let before = counter.fetch_add(1, Ordering::SeqCst);
        if before >= MAX_PINS_PER_SLOT {
            counter.fetch_sub(1, Ordering::Relaxed);
            return Err(TooManyPins);
        }
        Ok(())
    }

    /// One pin of `me` less.
    #[inline(always)]
    pub(crate) fn unpin(&self, me: ParticipantId, slot: u32) {
        // SYNC(pin): Release; pairs with the SeqCst (so Acquire) loads in
        // `any`: my reads of the bytes come before whoever overwrites them.
        let before = self.counter(me.index(), slot).fetch_sub(1, Ordering::Release);
        if before == 0 {
            self.take_back(me, slot);
        }
    }

    /// There was no pin: a stray write, or one given back twice. Either way
    /// nobody can tell any more what is held.
    #[cold]
    fn take_back(&self, me: ParticipantId, slot: u32) {
        self.counter(me.index(), slot).fetch_add(1, Ordering::Relaxed);
        poison(&self.header.health);
    }

    /// Whether evictors look at the row of `me`. The mark is only ever raised.
    pub(crate) fn is_admitted(&self, me: ParticipantId) -> bool {
        self.header.high_water.load(Ordering::Relaxed) > me.index() && !self.is_beyond_table()
    }

    /// Whether the mark is where no participant can be.
    pub(crate) fn is_beyond_table(&self) -> bool {
        self.header.high_water.load(Ordering::Relaxed) > self.participants
    }

    /// Participants that may have pinned anything so far.
    #[inline(always)]
    fn high_water(&self) -> u32 {
        // A claim from shared memory: never beyond the table.
        self.header.high_water.load(Ordering::SeqCst).min(self.participants)
    }

    /// Whether anybody holds `slot`.
    #[inline]
    pub(crate) fn any(&self, slot: u32) -> bool {
        let mut held = 0;
        for participant in 0..self.high_water() {
            // SYNC(pin/state): the evictor's half; see `pin`. Being SeqCst it is
            // also Acquire: SYNC(pin), the counterpart of `unpin`.
            held |= self.counter(participant, slot).load(Ordering::SeqCst);
        }
        held != 0
    }

    /// Whether `me` holds exactly one pin on `slot` and nobody else any.
    pub(crate) fn only_mine(&self, me: ParticipantId, slot: u32) -> bool {
        (0..self.high_water()).all(|participant| {
            let expected = u16::from(participant == me.index());
            self.counter(participant, slot).load(Ordering::SeqCst) == expected
        })
    }

    /// Room for `participant` in every check from now on. Comes before its first pin.
    pub(crate) fn admit(&self, participant: ParticipantId) {
        self.header.high_water.fetch_max(participant.index() + 1, Ordering::SeqCst);
    }

    /// Pins `participant` holds on `slot`.
    pub(crate) fn count(&self, participant: ParticipantId, slot: u32) -> u16 {
        self.counter(participant.index(), slot).load(Ordering::SeqCst)
    }

    /// Gives back everything `participant` held; returns how many pins that
    /// were. The caller holds the participant's byte.
    pub(crate) fn clear_row(&self, participant: ParticipantId, slot_count: u32) -> u64 {
        let mut cleared = 0;
        for slot in 0..slot_count {
            let counter = self.counter(participant.index(), slot);
            // Loads first: a row is nearly all zero, and reading leaves the
            // lines shared.
            let held = counter.load(Ordering::SeqCst);
            if held != 0 {
                counter.store(0, Ordering::SeqCst);
                cleared += u64::from(held);
            }
            crate::crash::crash_point!(ReapPins, slot % 32 == 0);
        }
        cleared
    }
}
