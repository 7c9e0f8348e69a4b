//! Sleeping on a shared word: the system calls (`linux`) and the core's trait over them ([`waiter`]).
//!
//! Every call is process-shared: the private flag would make the kernel look
//! the word up by address instead of by page, and a wake from another process
//! would reach nobody.

#[cfg(not(target_os = "linux"))]
compile_error!("ucm-posix needs Linux: process-shared futexes and open-file-description locks");

pub(crate) mod linux;
pub mod waiter;
