//! Waiting for somebody else's load.

use crate::cache::ask::{GetError, WaitError};
use crate::cache::handle::Cache;
use crate::cache::token::{Loading, Pending, Pinned, Progress};
use crate::crash::crash_point;
use crate::evict::clock::mark_used;
use crate::host::Host;
use crate::limits::{WAIT_SLICE_NS, WAIT_SPINS};
use crate::segment::counters::Counter;
use crate::slot::word::Status;
use crate::sync::{AtomicU32, Ordering, spin_hint};

impl<H: Host> Cache<'_, H> {
    /// A place in the audience of my own load, with a pin of its own: for an
    /// owner whose bytes are written by one thread and used by another.
    pub fn follow(&self, loading: &Loading) -> Result<Pending, GetError> {
        self.plane.pins.pin(self.me, loading.slot).map_err(|_| GetError::TooManyPins)?;
        Ok(Pending { slot: loading.slot, generation: loading.generation })
    }

    /// How the load stands: one acquire load.
    #[inline]
    pub fn poll(&self, pending: &Pending) -> Progress {
        let meta = self.meta(pending.slot);
        // SYNC(slot.state): Acquire; pairs with the exchange in `publish` and
        // covers the bytes, or the error code stored before it.
        let word = meta.load(Ordering::Acquire);
        let same = word.generation() == pending.generation;
        match word.status() {
            Status::Loading if same => Progress::Loading,
            // My pin has kept the key; a tag put on and taken off may have
            // moved the generation on.
            Status::Ready => Progress::Ready,
            Status::Quarantined | Status::Free if same => Progress::OwnerDied,
            _ => Progress::Failed(meta.error(pending.generation)),
        }
    }

    /// Turns a load that [`poll`](Self::poll) called finished into its result.
    /// While it is still under way the token comes back.
    pub fn settle(&self, pending: Pending) -> Result<Result<Pinned, WaitError>, Pending> {
        let slot = pending.slot;
        let failed = |error| {
            self.plane.pins.unpin(self.me, slot);
            Ok(Err(error))
        };
        match self.poll(&pending) {
            Progress::Loading => Err(pending),
            Progress::Ready => {
                mark_used(self.access(slot));
                Ok(Ok(Pinned { slot }))
            }
            Progress::Failed(code) => failed(WaitError::Failed(code)),
            Progress::OwnerDied => {
                self.add(Counter::OwnerDeathsSeen, 1);
                failed(WaitError::OwnerDied)
            }
        }
    }

    /// Stops waiting.
    pub fn cancel(&self, pending: Pending) {
        self.plane.pins.unpin(self.me, pending.slot);
    }

    /// Waits for somebody else's load: a short spin, then asleep on the state
    /// word, in slices, because the one who should wake us may die first.
    pub fn wait(&self, pending: Pending, deadline_ns: u64) -> Result<Pinned, WaitError> {
        let mut pending = pending;
        let mut spins = 0;
        loop {
            pending = match self.settle(pending) {
                Ok(result) => return result,
                Err(pending) => pending,
            };
            if spins < WAIT_SPINS && !cfg!(ucm_loom) {
                spins += 1;
                spin_hint();
                continue;
            }
            let Some((word, expected)) = self.arm(&pending) else { continue };
            let now_ns = self.host.now_ns();
            if now_ns >= deadline_ns {
                self.cancel(pending);
                return Err(WaitError::Deadline);
            }
            self.host.wait(word, expected, WAIT_SLICE_NS.min(deadline_ns - now_ns));
            crash_point!(WaitOver);
            // A wake-up is the common case. Only when the slice ran out in
            // vain is it worth asking whether the owner still lives.
            if self.host.now_ns() - now_ns >= WAIT_SLICE_NS {
                self.look_after_owner(&pending);
                if self.plane.is_poisoned() {
                    self.cancel(pending);
                    return Err(WaitError::Poisoned);
                }
            }
        }
    }

    /// Announces a sleeper on the load's state word, for a caller that sleeps
    /// on several. Returns what to hand to `Waiter::wait_any`; `None` when the
    /// load is over, or changed just now: look again.
    pub fn arm(&self, pending: &Pending) -> Option<(&AtomicU32, u32)> {
        let meta = self.meta(pending.slot);
        let word = meta.load(Ordering::Acquire);
        if word.status() != Status::Loading || word.generation() != pending.generation {
            return None;
        }
        // In the same word as the state: whoever changes the state sees it.
        let armed = word.with_waiters();
        if !word.has_waiters() && !meta.exchange(word, armed) {
            return None;
        }
        crash_point!(WaitArmed);
        Some((meta.state_word(), armed.0))
    }

    /// For a waiter whose slice ran out: if the load's owner is dead, reap it.
    pub fn look_after_owner(&self, pending: &Pending) {
        self.check_health();
        let word = self.meta(pending.slot).load(Ordering::Acquire);
        let same = word.status() == Status::Loading && word.generation() == pending.generation;
        if let Some(owner) = word.owner().filter(|_| same)
            && !self.host.is_held(owner)
        {
            self.reap(owner);
        }
    }
}
