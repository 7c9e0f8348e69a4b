//! Named points at which a test may pause or kill this participant.
//!
//! Under `--cfg ucm_crash` every `crash_point!` calls the installed hook with
//! its [`Point`]; in every other build it is nothing at all. The points are a
//! cfg and not a cargo feature, so that no dependency can switch them on.

/// Defines a crate's points: the enum, what a test installs, and what a point calls.
///
/// Each layer of the system has points of its own; their names differ over
/// all layers, so that a test can name one without saying whose it is.
#[doc(hidden)]
#[macro_export]
macro_rules! define_crash_points {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Where in its work a process is.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u32)]
        pub enum Point { $($(#[$doc])* $name),* }

        impl Point {
            /// All of them, in order.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Its name, as a test spells it.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name)),* }
            }
        }

        #[cfg(ucm_crash)]
        mod hook {
            use super::Point;
            use core::sync::atomic::{AtomicPtr, Ordering};

            static HOOK: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());

            /// Installs what every point calls, in this process.
            pub fn install(hook: fn(Point)) {
                HOOK.store(hook as *mut (), Ordering::SeqCst);
            }

            /// Called by every point.
            #[inline(never)]
            pub fn hit(point: Point) {
                let hook = HOOK.load(Ordering::SeqCst);
                if !hook.is_null() {
                    // SAFETY: only `install` stores here, and it stores an `fn(Point)`.
                    let hook = unsafe { core::mem::transmute::<*mut (), fn(Point)>(hook) };
                    hook(point);
                }
            }
        }
        #[cfg(ucm_crash)]
        pub use hook::{hit, install};
    };
}

crate::define_crash_points! {
    /// Join: the byte is held, nothing written.
    JoinLocked,
    /// Join: the high-water mark is raised.
    JoinAdmitted,
    /// Join: the entry is live.
    JoinOccupied,
    /// Get: a candidate was found, not pinned.
    GetFound,
    /// Get: pinned, state not read.
    GetPinned,
    /// Get: READY and pinned.
    GetHit,
    /// Get: took PREPARED or FAILED over, not returned.
    GetTookOver,
    /// Get: about to abort somebody's insertion.
    GetAborting,
    /// Evict: the slot looks free to take, not tagged.
    EvictChosen,
    /// Evict: tagged, pins not checked.
    EvictTagged,
    /// Evict: tagged and found pinned, not put back.
    EvictPinned,
    /// Evict: about to commit.
    EvictCommitting,
    /// Evict: committed, the old entry still in the index.
    EvictCommitted,
    /// Insert: the old entry is out, the key not written.
    InsertUnlisted,
    /// Insert: the key is written, not pinned.
    InsertKeyed,
    /// Insert: pinned, still CLAIMED.
    InsertPinned,
    /// Insert: INSERTING, the entry not published.
    InsertAnnounced,
    /// Insert: the entry is published, twins not looked for.
    InsertPublished,
    /// Insert: no twin; the last exchange is to come.
    InsertScanned,
    /// Insert: LOADING (or PREPARED), not returned.
    InsertDone,
    /// Insert: lost, CLAIMED again, the entry still published.
    WithdrawClaimed,
    /// Insert: lost, the entry out, not FREE yet.
    WithdrawUnlisted,
    /// Both buckets full: a resident is committed, its entry not swapped.
    ReplaceCommitted,
    /// Both buckets full: its entry is mine, its slot not FREE yet.
    ReplaceSwapped,
    /// Publish: nothing stored.
    PublishStart,
    /// Publish: the error is stored, the state not.
    PublishErrorStored,
    /// Publish: the state is out, waiters not woken.
    PublishUnwoken,
    /// Wait: the waiters bit is set, not asleep.
    WaitArmed,
    /// Wait: the state moved on, not looked at.
    WaitOver,
    /// Release: not yet given back.
    ReleaseStart,
    /// Release: given back.
    ReleaseDone,
    /// Reap: the byte is mine, nothing done.
    ReapStart,
    /// Reap: a dead one's slot, the entry out, the state still its.
    ReapUnlisted,
    /// Reap: a dead one's slot done.
    ReapSlot,
    /// Reap: in the middle of its pins.
    ReapPins,
    /// Reap: all repaired, the entry still live.
    ReapRepaired,
    /// Reap: the entry is free, the byte still mine.
    ReapVacated,
    /// Leave: pins given back, the entry still live.
    LeaveRepaired,
}

/// `crash_point!(Name)` or `crash_point!(Name, condition)`.
macro_rules! crash_point {
    ($point:ident $(, $condition:expr)?) => {
        #[cfg(ucm_crash)]
        if true $(&& $condition)? {
            $crate::crash::hit($crate::crash::Point::$point);
        }
    };
}
pub(crate) use crash_point;
