//! UCM's processes: configuration, storage backends, load and dump pipelines.
//!
//! `ucm-core` says what the shared cache is and `ucm-posix` puts it into shared
//! memory; this crate fills it. A rank process reads one [`config`], opens one
//! [`backend`], and moves shards between the two. [`content`] and [`replay`]
//! are what the command line tool checks the whole with: bytes that can be
//! recomputed, and traffic that can be repeated.

pub mod backend;
pub mod channel;
pub mod cli;
pub mod completion;
pub mod config;
pub mod content;
pub mod crash;
pub mod doctor;
pub mod doorbell;
pub(crate) mod dump;
pub mod engine;
pub mod interrupt;
pub(crate) mod load;
pub mod metrics;
pub mod rank;
pub mod replay;
pub(crate) mod scatter;
pub mod task;

pub use config::{Config, LoaderConfig};
pub use engine::{Engine, Parts, Prefix, StartError, SubmitError};
pub use task::{
    ShardError, ShardFailure, ShardTarget, TaskHandle, TaskOptions, TaskReport, TaskStatus,
};
