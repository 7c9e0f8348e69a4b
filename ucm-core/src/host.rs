//! What the core asks of the system it runs on: sleeping, waking, and who is alive.

use crate::participant::ParticipantId;
use crate::sync::AtomicU32;

/// A futex-like wait on a shared word, and the clock its deadlines are read from.
pub trait Waiter {
    /// Nanoseconds of a monotonic clock that all participants read alike
    /// (on Linux: `CLOCK_MONOTONIC`).
    fn now_ns(&self) -> u64;

    /// Sleeps while `word` is `expected`, at most `timeout_ns`. It may return
    /// early for no reason. The comparison and the falling asleep are one step
    /// with respect to [`wake_all`](Self::wake_all), in any process.
    fn wait(&self, word: &AtomicU32, expected: u32, timeout_ns: u64);

    /// Sleeps until one of `words` is not what stands beside it, at most
    /// `timeout_ns`. May return early for no reason. More words than the
    /// system can watch at once are cut off at the end, so the caller looks
    /// again after every return. The default watches the first word alone,
    /// for at most a millisecond.
    fn wait_any(&self, words: &[(&AtomicU32, u32)], timeout_ns: u64) {
        if let Some((word, expected)) = words.first() {
            self.wait(word, *expected, timeout_ns.min(1_000_000));
        }
    }

    /// Wakes everybody who sleeps on `word`, in every process.
    fn wake_all(&self, word: &AtomicU32);

    /// Gives the processor away for a short moment (about `ns`).
    fn pause(&self, ns: u64);
}

/// Who is alive, answered by the kernel and never by a timeout.
///
/// Each participant holds a lock on its own byte for as long as it lives. The
/// byte of the dead is also the right to reap it.
pub trait Liveness {
    /// Holds a byte; dropping it gives the byte back.
    type Claim;

    /// Whether somebody holds `participant`'s byte: the participant itself,
    /// or whoever is reaping it. When the system cannot tell, the answer is
    /// yes: nobody is declared dead by an error.
    fn is_held(&self, participant: ParticipantId) -> bool;

    /// Takes `participant`'s byte, or says that it is taken.
    fn try_claim(&self, participant: ParticipantId) -> Option<Self::Claim>;
}

/// Everything the core needs of a system, in one bound.
pub trait Host: Waiter + Liveness {}
impl<T: Waiter + Liveness> Host for T {}
