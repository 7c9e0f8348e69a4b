//! Why an engine did not start, and why it did not take a task.

use ucm_core::device::DeviceError;
use ucm_posix::{JoinError, SegmentError};

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The segment could not be made or joined.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The rank could not take its place in it.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The device cannot be used.
    #[error("device {name}: {error}")]
    Device {
        /// Its name.
        name: String,
        /// Why not.
        error: DeviceError,
    },
    /// A thread or a descriptor could not be had.
    #[error("{what} could not be created: {error}; raise the process's limits (ulimit -u, -n)")]
    Resource {
        /// Which.
        what: &'static str,
        /// Why not.
        error: std::io::Error,
    },
}

/// Why a task was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// As many tasks as the queue holds are waiting.
    #[error(
        "the waiting queue of {depth} tasks is full; raise waiting_queue_depth or wait for some"
    )]
    QueueFull {
        /// The queue's depth.
        depth: u32,
    },
    /// More shards than the running queue holds.
    #[error("a task of {shards} shards exceeds running_queue_depth = {depth}; split it")]
    TaskTooLarge {
        /// Its shards.
        shards: usize,
        /// The queue's depth.
        depth: u32,
    },
    /// Not one address for each tensor of each shard.
    #[error("{shards} shards of {tensors} tensors need {} addresses, {addresses} were given", shards * tensors)]
    Addresses {
        /// Shards of the task.
        shards: usize,
        /// Tensors of a shard.
        tensors: usize,
        /// Addresses that came.
        addresses: usize,
    },
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    ShuttingDown,
}
