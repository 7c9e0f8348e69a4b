//! Where shards come from and go to: the trait, its implementations, its middlewares.
//!
//! [`traits`] is the contract, [`error`] what may go wrong. [`mod@file`] keeps
//! block files in a directory, [`memory`] keeps blocks in a shared file of its
//! own. Both are blocking stores that [`threaded`] turns into backends with a
//! [`pool`]. [`recorder`] and [`fault`] wrap any backend: the first writes down
//! what happened, the second makes things go wrong on purpose.

pub mod breaker;
pub mod error;
pub mod fault;
pub mod file;
pub mod memory;
pub mod open;
pub mod pool;
pub mod probe;
pub mod recorder;
#[cfg(test)]
mod testing;
pub mod threaded;
pub mod traits;

pub use error::{BackendError, OpenError, StoreGeometry};
pub use traits::{
    Backend, LoadRequest, LoadedShard, RawBuf, RawBufConst, SharedMemory, StoreRequest,
};
