//! A worker channel as a file: made by the engine, joined by one worker at a time.
//!
//! `ucm.<id>.chan` in the shared-memory directory holds one
//! [channel](ucm_core::channel). Two of its lock bytes say who is alive: byte 0
//! is the engine's, byte 1 the worker's (at the places where a segment has its
//! participants', see [`crate::liveness`]). The bytes are also the right to be
//! that end, so there are never two engines or two workers; whoever begins a
//! new epoch holds the dead worker's byte meanwhile.
//!
//! The file goes with its engine; when the engine was killed, with the worker;
//! when both were, [`collect`] removes it.
//!
//! A forked child may not use a handle: the memory is not mapped there.

mod attach;
mod barrier;
mod create;
mod error;
mod link;

pub use attach::{WorkerChannel, WorkerInput, WorkerOutput};
pub use create::{EngineChannel, EngineInput, EngineOutput};
pub use error::ChannelOpenError;
pub use link::{Spins, collect};
