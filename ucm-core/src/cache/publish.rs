//! The end of a load: READY or FAILED, and the waiters woken.

use crate::cache::handle::Cache;
use crate::cache::token::{Loading, Pinned};
use crate::crash::crash_point;
use crate::host::Host;
use crate::segment::counters::Counter;
use crate::slot::meta::LoadErrorCode;
use crate::slot::word::{Status, Word};
use crate::sync::Ordering;

/// This participant was taken for dead and its load given away: nothing of it
/// may be used any more. A live participant never sees this, because the lock
/// byte it holds forbids it; a copy of one (a forked child) could.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reaped;

impl core::fmt::Display for Reaped {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("this participant was reaped: its lock byte is gone")
    }
}

impl core::error::Error for Reaped {}

impl<H: Host> Cache<'_, H> {
    /// The last byte is in place: everybody may read. My pin stays.
    pub fn publish(
        &self,
        loading: Loading,
        length_bytes: u32,
        checksum: u64,
    ) -> Result<Pinned, Reaped> {
        crash_point!(PublishStart);
        let slot = loading.slot;
        self.check_mine(&loading)?;
        self.meta(slot).set_payload(length_bytes, checksum);
        self.finish(loading, Status::Ready)?;
        self.add(Counter::Published, 1);
        Ok(Pinned { slot })
    }

    /// The load failed: everybody who waits gets `code`. My pin is given back.
    pub fn fail(&self, loading: Loading, code: LoadErrorCode) -> Result<(), Reaped> {
        crash_point!(PublishStart);
        let slot = loading.slot;
        self.check_mine(&loading)?;
        self.meta(slot).set_error(loading.generation, code);
        crash_point!(PublishErrorStored);
        self.finish(loading, Status::Failed)?;
        self.add(Counter::FailedLoads, 1);
        self.plane.pins.unpin(self.me, slot);
        Ok(())
    }

    /// The slot's word while the load is mine. Asked before the first store
    /// too: length, checksum and error of a slot that was given away are
    /// another owner's.
    fn check_mine(&self, loading: &Loading) -> Result<Word, Reaped> {
        let word = self.meta(loading.slot).load(Ordering::Relaxed);
        let mine = word.status() == Status::Loading
            && word.owner() == Some(self.me)
            && word.generation() == loading.generation;
        if !mine {
            self.add(Counter::LatePublishes, 1);
            return Err(Reaped);
        }
        Ok(word)
    }

    /// LOADING (mine, this generation) -> `to`, nobody's.
    fn finish(&self, loading: Loading, to: Status) -> Result<(), Reaped> {
        let meta = self.meta(loading.slot);
        let state = meta.state_word();
        loop {
            let word = self.check_mine(&loading)?;
            // SYNC(slot.state): Release; pairs with the Acquire loads in
            // `poll` and `attempt`, and publishes the bytes, the payload words
            // and the error code. SeqCst is not needed: this is no claim.
            let done = state.compare_exchange(
                word.0,
                word.released(to).0,
                Ordering::Release,
                Ordering::Relaxed,
            );
            if done.is_ok() {
                crash_point!(PublishUnwoken);
                if word.has_waiters() {
                    self.host.wake_all(state);
                }
                return Ok(());
            }
        }
    }
}
