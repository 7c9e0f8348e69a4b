//! The state word of a slot: its codec and its legal moves. Pure, no atomics.

use crate::limits::GENERATION_BITS;
use crate::participant::ParticipantId;

/// Where a slot is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Status {
    /// Holds nothing.
    Free = 0,
    /// Taken by its owner for a new key; holds nothing any more.
    Claimed = 1,
    /// Keyed; its owner is making it known and looks for twins.
    Inserting = 2,
    /// Its owner is filling it.
    Loading = 3,
    /// Filled. With an owner: tagged by somebody who wants to evict it.
    Ready = 4,
    /// The load failed; the error word says why. May be tagged too.
    Failed = 5,
    /// Keyed ahead of time, not loaded, unowned. May be tagged too.
    Prepared = 6,
    /// Its owner died while it was loading: IO may still be writing into it.
    Quarantined = 7,
}

impl Status {
    const fn from_bits(bits: u32) -> Self {
        match bits & 7 {
            0 => Self::Free,
            1 => Self::Claimed,
            2 => Self::Inserting,
            3 => Self::Loading,
            4 => Self::Ready,
            5 => Self::Failed,
            6 => Self::Prepared,
            _ => Self::Quarantined,
        }
    }

    /// Whether the slot stands for its key: whoever looks for the key stops here.
    #[inline(always)]
    pub const fn is_keyed(self) -> bool {
        matches!(self, Self::Loading | Self::Ready | Self::Failed | Self::Prepared)
    }

    /// Whether an evictor may tag it.
    #[inline(always)]
    pub const fn is_evictable(self) -> bool {
        matches!(self, Self::Ready | Self::Failed | Self::Prepared)
    }
}

/// `status:3 | waiters:1 | owner:8 | generation:20`. Owner 0 is nobody, else
/// it is the participant plus one, so a zeroed segment is all free slots.
///
/// The word is the futex word. The waiters bit is set only while Loading.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Word(pub u32);

const WAITERS: u32 = 1 << 3;
const OWNER_SHIFT: u32 = 4;
const OWNER_MASK: u32 = 0xff << OWNER_SHIFT;
const GENERATION_SHIFT: u32 = 12;
static_assertions::const_assert_eq!(GENERATION_SHIFT + GENERATION_BITS, 32);

/// Counts the takings of a slot, modulo 2^20.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Generation(u32);

impl Generation {
    /// The next one.
    #[inline(always)]
    pub const fn next(self) -> Self {
        Self((self.0 + 1) & ((1 << GENERATION_BITS) - 1))
    }

    /// As a number below 2^20.
    #[inline(always)]
    pub const fn number(self) -> u32 {
        self.0
    }
}

impl Word {
    #[inline(always)]
    const fn make(status: Status, owner_bits: u32, generation: Generation) -> Self {
        Self(status as u32 | owner_bits | generation.0 << GENERATION_SHIFT)
    }

    /// What the slot is.
    #[inline(always)]
    pub const fn status(self) -> Status {
        Status::from_bits(self.0)
    }

    /// Whether somebody sleeps on the word.
    #[inline(always)]
    pub const fn has_waiters(self) -> bool {
        self.0 & WAITERS != 0
    }

    /// Who owns (or tagged) the slot.
    #[inline(always)]
    pub const fn owner(self) -> Option<ParticipantId> {
        match (self.0 & OWNER_MASK) >> OWNER_SHIFT {
            0 => None,
            plus_one => Some(ParticipantId((plus_one - 1) as u8)),
        }
    }

    /// How often the slot was taken.
    #[inline(always)]
    pub const fn generation(self) -> Generation {
        Generation(self.0 >> GENERATION_SHIFT)
    }

    /// Whether any move leads to this word, in a table of so many participants.
    pub const fn is_possible(self, participants: u32) -> bool {
        let owned = match self.owner() {
            Some(owner) if owner.0 as u32 >= participants => return false,
            owner => owner.is_some(),
        };
        match self.status() {
            Status::Free | Status::Quarantined => !owned && !self.has_waiters(),
            Status::Claimed | Status::Inserting => owned && !self.has_waiters(),
            Status::Loading => owned,
            Status::Ready | Status::Failed | Status::Prepared => !self.has_waiters(),
        }
    }

    /// The same word without the waiters bit.
    #[inline(always)]
    pub const fn without_waiters(self) -> Self {
        Self(self.0 & !WAITERS)
    }

    /// Loading, with a sleeper.
    #[inline(always)]
    pub const fn with_waiters(self) -> Self {
        Self(self.0 | WAITERS)
    }

    /// READY and nobody's tag on it: what the hit path hopes for.
    #[inline(always)]
    pub const fn is_plain_ready(self) -> bool {
        self.0 & (7 | WAITERS | OWNER_MASK) == Status::Ready as u32
    }

    /// An unowned evictable slot, tagged by `me`: status and generation stay.
    #[inline(always)]
    pub const fn tagged(self, me: ParticipantId) -> Self {
        Self::make(self.status(), owner_bits(me), self.generation())
    }

    /// The tag taken off; a new generation, so the tagger's commit fails.
    #[inline(always)]
    pub const fn untagged(self) -> Self {
        Self::make(self.status(), 0, self.generation().next())
    }

    /// Taken for good, by `me`.
    #[inline(always)]
    pub const fn claimed(self, me: ParticipantId) -> Self {
        Self::make(Status::Claimed, owner_bits(me), self.generation().next())
    }

    /// The owner's next state in the same generation, without waiters.
    #[inline(always)]
    pub const fn moved(self, status: Status) -> Self {
        Self::make(status, self.0 & OWNER_MASK, self.generation())
    }

    /// `status`, nobody's, same generation.
    #[inline(always)]
    pub const fn released(self, status: Status) -> Self {
        Self::make(status, 0, self.generation())
    }

    /// Loading by `me`, in a new generation (from Prepared, Failed, or my own tag).
    #[inline(always)]
    pub const fn reloading(self, me: ParticipantId) -> Self {
        Self::make(Status::Loading, owner_bits(me), self.generation().next())
    }
}

#[inline(always)]
const fn owner_bits(owner: ParticipantId) -> u32 {
    (owner.0 as u32 + 1) << OWNER_SHIFT
}

impl core::fmt::Debug for Word {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?}#{}", self.status(), self.generation().number())?;
        if let Some(owner) = self.owner() {
            write!(f, " by {owner}")?;
        }
        if self.has_waiters() { f.write_str(" +waiters") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::MAX_PARTICIPANTS;

    const ALL: [Status; 8] = [
        Status::Free,
        Status::Claimed,
        Status::Inserting,
        Status::Loading,
        Status::Ready,
        Status::Failed,
        Status::Prepared,
        Status::Quarantined,
    ];

    fn every_word() -> impl Iterator<Item = Word> {
        ALL.into_iter().flat_map(|status| {
            (0..=MAX_PARTICIPANTS).flat_map(move |owner_bits| {
                [0, 1, 77, (1 << GENERATION_BITS) - 1].into_iter().map(move |generation| {
                    Word::make(status, owner_bits << OWNER_SHIFT, Generation(generation))
                })
            })
        })
    }

    #[test]
    fn a_zeroed_word_is_free_and_nobodys() {
        let word = Word(0);
        assert_eq!((word.status(), word.owner(), word.has_waiters()), (Status::Free, None, false));
    }

    #[test]
    fn every_move_changes_only_what_it_says() {
        let me = ParticipantId(41);
        for word in every_word() {
            let next = word.generation().next();
            let tagged = word.tagged(me);
            assert_eq!((tagged.status(), tagged.generation()), (word.status(), word.generation()));
            assert_eq!(tagged.owner(), Some(me));
            assert_eq!((word.untagged().owner(), word.untagged().generation()), (None, next));
            assert_eq!(word.untagged().status(), word.status());
            let claimed = word.claimed(me);
            assert_eq!((claimed.status(), claimed.generation()), (Status::Claimed, next));
            for status in ALL {
                assert_eq!(word.moved(status).owner(), word.owner());
                assert_eq!(word.moved(status).status(), status);
                assert_eq!(word.moved(status).generation(), word.generation());
                assert_eq!(word.released(status).owner(), None);
            }
            assert_eq!(word.with_waiters().without_waiters(), word);
            assert!(!word.reloading(me).has_waiters());
        }
    }

    #[test]
    fn plain_ready_means_ready_without_owner_or_waiters() {
        for word in every_word() {
            for word in [word, word.with_waiters()] {
                let plain =
                    word.status() == Status::Ready && word.owner().is_none() && !word.has_waiters();
                assert_eq!(word.is_plain_ready(), plain, "{word:?}");
            }
        }
    }

    #[test]
    fn every_move_of_a_possible_word_leads_to_a_possible_one() {
        let me = ParticipantId(3);
        let possible = |word: Word| word.is_possible(MAX_PARTICIPANTS);
        assert!(possible(Word(0)));
        for word in every_word().filter(|&word| possible(word)) {
            assert!(possible(word.claimed(me)) && possible(word.reloading(me)));
            assert!(possible(word.moved(Status::Claimed)) == word.owner().is_some());
            assert!(possible(word.released(Status::Free)));
            assert!(possible(word.released(Status::Quarantined)));
            if word.status().is_evictable() {
                assert!(possible(word.tagged(me)) && possible(word.untagged()));
            }
            if word.status() == Status::Loading {
                assert!(possible(word.with_waiters()) && !word.is_possible(0));
            }
        }
        assert!(!possible(Word::make(Status::Free, owner_bits(me), Generation(0))));
        assert!(!possible(Word::make(Status::Loading, 0, Generation(0))));
        assert!(!possible(Word::make(Status::Ready, 0, Generation(0)).with_waiters()));
        assert!(!possible(Word::make(Status::Ready, 255 << OWNER_SHIFT, Generation(0))));
    }

    #[test]
    fn a_generation_wraps_within_its_bits() {
        let last = Generation((1 << GENERATION_BITS) - 1);
        assert_eq!(last.next(), Generation(0));
    }
}
