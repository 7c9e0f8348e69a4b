//! How one side of the ring sleeps, and what that costs the other: nothing, mostly.
//!
//! Who wants to sleep sets its sleep word and then looks at the index once
//! more; who moves an index looks at the sleep word afterwards. Of two such
//! sides at least one must see the other, so a full fence stands between the
//! two accesses of each. On the side that publishes, that fence would cost as
//! much as the message. So it is moved to where there is time: the sleeper has
//! the kernel run a fence on every processor that runs the other process
//! (`membarrier`), and the publisher needs none of its own. That holds if both
//! processes said so when they attached ([`Mode::LIGHT`]); where the kernel
//! refuses it, both use fences.

#[cfg(not(ucm_loom))]
use core::sync::atomic::compiler_fence;

use crate::host::Waiter;
use crate::sync::{AtomicU32, Ordering, fence};

/// A fence that is run in other processes.
pub trait Barrier {
    /// Prepares this process for being fenced by others, and for fencing them;
    /// `false` when the system has nothing of the kind.
    fn register(&self) -> bool;

    /// Runs a full fence here and on every thread of every registered process.
    fn heavy_fence(&self);
}

/// What a channel's end needs of its system.
pub trait Bell: Waiter + Barrier + Clone {}
impl<T: Waiter + Barrier + Clone> Bell for T {}

/// What a side has declared about itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mode(u32);

impl Mode {
    /// It never sleeps: the other side need not look.
    pub const SPINS: Self = Self(1);
    /// It may sleep, and fences by itself.
    pub const SLEEPS: Self = Self(2);
    /// It may sleep, and is registered for fences run by the kernel.
    pub const LIGHT: Self = Self(3);

    /// For a side that may sleep: light where the system can.
    pub fn sleeping(host: &impl Barrier) -> Self {
        if host.register() { Self::LIGHT } else { Self::SLEEPS }
    }

    pub(crate) fn code(self) -> u32 {
        self.0
    }

    /// Whether this side may sleep at all.
    pub fn may_sleep(self) -> bool {
        self != Self::SPINS
    }
}

/// What a publisher does about a sleeper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wake {
    Never,
    Light,
    Fenced,
}

impl Wake {
    /// For a publisher that declared `mine` and reads `peer` of the other side;
    /// what was not declared, or is nonsense, gets the safe way.
    pub(crate) fn between(mine: Mode, peer: u32) -> Self {
        if peer == Mode::SPINS.0 {
            Self::Never
        } else if mine == Mode::LIGHT && peer == Mode::LIGHT.0 {
            Self::Light
        } else {
            Self::Fenced
        }
    }

    /// After an index has been published: wakes the one who sleeps for it.
    #[inline(always)]
    pub(crate) fn publish(self, word: &AtomicU32, host: &impl Waiter) {
        match self {
            Self::Never => return,
            Self::Light => light_fence(),
            // SYNC(channel.sleep): against the fence in `sleep`.
            Self::Fenced => fence(Ordering::SeqCst),
        }
        // Relaxed: the fences above and in `sleep` order it with the index.
        if word.load(Ordering::Relaxed) != AWAKE {
            wake(word, host);
        }
    }
}

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

/// Keeps the compiler from exchanging the two accesses; the processor is told
/// by the sleeper. In models it is a real fence, as the kernel's is on the
/// other side.
#[inline(always)]
fn light_fence() {
    // SYNC(channel.sleep): against `heavy_fence` in `sleep`.
    #[cfg(not(ucm_loom))]
    compiler_fence(Ordering::SeqCst);
    #[cfg(ucm_loom)]
    fence(Ordering::SeqCst);
}

#[cold]
fn wake(word: &AtomicU32, host: &impl Waiter) {
    // Whatever stood there: a word that is not zero is somebody asleep.
    word.swap(AWAKE, Ordering::Relaxed);
    host.wake_all(word);
}

/// Sleeps on `word` at most `timeout_ns`, unless `ready` once it is set.
pub(crate) fn sleep(
    word: &AtomicU32,
    mine: Mode,
    host: &impl Bell,
    timeout_ns: u64,
    ready: impl FnOnce() -> bool,
) {
    word.store(ASLEEP, Ordering::Relaxed);
    if mine == Mode::LIGHT {
        // SYNC(channel.sleep): against the fence, or the kernel's doing, in `publish`.
        host.heavy_fence();
    } else {
        fence(Ordering::SeqCst);
    }
    if !ready() {
        host.wait(word, ASLEEP, timeout_ns);
    }
    word.store(AWAKE, Ordering::Relaxed);
}
