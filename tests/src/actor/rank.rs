//! A joined rank: keys by number, real bytes in the slots, and the board kept up to date.

use std::sync::Arc;

use ucm_core::cache::{GetError, WaitError};
use ucm_core::host::Waiter;
use ucm_core::limits::MAX_OWNER_DEATHS;
use ucm_core::participant::Role;
use ucm_core::slot::meta::LoadErrorCode;
use ucm_core::sync::{AtomicU64, Ordering};
use ucm_core::{Cache, Got, Loading, Pending, Pinned};
use ucm_posix::{Attachment, PosixHost, Segment};

use crate::board::{Board, Tally};
use crate::keys::{self, POISON, SLOT_WORDS, key};

/// The words of a slot. They are read and written as atomics by everybody in
/// these tests, so that a wrong byte is a finding and not undefined behaviour.
pub fn slot_words(segment: &Segment, slot: u32) -> Option<&[AtomicU64]> {
    let base = segment.slot_ptr(slot)?.cast::<AtomicU64>();
    // SAFETY: `slot_ptr` is valid for `shard_bytes` = SLOT_WORDS words while
    // the segment is attached, aligned to the stride (a power of two of at
    // least 64), and touched by atomics only.
    Some(unsafe { std::slice::from_raw_parts(base.as_ptr(), SLOT_WORDS) })
}

/// Writes words `range` of key `id`.
pub fn write_words(words: &[AtomicU64], id: u64, range: std::ops::Range<usize>) {
    for at in range {
        words[at].store(keys::payload_word(id, at), Ordering::Relaxed);
    }
}

/// How a shard was come by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// It was there.
    Hit,
    /// Loaded by this rank.
    Owner,
    /// Loaded by another one, meanwhile.
    Waited,
}

/// Why there is no shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// The get failed.
    Get(GetError),
    /// The wait failed.
    Wait(WaitError),
    /// Several owners died.
    OwnersDied,
    /// My publication was refused.
    Late,
    /// The helper would not write it; published as failed.
    Refused,
}

/// What is written in a load, and how it ends.
pub enum Filling<'a> {
    /// By this rank: the first half, then what `between` does, then the rest.
    Direct(&'a mut dyn FnMut()),
    /// By the helper process, this much later.
    Transfer(u64),
    /// Not at all: the load fails.
    Fail,
}

/// A rank of the cache.
pub struct Rank {
    attachment: Attachment,
    board: &'static Board,
    incarnation: u32,
}

impl Rank {
    /// Takes the place of `rank`.
    ///
    /// # Errors
    /// Those of joining.
    pub fn join(
        segment: Arc<Segment>,
        rank: u32,
        board: &'static Board,
    ) -> Result<Self, ucm_posix::JoinError> {
        let attachment = Attachment::join(segment, Role::Rank, Some(rank), None)?;
        Ok(Self { attachment, board, incarnation: board.next_incarnation() })
    }

    /// The cache as this rank.
    pub fn cache(&self) -> &Cache<'_, PosixHost> {
        self.attachment.cache()
    }

    /// The monotonic clock, `ms` from now.
    pub fn deadline_ns(&self, ms: u64) -> u64 {
        self.cache().host().now_ns().saturating_add(ms.saturating_mul(1_000_000))
    }

    /// Counts, and says on the standard error stream, what must not be.
    pub fn complain(&self, tally: Tally, what: std::fmt::Arguments<'_>) {
        self.board.count(tally);
        eprintln!("actor {} as rank {}: {what}", std::process::id(), self.attachment.me());
    }

    fn words(&self, slot: u32) -> &[AtomicU64] {
        slot_words(self.attachment.segment(), slot).unwrap_or_else(|| {
            self.complain(Tally::Impossible, format_args!("slot {slot} does not exist"));
            &[]
        })
    }

    /// Asks for key `id`. An owner is on the board from here on, and its slot poisoned.
    ///
    /// # Errors
    /// Those of the get.
    pub fn get(&self, id: u64, deadline_ns: u64) -> Result<Got, GetError> {
        let got = self.cache().get(&key(id), deadline_ns)?;
        if let Got::Owner(loading) = &got {
            self.board.own(id, self.incarnation);
            self.words(loading.slot())
                .iter()
                .for_each(|word| word.store(POISON, Ordering::Relaxed));
        }
        Ok(got)
    }

    /// Writes the first half of the bytes, or all of them.
    pub fn fill(&self, id: u64, loading: &Loading, whole: bool) {
        let count = keys::payload_words(id);
        let end = if whole { count } else { count / 2 };
        write_words(self.words(loading.slot()), id, 0..end);
    }

    fn disown(&self, id: u64) {
        if !self.board.disown(id, self.incarnation) {
            self.complain(Tally::Duplicates, format_args!("key {id} got a second owner"));
        }
    }

    /// The bytes are complete.
    ///
    /// # Errors
    /// This rank was taken for dead.
    pub fn publish(&self, id: u64, loading: Loading) -> Result<Pinned, Trouble> {
        self.disown(id);
        let length_bytes = (keys::payload_words(id) * size_of::<u64>()) as u32;
        let pinned = self
            .cache()
            .publish(loading, length_bytes, keys::checksum(id))
            .map_err(|_| Trouble::Late)?;
        self.board.count(Tally::Loads);
        Ok(pinned)
    }

    /// The load failed, with the key's code.
    ///
    /// # Errors
    /// This rank was taken for dead.
    pub fn fail(&self, id: u64, loading: Loading) -> Result<(), Trouble> {
        self.disown(id);
        let code = LoadErrorCode(keys::failure_code(id));
        self.cache().fail(loading, code).map_err(|_| Trouble::Late)?;
        self.board.count(Tally::Failures);
        Ok(())
    }

    /// Has the helper write the bytes, `delay_ns` from now.
    pub fn submit(&self, id: u64, loading: &Loading, delay_ns: u64) {
        let transfer = self.board.transfer(self.attachment.me().index(), self.incarnation);
        // A predecessor's; the helper ends it within its deadline.
        while transfer.stage.load(Ordering::SeqCst) == crate::board::stage::SUBMITTED {
            self.cache().host().pause(100_000);
        }
        let now_ns = self.cache().host().now_ns();
        transfer.slot.store(loading.slot(), Ordering::SeqCst);
        transfer.id.store(id, Ordering::SeqCst);
        transfer.submitted_ns.store(now_ns, Ordering::SeqCst);
        transfer.due_ns.store(now_ns + delay_ns, Ordering::SeqCst);
        transfer.stage.store(crate::board::stage::SUBMITTED, Ordering::SeqCst);
    }

    /// Waits for what was submitted; `false`: not written.
    fn transferred(&self) -> bool {
        let transfer = self.board.transfer(self.attachment.me().index(), self.incarnation);
        loop {
            match transfer.stage.load(Ordering::SeqCst) {
                crate::board::stage::SUBMITTED => self.cache().host().pause(100_000),
                stage => return stage == crate::board::stage::DONE,
            }
        }
    }

    /// Does what an owner does.
    fn load(&self, id: u64, loading: Loading, how: &mut Filling<'_>) -> Result<Pinned, Trouble> {
        match how {
            Filling::Direct(between) => {
                self.fill(id, &loading, false);
                between();
                self.fill(id, &loading, true);
                self.publish(id, loading)
            }
            Filling::Transfer(delay_ns) => {
                self.submit(id, &loading, *delay_ns);
                if self.transferred() {
                    self.publish(id, loading)
                } else {
                    self.fail(id, loading)?;
                    Err(Trouble::Refused)
                }
            }
            Filling::Fail => {
                self.fail(id, loading)?;
                Err(Trouble::Refused)
            }
        }
    }

    /// Comes by key `id` in whatever way, and checks its bytes.
    ///
    /// # Errors
    /// See [`Trouble`].
    pub fn acquire(
        &self,
        id: u64,
        get_ms: u64,
        wait_ms: u64,
        mut how: Filling<'_>,
    ) -> Result<(How, Pinned), Trouble> {
        for _ in 0..MAX_OWNER_DEATHS {
            match self.get(id, self.deadline_ns(get_ms)).map_err(Trouble::Get)? {
                Got::Hit(pinned) => {
                    self.board.count(Tally::Hits);
                    self.check(id, &pinned);
                    return Ok((How::Hit, pinned));
                }
                Got::Owner(loading) => {
                    let pinned = self.load(id, loading, &mut how)?;
                    self.check(id, &pinned);
                    return Ok((How::Owner, pinned));
                }
                Got::Wait(pending) => match self.wait(id, pending, wait_ms) {
                    Ok(pinned) => return Ok((How::Waited, pinned)),
                    Err(WaitError::OwnerDied) => {}
                    Err(error) => return Err(Trouble::Wait(error)),
                },
            }
        }
        self.board.count(Tally::GaveUp);
        Err(Trouble::OwnersDied)
    }

    /// Waits for somebody else's load, and checks its bytes.
    ///
    /// # Errors
    /// Those of the wait.
    pub fn wait(&self, id: u64, pending: Pending, ms: u64) -> Result<Pinned, WaitError> {
        match self.cache().wait(pending, self.deadline_ns(ms)) {
            Ok(pinned) => {
                self.board.count(Tally::Waited);
                self.check(id, &pinned);
                Ok(pinned)
            }
            Err(error) => {
                if error == WaitError::OwnerDied {
                    self.board.count(Tally::OwnerDeaths);
                }
                Err(error)
            }
        }
    }

    /// Compares the bytes of a pinned slot with what the key demands.
    pub fn check(&self, id: u64, pinned: &Pinned) -> bool {
        let slot = pinned.slot();
        let count = keys::payload_words(id);
        let stated = self.cache().payload(pinned);
        if stated != ((count * size_of::<u64>()) as u32, keys::checksum(id)) {
            self.complain(Tally::WrongBytes, format_args!("key {id} in slot {slot}: {stated:x?}"));
            return false;
        }
        let words = self.words(slot);
        let wrong = (0..count.min(words.len()))
            .find(|&at| words[at].load(Ordering::Relaxed) != keys::payload_word(id, at));
        if let Some(at) = wrong {
            let found = words[at].load(Ordering::Relaxed);
            self.complain(
                Tally::WrongBytes,
                format_args!("key {id} in slot {slot}: word {at} of {count} is {found:#x}"),
            );
        }
        wrong.is_none()
    }
}
