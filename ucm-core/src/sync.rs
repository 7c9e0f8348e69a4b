//! The only door to atomics: real ones, or the model checker's under `cfg(ucm_loom)`.
//!
//! Every shared word of this crate is one of the types below. Under
//! `--cfg ucm_loom` they are loom's, which are larger and must be constructed
//! in place; [`AtomicCell::init`] is that construction, and the layouts'
//! size assertions are switched off there.

#[cfg(ucm_loom)]
pub use loom::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(ucm_loom))]
pub use portable_atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

/// Tells the processor (or the model checker's scheduler) that this is a spin.
#[inline(always)]
pub fn spin_hint() {
    #[cfg(ucm_loom)]
    loom::thread::yield_now();
    #[cfg(not(ucm_loom))]
    core::hint::spin_loop();
}

/// The store-to-load order that a `SeqCst` read-modify-write and a `SeqCst`
/// load of another word already have.
///
/// It compiles to nothing. The model checker treats `SeqCst` accesses as
/// `AcqRel`, so there it is a real `SeqCst` fence: the model then says what
/// the memory model says. Every call stands between the two accesses of one
/// side of a "you write yours and read mine" pair, and names that pair.
#[inline(always)]
pub fn seqcst_order() {
    #[cfg(ucm_loom)]
    fence(Ordering::SeqCst);
}

/// An atomic that can be made in place, in memory somebody else owns.
pub trait AtomicCell {
    /// Puts a zero there.
    ///
    /// # Safety
    /// `at` must be valid for writes and aligned, and nobody else may look at
    /// it before this returns.
    unsafe fn init(at: *mut Self);
}

macro_rules! atomic_cell {
    ($($atomic:ty),*) => {$(
        impl AtomicCell for $atomic {
            unsafe fn init(at: *mut Self) {
                // SAFETY: the caller owns `at`, aligned and writable.
                unsafe { at.write(Self::new(0)) }
            }
        }
    )*};
}
atomic_cell!(AtomicU8, AtomicU16, AtomicU32, AtomicU64);

/// Whether 64-bit atomics are real instructions on this target. A fallback
/// lock lives in one process and would be silently wrong between two, so
/// attaching to a shared segment asks this first.
#[inline]
pub fn wide_atomics_are_lock_free() -> bool {
    #[cfg(ucm_loom)]
    return true;
    #[cfg(not(ucm_loom))]
    AtomicU64::is_lock_free()
}

/// A cell that one thread at a time may enter; which one, the code around it proves.
pub struct Cell<T>(
    #[cfg(not(ucm_loom))] core::cell::UnsafeCell<T>,
    #[cfg(ucm_loom)] loom::cell::UnsafeCell<T>,
);

impl<T> Cell<T> {
    /// Holds `value`.
    #[cfg(not(ucm_loom))]
    pub const fn new(value: T) -> Self {
        Self(core::cell::UnsafeCell::new(value))
    }

    /// Holds `value`.
    #[cfg(ucm_loom)]
    pub fn new(value: T) -> Self {
        Self(loom::cell::UnsafeCell::new(value))
    }

    /// Calls `enter` with a pointer to the content. Whoever dereferences it
    /// proves that nobody else does at the same time.
    #[inline(always)]
    pub fn with_mut<R>(&self, enter: impl FnOnce(*mut T) -> R) -> R {
        #[cfg(not(ucm_loom))]
        return enter(self.0.get());
        #[cfg(ucm_loom)]
        self.0.with_mut(enter)
    }
}
