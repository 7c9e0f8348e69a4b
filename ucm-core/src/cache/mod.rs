//! The cache: a control plane, a participant in it, and what the two do together.
//!
//! - [`handle`]: joining, leaving, and the handle itself.
//! - [`token`]: what a get returns; each token is one pin, given back once.
//! - [`ask`]: how a shard is asked for. [`lookup`]: the hit path.
//! - [`wait`]: waiting for somebody else's load.
//! - [`insert`]: the miss path. [`evict`]: making room.
//! - [`publish`]: the end of a load. [`reap`]: what the dead left behind.
//! - [`prealloc`], [`touch`]: preparing and refreshing.
//! - [`watch`]: looking without taking part. [`audit`]: checking everything.

pub mod ask;
pub mod audit;
pub mod evict;
pub mod handle;
pub mod insert;
pub mod lookup;
pub mod prealloc;
pub mod publish;
pub mod reap;
pub mod token;
pub mod touch;
pub mod wait;
pub mod watch;

pub use crate::evict::clock::Pool;
pub use ask::{Ask, GetError, Mode, WaitError};
pub use audit::{Audit, Census, Violation};
pub use handle::{Cache, JoinError, Place};
pub use publish::Reaped;
pub use reap::ReapOutcome;
pub use token::{Got, Loading, Pending, Pinned, Progress};
pub use watch::{Presence, Watcher};

/// What is said of a poisoned segment, whatever was asked of it.
const POISONED: &str = "the segment was found corrupt while in use; start the rank again, and it \
                        makes a new one";
