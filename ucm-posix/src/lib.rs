//! UCM on an operating system: shared memory, futexes, liveness, the life of a segment.
//!
//! The core knows a region of bytes and two traits. This crate makes the
//! region and implements the traits, on Linux:
//!
//! - [`Segment`]: the shared files, from their creation to the last one out.
//! - [`Attachment`]: a place among the segment's participants, and the cache.
//! - [`SegmentWatcher`]: looking without taking part.
//! - [`gc`]: removing what nobody uses.
//! - [`PosixHost`]: process-shared futexes ([`SystemWaiter`]) and liveness by
//!   open-file-description locks ([`OfdLiveness`]).
//!
//! # Rules
//!
//! - Nothing decides by time, age, pid or name alone. Who is alive is what
//!   the kernel says of a lock ([`liveness`]).
//! - A file gets its name when it is complete, with every page reserved.
//!   Nothing is ever repaired or initialised in place.
//! - Nothing waits without a deadline.
//! - A forked child inherits neither locks nor mappings ([`fork`]).
//! - What falls short of what was asked for (huge pages, NUMA placement,
//!   `futex_waitv`) is logged once.
//!
//! # Limits
//!
//! Whoever may write to a file may truncate it, and touching what was cut off
//! is SIGBUS: the files are mode 0600, and whoever runs as the same user is
//! trusted.

/// Logs a warning the first time this line is reached.
macro_rules! warn_once {
    ($($arguments:tt)*) => {{
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| tracing::warn!($($arguments)*));
    }};
}

pub mod attach;
pub mod channel;
pub mod crash;
pub mod error;
pub mod fork;
pub mod futex;
pub mod gc;
pub mod identity;
pub mod liveness;
pub mod mapping;
pub mod memory;
pub mod names;
pub mod segment;
pub mod shm;

pub use attach::{Attachment, EvictionObserver, PosixHost};
pub use channel::{ChannelOpenError, EngineChannel, WorkerChannel};
pub use error::{ForkedError, JoinError, LockError, OsError, Refusal, SegmentError, ShmError};
pub use futex::waiter::{SystemWaiter, monotonic_ns};
pub use liveness::{LockFile, OfdLiveness};
pub use names::SegmentId;
pub use segment::handle::{DataPlane, Segment};
pub use segment::options::SegmentOptions;
pub use segment::watcher::SegmentWatcher;
pub use shm::ShmDir;
