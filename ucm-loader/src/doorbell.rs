//! A doorbell: one side sleeps until the other has something for it.
//!
//! A count and, in its low bit, whether somebody sleeps; so ringing costs no
//! system call while the other side is awake, and a ring between looking and
//! falling asleep is not lost.

use ucm_core::host::Waiter;
use ucm_core::sync::{AtomicU32, Ordering};
use ucm_posix::SystemWaiter;

const SLEEPER: u32 = 1;
const RING: u32 = 2;

/// One doorbell; any number may ring it, any number may sleep on it.
#[derive(Debug, Default)]
pub struct Doorbell {
    word: AtomicU32,
}

/// What the doorbell said before its owner looked around.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Heard(u32);

impl Doorbell {
    /// Rings: wakes whoever sleeps.
    pub fn ring(&self) {
        // SYNC(doorbell): Release; pairs with the Acquire load in `listen`: what was
        // done before ringing is seen after hearing it.
        let before = self.word.fetch_add(RING, Ordering::Release);
        if before & SLEEPER != 0 {
            self.word.fetch_and(!SLEEPER, Ordering::Relaxed);
            SystemWaiter.wake_all(&self.word);
        }
    }

    /// To be called before looking whether there is anything to do.
    pub fn listen(&self) -> Heard {
        // SYNC(doorbell): Acquire; pairs with the Release add in `ring`.
        Heard(self.word.load(Ordering::Acquire))
    }

    /// Announces a sleeper. What to sleep on, unless it has rung since `heard`.
    pub fn arm(&self, heard: Heard) -> Option<(&AtomicU32, u32)> {
        let armed = heard.0 | SLEEPER;
        if heard.0 != armed {
            let set =
                self.word.compare_exchange(heard.0, armed, Ordering::Relaxed, Ordering::Relaxed);
            if set.is_err_and(|found| found != armed) {
                return None;
            }
        }
        Some((&self.word, armed))
    }

    /// Sleeps until it rings, at most `timeout_ns`; at once if it has rung
    /// since `heard`.
    pub fn sleep(&self, heard: Heard, timeout_ns: u64) {
        if let Some((word, expected)) = self.arm(heard) {
            SystemWaiter.wait(word, expected, timeout_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

    #[test]
    fn nobody_who_listened_before_looking_misses_a_ring() {
        let (there, back, sent) = (Doorbell::default(), Doorbell::default(), AtomicU64::new(0));
        const ROUNDS: u64 = 20_000;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    sent.store(round, SeqCst);
                    there.ring();
                    loop {
                        let heard = back.listen();
                        if sent.load(SeqCst) == 0 {
                            break;
                        }
                        back.sleep(heard, u64::MAX >> 2);
                    }
                }
            });
            let mut seen = 0;
            while seen < ROUNDS {
                let heard = there.listen();
                match sent.swap(0, SeqCst) {
                    0 => there.sleep(heard, u64::MAX >> 2),
                    round => {
                        assert_eq!(round, seen + 1);
                        seen = round;
                        back.ring();
                    }
                }
            }
        });
    }
}
