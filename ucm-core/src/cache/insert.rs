//! The miss path: claim, insert, scan, last exchange.
//!
//! Two inserters of one key each publish their entry and then look for the
//! other's, so at least one sees the other; the lower slot wins among
//! insertions, and whatever stands for the key already wins over all of them.

use crate::cache::ask::GetError;
use crate::cache::evict::Victim;
use crate::cache::handle::Cache;
use crate::cache::token::Loading;
use crate::crash::crash_point;
use crate::evict::clock::{Pool, mark_used};
use crate::host::Host;
use crate::key::{KeyHash, ShardKey};
use crate::segment::counters::Counter;
use crate::slot::word::{Status, Word};
use crate::sync::{Ordering, seqcst_order};

/// What became of an insertion.
pub(crate) enum Insertion {
    /// Done: mine to load.
    Owner(Loading),
    /// Something changed on the way.
    LookAgain,
    /// Every slot was in use just now.
    NoSlot,
}

/// Pause between two tries to find a slot when all are in use.
const NO_SLOT_PAUSE_NS: u64 = 200_000;

impl<H: Host> Cache<'_, H> {
    /// Inserts `key` as LOADING, owned and pinned by me.
    pub(crate) fn insert(
        &self,
        key: &ShardKey,
        hash: KeyHash,
        pool: Pool,
        deadline_ns: u64,
    ) -> Result<Insertion, GetError> {
        let tagged = match self.tag_victim(pool) {
            Some(tagged) => tagged,
            None => {
                // The dead may be holding what we need.
                self.reap_dead();
                if self.host.now_ns() >= deadline_ns {
                    self.add(Counter::NothingEvictable, 1);
                    return Err(GetError::NothingEvictable);
                }
                self.host.pause(NO_SLOT_PAUSE_NS);
                return Ok(Insertion::NoSlot);
            }
        };
        // Finding room takes a while; somebody may have been faster, and then
        // the victim may live.
        if self.find(key, hash).is_some() {
            self.untag(tagged);
            return Ok(Insertion::LookAgain);
        }
        let Some(victim) = self.commit(tagged) else { return Ok(Insertion::LookAgain) };
        crash_point!(InsertUnlisted);
        let loading = self.install(key, hash, victim, Status::Loading)?;
        Ok(loading.map_or(Insertion::LookAgain, Insertion::Owner))
    }

    /// Gives a claimed slot its new key and makes it findable. It ends as
    /// `last`: LOADING (pinned by me, and the token says so) or PREPARED
    /// (nobody's; the token only tells that it worked).
    pub(crate) fn install(
        &self,
        key: &ShardKey,
        hash: KeyHash,
        victim: Victim,
        last: Status,
    ) -> Result<Option<Loading>, GetError> {
        let Victim { slot, word: claimed } = victim;
        let meta = self.meta(slot);
        let pinned = last == Status::Loading;
        meta.set_key(key);
        mark_used(self.access(slot));
        crash_point!(InsertKeyed);
        if pinned && self.plane.pins.pin(self.me, slot).is_err() {
            self.set_free(victim);
            return Err(GetError::TooManyPins);
        }
        crash_point!(InsertPinned);
        let inserting = claimed.moved(Status::Inserting);
        if !meta.exchange(claimed, inserting) {
            return Err(GetError::Deadline); // taken for dead: nothing here is mine
        }
        crash_point!(InsertAnnounced);
        if !self.plane.index.publish(hash, slot) && !self.replace_resident(hash, slot) {
            self.withdraw(hash, slot, inserting, pinned);
            return Err(GetError::BucketsPinned);
        }
        crash_point!(InsertPublished);
        seqcst_order(); // twins: I published mine, now I look for yours
        if self.meets_twin(key, hash, slot) {
            self.withdraw(hash, slot, inserting, pinned);
            return Ok(None);
        }
        crash_point!(InsertScanned);
        let done = if pinned { inserting.moved(last) } else { inserting.released(last) };
        if !meta.exchange(inserting, done) {
            // Aborted by somebody who would not wait.
            self.withdraw(hash, slot, inserting, pinned);
            return Ok(None);
        }
        crash_point!(InsertDone);
        Ok(Some(Loading { slot, generation: done.generation() }))
    }

    /// Whether another slot has a better right to `key`. Insertions in higher
    /// slots are aborted on the way.
    fn meets_twin(&self, key: &ShardKey, hash: KeyHash, mine: u32) -> bool {
        self.plane
            .index
            .find_after_publish(hash, |slot| {
                (slot != mine && self.twin_wins(key, slot, mine)).then_some(())
            })
            .is_some()
    }

    fn twin_wins(&self, key: &ShardKey, slot: u32, mine: u32) -> bool {
        let meta = self.meta(slot);
        loop {
            let word = meta.load(Ordering::SeqCst);
            if !meta.has_key(key) {
                return false;
            }
            match word.status() {
                Status::Free | Status::Claimed | Status::Quarantined => return false,
                Status::Inserting if slot < mine => return true,
                // Ends: each turn the other has moved on or is aborted.
                Status::Inserting => self.abort_insertion(slot, word),
                Status::Loading | Status::Ready | Status::Failed | Status::Prepared => return true,
            }
        }
    }

    /// Takes an insertion back: entry out, pin off, FREE.
    fn withdraw(&self, hash: KeyHash, slot: u32, inserting: Word, pinned: bool) {
        self.add(Counter::Withdrawals, 1);
        let meta = self.meta(slot);
        let claimed = inserting.moved(Status::Claimed);
        // Fails if it was aborted: then that is what it is already.
        let _aborted = meta.exchange(inserting, claimed);
        crash_point!(WithdrawClaimed);
        self.plane.index.remove(hash, slot);
        crash_point!(WithdrawUnlisted);
        if pinned {
            self.plane.pins.unpin(self.me, slot);
        }
        self.set_free(Victim { slot, word: claimed });
    }

    /// Both buckets are full: take the place of a resident that may go.
    fn replace_resident(&self, hash: KeyHash, slot: u32) -> bool {
        self.add(Counter::BucketsFull, 1);
        for resident in self.plane.index.residents(hash) {
            if resident == slot {
                continue;
            }
            let Some(victim) = self.try_tag(resident, false).and_then(|tagged| self.commit(tagged))
            else {
                continue;
            };
            crash_point!(ReplaceCommitted);
            // The commit took the resident's entry out; the place is open to all.
            let listed = self.plane.index.publish(hash, slot);
            crash_point!(ReplaceSwapped);
            self.set_free(victim);
            if listed {
                return true;
            }
        }
        self.plane.index.publish(hash, slot)
    }
}
