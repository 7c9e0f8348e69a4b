//! The futex system calls, process-shared.

use std::ptr;
use std::time::Duration;

use rustix::io::Errno;
use ucm_core::sync::AtomicU32;

/// Words one `futex_waitv` can watch (`FUTEX_WAITV_MAX`).
pub(crate) const MAX_WAIT_WORDS: usize = 128;

/// `FUTEX_32`: the word is 32 bits wide. No private flag.
const FUTEX_32: u32 = 2;

/// One word of a `futex_waitv`, as the kernel lays it out.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct WaitWord {
    value: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

impl WaitWord {
    pub(crate) const EMPTY: Self = Self { value: 0, address: 0, flags: 0, reserved: 0 };

    pub(crate) fn new(word: &AtomicU32, expected: u32) -> Self {
        Self {
            value: expected.into(),
            address: word.as_ptr() as usize as u64,
            flags: FUTEX_32,
            reserved: 0,
        }
    }
}

fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: duration.subsec_nanos() as _,
    }
}

fn last_errno() -> Errno {
    let raw = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    Errno::from_raw_os_error(raw)
}

/// Sleeps while `word` is `expected`, at most `timeout`.
pub(crate) fn wait(word: &AtomicU32, expected: u32, timeout: Duration) -> Result<(), Errno> {
    let timeout = timespec(timeout);
    // SAFETY: `word` and `timeout` are live for the call; FUTEX_WAIT only reads
    // both, the word atomically.
    let result = unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            ptr::from_ref(&timeout),
        )
    };
    if result < 0 { Err(last_errno()) } else { Ok(()) }
}

/// Wakes everybody who sleeps on `word`.
pub(crate) fn wake_all(word: &AtomicU32) -> Result<(), Errno> {
    // SAFETY: FUTEX_WAKE uses the address as a name and accesses nothing.
    let result =
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    if result < 0 { Err(last_errno()) } else { Ok(()) }
}

/// Sleeps until one of `words` is not what it should be, at most until
/// `deadline` on `CLOCK_MONOTONIC`. At most [`MAX_WAIT_WORDS`] words, whose
/// atomics the caller keeps alive.
pub(crate) fn wait_any(words: &[WaitWord], deadline: Duration) -> Result<(), Errno> {
    let deadline = timespec(deadline);
    // SAFETY: `words` and `deadline` are live for the call and only read. An
    // address that is not mapped is EFAULT, not undefined behaviour.
    let result = unsafe {
        libc::syscall(
            libc::SYS_futex_waitv,
            words.as_ptr(),
            words.len() as u32,
            0_u32,
            ptr::from_ref(&deadline),
            libc::CLOCK_MONOTONIC,
        )
    };
    if result < 0 { Err(last_errno()) } else { Ok(()) }
}
