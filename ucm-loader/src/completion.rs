//! The completion eventfd: readable when a task has finished.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// An eventfd that counts finished tasks, for an event loop to watch.
#[derive(Debug)]
pub struct CompletionFd {
    fd: OwnedFd,
}

impl CompletionFd {
    /// A new one, non-blocking and closed on exec.
    ///
    /// # Errors
    /// The system's: usually that the process has too many open files.
    pub fn new() -> Result<Self, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd })
    }

    pub(crate) fn signal(&self) {
        // The only failure is a counter at its maximum, and then the
        // descriptor is readable already.
        let _full = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
    }

    /// How many tasks have finished since the last call; 0 when none has.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.fd, &mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            // EAGAIN: nothing has finished.
            _ => 0,
        }
    }
}

impl AsFd for CompletionFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for CompletionFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
