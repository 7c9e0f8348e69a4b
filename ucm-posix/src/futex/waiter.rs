//! The core's `Waiter` over futexes: deadlines, spurious wakes, and systems without `futex_waitv`.

use std::time::Duration;

use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use ucm_core::host::Waiter;
use ucm_core::sync::{AtomicU32, Ordering};

use super::linux::{self, MAX_WAIT_WORDS, WaitWord};

/// How long a wait on many words may look at the first one only, where the
/// kernel cannot watch them all.
const FALLBACK_SLICE_NS: u64 = 1_000_000;

/// Set once the kernel has refused `futex_waitv`: every later call would be
/// refused too.
static NO_WAITV: AtomicU32 = AtomicU32::new(0);

/// Sleeps and wakes by process-shared futexes; time is `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemWaiter;

/// Nanoseconds of `CLOCK_MONOTONIC`, which all processes of a machine read alike.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

/// A wait may end for no reason, so most errors are just that. The others
/// (the file was truncated below the word: EFAULT) would come back at once,
/// for ever, so they cost a short sleep: the caller's deadline ends it, not a
/// spinning core.
fn settle(result: Result<(), Errno>, timeout_ns: u64) {
    match result {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
        Err(error) => {
            warn_once!(%error, "waiting on a shared word failed; was a segment truncated?");
            std::thread::sleep(Duration::from_nanos(timeout_ns.min(FALLBACK_SLICE_NS)));
        }
    }
}

impl Waiter for SystemWaiter {
    fn now_ns(&self) -> u64 {
        monotonic_ns()
    }

    fn wait(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) {
        if timeout_ns > 0 {
            settle(linux::wait(word, expected, Duration::from_nanos(timeout_ns)), timeout_ns);
        }
    }

    fn wait_any(&self, words: &[(&AtomicU32, u32)], timeout_ns: u64) {
        let Some((first, expected)) = words.first() else { return };
        if timeout_ns == 0 {
            return;
        }
        // Relaxed: a hint that is only ever set, published by nothing.
        if words.len() > 1 && NO_WAITV.load(Ordering::Relaxed) == 0 {
            let mut list = [WaitWord::EMPTY; MAX_WAIT_WORDS];
            let count = words.len().min(MAX_WAIT_WORDS);
            for (place, (word, expected)) in list.iter_mut().zip(words) {
                *place = WaitWord::new(word, *expected);
            }
            let deadline = Duration::from_nanos(monotonic_ns().saturating_add(timeout_ns));
            match linux::wait_any(&list[..count], deadline) {
                Err(error @ (Errno::NOSYS | Errno::PERM)) => {
                    NO_WAITV.store(1, Ordering::Relaxed);
                    warn_once!(
                        %error,
                        "this system refuses futex_waitv (Linux 5.16 has it, some sandboxes \
                         forbid it): a wait for several loads looks again every millisecond"
                    );
                }
                result => return settle(result, timeout_ns),
            }
        }
        let slice_ns = if words.len() > 1 { timeout_ns.min(FALLBACK_SLICE_NS) } else { timeout_ns };
        self.wait(first, *expected, slice_ns);
    }

    fn wake_all(&self, word: &AtomicU32) {
        if let Err(error) = linux::wake_all(word) {
            // Waiters sleep in slices and look again, so nobody hangs.
            warn_once!(%error, "waking the waiters of a shared word failed");
        }
    }

    fn pause(&self, ns: u64) {
        std::thread::sleep(Duration::from_nanos(ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_on_a_word_that_has_changed_returns_at_once() {
        let word = AtomicU32::new(1);
        SystemWaiter.wait(&word, 0, u64::MAX);
        SystemWaiter.wait_any(&[(&word, 1), (&word, 0)], u64::MAX / 2);
    }

    #[test]
    fn a_wait_ends_at_its_deadline() {
        let words = [AtomicU32::new(0), AtomicU32::new(0)];
        let before = monotonic_ns();
        SystemWaiter.wait_any(&[(&words[0], 0), (&words[1], 0)], 2_000_000);
        SystemWaiter.wait(&words[0], 0, 2_000_000);
        assert!(monotonic_ns() > before);
        SystemWaiter.wait(&words[0], 0, 0);
        SystemWaiter.wait_any(&[], 0);
    }

    #[test]
    fn more_words_than_the_kernel_watches_are_cut_off_and_not_refused() {
        let words: Vec<AtomicU32> = (0..300).map(|_| AtomicU32::new(7)).collect();
        let mut list: Vec<_> = words.iter().map(|word| (word, 7)).collect();
        list[127].1 = 8;
        SystemWaiter.wait_any(&list, u64::MAX / 2);
    }
}
