//! The hit path: probe, pin, look again.

use crate::cache::ask::{Ask, GetError, Mode};
use crate::cache::handle::Cache;
use crate::cache::insert::Insertion;
use crate::cache::token::{Got, Loading, Pending, Pinned};
use crate::crash::crash_point;
use crate::evict::clock::mark_used;
use crate::host::Host;
use crate::index::probe::prefetch;
use crate::key::{KeyHash, ShardKey};
use crate::limits::{INSERT_PAUSE_NS, INSERT_PAUSES, INSERT_SPINS};
use crate::segment::counters::Counter;
use crate::slot::meta::LoadErrorCode;
use crate::slot::word::{Status, Word};
use crate::sync::{Ordering, seqcst_order, spin_hint};

enum Attempt {
    Done(Got),
    Again,
    /// Failed, and somebody else holds it: not mine to retry yet.
    FailedBusy(LoadErrorCode),
    Absent,
}

/// Attempts between two looks at the clock; none of them waits for anybody
/// longer than a few pauses.
const ATTEMPTS_PER_LOOK: u32 = if cfg!(ucm_loom) { 2 } else { 16 };

impl<H: Host> Cache<'_, H> {
    /// Asks for a shard. Returns at once unless every slot is in use: then it
    /// tries until `deadline_ns` (on the host's clock).
    #[inline]
    pub fn get(&self, key: &ShardKey, deadline_ns: u64) -> Result<Got, GetError> {
        self.get_with(key, Ask::PLAIN, deadline_ns)
    }

    /// As [`get`](Self::get), asked for in the given way.
    #[inline]
    pub fn get_with(&self, key: &ShardKey, ask: Ask, deadline_ns: u64) -> Result<Got, GetError> {
        if self.plane.is_poisoned() {
            return Err(GetError::Poisoned);
        }
        let hash = key.hash();
        // The first attempt is the hot path and stands alone.
        match self.attempt(key, hash, ask.mode)? {
            Attempt::Done(got) => Ok(got),
            other => self.get_slowly(key, hash, ask, deadline_ns, other),
        }
    }

    #[cold]
    fn get_slowly(
        &self,
        key: &ShardKey,
        hash: KeyHash,
        ask: Ask,
        deadline_ns: u64,
        mut outcome: Attempt,
    ) -> Result<Got, GetError> {
        let mut attempts = 0_u32;
        let mut failed_looks = 0;
        let mut starved = false;
        loop {
            match outcome {
                Attempt::Done(got) => return Ok(got),
                Attempt::Again => {}
                Attempt::FailedBusy(code) => {
                    // Others who come for the same key now pin it for a moment
                    // too; a few looks find a gap, and a real audience stays.
                    failed_looks += 1;
                    if failed_looks > 8 {
                        return Err(GetError::Failed(code));
                    }
                    self.host.pause(u64::from(self.me.index() + 1) * 500);
                }
                Attempt::Absent => {
                    let insertion = self.insert(key, hash, ask.pool, deadline_ns)?;
                    starved = matches!(insertion, Insertion::NoSlot);
                    if let Insertion::Owner(loading) = insertion {
                        self.add(Counter::Owned, 1);
                        return Ok(Got::Owner(loading));
                    }
                }
            }
            attempts += 1;
            if attempts.is_multiple_of(ATTEMPTS_PER_LOOK) {
                self.check_health();
                if self.plane.is_poisoned() {
                    return Err(GetError::Poisoned);
                }
            }
            if attempts.is_multiple_of(ATTEMPTS_PER_LOOK) && self.host.now_ns() > deadline_ns {
                // Say what it was that took so long.
                let error = if starved { GetError::NothingEvictable } else { GetError::Deadline };
                return Err(error);
            }
            outcome = self.attempt(key, hash, ask.mode)?;
        }
    }

    /// One look: find a slot that stands for the key, pin it, and act on what
    /// its state says now.
    #[inline]
    fn attempt(&self, key: &ShardKey, hash: KeyHash, mode: Mode) -> Result<Attempt, GetError> {
        let Some(slot) = self.find(key, hash) else { return Ok(Attempt::Absent) };
        crash_point!(GetFound);
        self.plane.pins.pin(self.me, slot).map_err(|_| GetError::TooManyPins)?;
        seqcst_order(); // pin/state: I pinned, now I read the state
        crash_point!(GetPinned);
        let meta = self.meta(slot);
        // SYNC(pin/state): SeqCst, the reader's second half; also Acquire for
        // the bytes and the key (pairs with the exchange in `publish`).
        let word = meta.load(Ordering::SeqCst);
        if word.is_plain_ready() && mode == Mode::Cached && meta.has_key(key) {
            mark_used(self.access(slot));
            crash_point!(GetHit);
            return Ok(Attempt::Done(Got::Hit(Pinned { slot })));
        }
        Ok(self.attempt_pinned(key, slot, word, mode))
    }

    /// The rest of [`attempt`](Self::attempt): any state but the plain hit.
    #[cold]
    fn attempt_pinned(&self, key: &ShardKey, slot: u32, word: Word, mode: Mode) -> Attempt {
        let meta = self.meta(slot);
        let unpin = || self.plane.pins.unpin(self.me, slot);
        // While pinned a keyed slot keeps its key, so this cannot go stale.
        if !meta.has_key(key) {
            unpin();
            return Attempt::Again;
        }
        match word.status() {
            Status::Free | Status::Claimed | Status::Quarantined => {
                unpin();
                Attempt::Again
            }
            Status::Inserting => {
                unpin();
                self.outwait_insertion(slot, word);
                Attempt::Again
            }
            Status::Loading => {
                Attempt::Done(Got::Wait(Pending { slot, generation: word.generation() }))
            }
            Status::Ready if mode == Mode::Reload && word.owner().is_none() => {
                self.attempt_reload(slot, word)
            }
            Status::Ready => {
                // Only this very word was seen with my pin in place, so only
                // it proves anything: a word read later may be another key's.
                if word.owner().is_some() {
                    // Somebody is about to evict it: take it back. The new
                    // generation makes the commit fail.
                    if !meta.exchange(word, word.untagged()) {
                        unpin();
                        return Attempt::Again;
                    }
                    self.add(Counter::TagsCancelled, 1);
                }
                mark_used(self.access(slot));
                Attempt::Done(Got::Hit(Pinned { slot }))
            }
            Status::Failed if !self.plane.pins.only_mine(self.me, slot) => {
                // The audience of that failure must be able to read its code.
                let code = meta.error(word.generation());
                unpin();
                Attempt::FailedBusy(code)
            }
            Status::Failed | Status::Prepared => {
                // A new generation, so a tagger's commit fails as well.
                let taken = word.reloading(self.me);
                if !meta.exchange(word, taken) {
                    unpin();
                    return Attempt::Again;
                }
                crash_point!(GetTookOver);
                if word.status() == Status::Prepared {
                    self.add(Counter::PreparedUsed, 1);
                }
                self.add(Counter::Owned, 1);
                mark_used(self.access(slot));
                Attempt::Done(Got::Owner(Loading { slot, generation: taken.generation() }))
            }
        }
    }

    /// READY -> LOADING by the tag, check, commit of an eviction, except that
    /// one pin, mine, is expected. While others copy from it, it is a hit.
    fn attempt_reload(&self, slot: u32, word: Word) -> Attempt {
        let meta = self.meta(slot);
        let tagged = word.tagged(self.me);
        let mut moved = meta.exchange(word, tagged);
        if moved {
            seqcst_order(); // pin/state: I tagged, now I read the pins
            let alone = self.plane.pins.only_mine(self.me, slot);
            let to = if alone { word.reloading(self.me) } else { tagged.untagged() };
            moved = meta.exchange(tagged, to);
            if moved && alone {
                self.add(Counter::ForcedReloads, 1);
                return Attempt::Done(Got::Owner(Loading { slot, generation: to.generation() }));
            }
        }
        if !moved {
            self.plane.pins.unpin(self.me, slot);
            return Attempt::Again;
        }
        mark_used(self.access(slot));
        Attempt::Done(Got::Hit(Pinned { slot }))
    }

    /// The first slot that stands for `key`, not pinned. The key is compared
    /// before pinning: pins on strangers would starve eviction.
    #[inline(always)]
    pub(crate) fn find(&self, key: &ShardKey, hash: KeyHash) -> Option<u32> {
        self.plane.index.find(hash, |slot| {
            let meta = self.meta(slot);
            // The lines that a hit writes and reads next, while this one comes.
            self.plane.pins.prefetch(self.me, slot);
            prefetch(self.access(slot));
            let status = meta.load(Ordering::Acquire).status();
            let stands = status.is_keyed() || status == Status::Inserting;
            (stands && meta.has_key(key)).then_some(slot)
        })
    }

    /// Somebody is inserting this key. That takes well under a microsecond
    /// unless they were stopped: look for a moment, then abort it.
    fn outwait_insertion(&self, slot: u32, word: Word) {
        let meta = self.meta(slot);
        for look in 0..INSERT_SPINS + INSERT_PAUSES {
            if meta.load(Ordering::Acquire) != word {
                return;
            }
            if look < INSERT_SPINS {
                spin_hint();
            } else {
                self.host.pause(INSERT_PAUSE_NS);
            }
            if cfg!(ucm_loom) {
                break;
            }
        }
        self.abort_insertion(slot, word);
    }

    /// INSERTING -> CLAIMED of the same owner: its last exchange fails and it
    /// withdraws. If it is dead, its reaper does.
    pub(crate) fn abort_insertion(&self, slot: u32, word: Word) {
        crash_point!(GetAborting);
        if self.meta(slot).exchange(word, word.moved(Status::Claimed)) {
            self.add(Counter::InsertsAborted, 1);
        }
    }

    /// Asks for many shards: a task's keys, in three stages of prefetching,
    /// so that their cache misses overlap. `each` gets every key's outcome, in order.
    pub fn get_many(
        &self,
        keys: &[ShardKey],
        deadline_ns: u64,
        mut each: impl FnMut(&ShardKey, Result<Got, GetError>),
    ) {
        const STAGE: usize = 16;
        for chunk in keys.chunks(STAGE) {
            let mut hashes = heapless::Vec::<KeyHash, STAGE>::new();
            for key in chunk {
                let hash = key.hash();
                self.plane.index.prefetch(hash);
                // A chunk is never longer than the vector.
                let _fits = hashes.push(hash);
            }
            for &hash in &hashes {
                self.plane.index.find(hash, |slot| {
                    prefetch(self.meta(slot));
                    prefetch(self.access(slot));
                    self.plane.pins.prefetch(self.me, slot);
                    Some(())
                });
            }
            for (key, &hash) in chunk.iter().zip(&hashes) {
                if self.plane.is_poisoned() {
                    each(key, Err(GetError::Poisoned));
                    continue;
                }
                let got = match self.attempt(key, hash, Mode::Cached) {
                    Ok(Attempt::Done(got)) => Ok(got),
                    Ok(other) => self.get_slowly(key, hash, Ask::PLAIN, deadline_ns, other),
                    Err(error) => Err(error),
                };
                each(key, got);
            }
        }
    }

    /// Gives a pin back.
    #[inline(always)]
    pub fn release(&self, pinned: Pinned) {
        crash_point!(ReleaseStart);
        self.plane.pins.unpin(self.me, pinned.slot);
        crash_point!(ReleaseDone);
    }

    /// The length and checksum that the owner of a READY slot stated.
    pub fn payload(&self, pinned: &Pinned) -> (u32, u64) {
        self.meta(pinned.slot).payload()
    }
}
