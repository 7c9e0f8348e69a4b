//! The fork rule: a forked child inherits no lock of its parent and may not use its handles.
//!
//! An open-file-description lock lives as long as any descriptor of that
//! description, so a child that inherits one would keep its dead parent
//! "alive". Every descriptor of a segment is therefore a `PrivateFd`, listed
//! in a fixed table, and one `pthread_atfork` handler closes all of them in
//! the child: only atomic loads, stores and `close`, which a child of a
//! threaded process may do. Opening and closing happen under a gate that
//! `fork` takes too; else a fork between `open` and the listing would leak a
//! descriptor that is locked a moment later. (`exec` is covered by
//! `O_CLOEXEC`. A raw `clone` without `exec` runs no handlers; nobody should.)
//!
//! The mappings themselves are `MADV_DONTFORK`, so in the child their
//! addresses may belong to something else by now. Handles carry a
//! [`ForkStamp`] and are inert there.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::sync::Once;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use ucm_core::sync::{AtomicU32, Ordering};

use crate::error::{ForkedError, LockError, OsError};
use crate::futex::linux as futex;

/// Descriptors of segments one process may have open.
pub const MAX_PRIVATE_FDS: usize = 1024;

/// `fd + 1` of every listed descriptor; 0 is a free place.
static LISTED: [AtomicU32; MAX_PRIVATE_FDS] = [const { AtomicU32::new(0) }; MAX_PRIVATE_FDS];
/// How many forks lie between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);
/// 0 open, 1 held, 2 held and somebody waits.
static GATE: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" {
    // In the libc crate for other systems, but not for Linux, where it is part
    // of every C library all the same.
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> libc::c_int;
}

fn take_gate() {
    // SYNC(gate): pairs with the Release in `drop_gate`; what the last holder
    // listed is visible here.
    if GATE.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
        return;
    }
    while GATE.swap(2, Ordering::Acquire) != 0 {
        // In slices, like every wait here; held only for one `open` or `close`.
        let _ = futex::wait(&GATE, 2, Duration::from_millis(10));
    }
}

fn drop_gate() {
    // SYNC(gate): pairs with the Acquire in `take_gate`.
    if GATE.swap(0, Ordering::Release) == 2 {
        let _ = futex::wake_all(&GATE);
    }
}

fn gated<T>(action: impl FnOnce() -> T) -> T {
    struct Gate;
    impl Drop for Gate {
        fn drop(&mut self) {
            drop_gate();
        }
    }
    take_gate();
    let _gate = Gate;
    action()
}

unsafe extern "C" fn before_fork() {
    take_gate();
}

unsafe extern "C" fn after_fork_in_parent() {
    drop_gate();
}

unsafe extern "C" fn after_fork_in_child() {
    // The only thread of this process, which holds the gate (its parent took
    // it before the fork), so plain order is enough.
    GENERATION.fetch_add(1, Ordering::Relaxed);
    for place in &LISTED {
        let listed = place.swap(0, Ordering::Relaxed);
        if listed != 0 {
            // SAFETY: listed descriptors are open and belong to this table;
            // their handles see the new generation and never touch them again.
            unsafe { libc::close((listed - 1) as libc::c_int) };
        }
    }
    GATE.store(0, Ordering::Release);
}

fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the three handlers are functions of this library and do only
        // what a child of a threaded process may do.
        let code = unsafe {
            pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child))
        };
        if code != 0 {
            tracing::error!(
                code,
                "pthread_atfork failed: a forked child that outlives this process will keep it \
                 registered as alive"
            );
        }
    });
}

/// Which process made a handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForkStamp(u32);

impl ForkStamp {
    /// The process that calls.
    pub fn now() -> Self {
        install();
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this is still that process, and not a forked child of it.
    #[inline]
    pub fn is_current(self) -> bool {
        GENERATION.load(Ordering::Relaxed) == self.0
    }

    /// [`ForkedError`] in a forked child.
    #[inline]
    pub fn check(self) -> Result<(), ForkedError> {
        if self.is_current() { Ok(()) } else { Err(ForkedError) }
    }
}

/// A descriptor that no forked child keeps.
#[derive(Debug)]
pub(crate) struct PrivateFd {
    /// `None` only while it is dropped. In a forked child the number in here
    /// is closed, or somebody else's; only `stamp` says so.
    fd: Option<OwnedFd>,
    place: usize,
    stamp: ForkStamp,
}

impl PrivateFd {
    /// Opens `path`, `O_CLOEXEC` in any case.
    pub(crate) fn open(path: &Path, flags: OFlags, mode: Mode) -> Result<Self, LockError> {
        let stamp = ForkStamp::now();
        gated(|| {
            // Relaxed: the gate orders all changes of the table.
            let place = LISTED.iter().position(|place| place.load(Ordering::Relaxed) == 0);
            let Some(place) = place else {
                return Err(LockError::TooMany { limit: MAX_PRIVATE_FDS });
            };
            let fd = loop {
                match rustix::fs::open(path, flags | OFlags::CLOEXEC, mode) {
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(OsError::new("open", path, error).into()),
                    Ok(fd) => break fd,
                }
            };
            LISTED[place].store(fd.as_raw_fd() as u32 + 1, Ordering::Relaxed);
            Ok(Self { fd: Some(fd), place, stamp })
        })
    }

    /// A descriptor of its own for the same file, named or not: never a
    /// duplicate, whose locks would be shared.
    pub(crate) fn reopen(&self, path: &Path, flags: OFlags) -> Result<Self, LockError> {
        let link = self.proc_path()?;
        Self::open(&link, flags, Mode::empty()).map_err(|error| match error {
            LockError::Os(error) => OsError::new("reopen", path, error.source).into(),
            other => other,
        })
    }

    /// The magic link to this file, which works after it has lost its name.
    pub(crate) fn proc_path(&self) -> Result<std::path::PathBuf, ForkedError> {
        Ok(format!("/proc/self/fd/{}", self.get()?.as_raw_fd()).into())
    }

    /// The descriptor, unless this is a forked child.
    pub(crate) fn get(&self) -> Result<BorrowedFd<'_>, ForkedError> {
        self.stamp.check()?;
        self.fd.as_ref().map(AsFd::as_fd).ok_or(ForkedError)
    }
}

impl Drop for PrivateFd {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        if !self.stamp.is_current() {
            // Closed by the handler; the number may be somebody else's now.
            let _ = fd.into_raw_fd();
            return;
        }
        gated(|| {
            LISTED[self.place].store(0, Ordering::Relaxed);
            drop(fd);
        });
    }
}
