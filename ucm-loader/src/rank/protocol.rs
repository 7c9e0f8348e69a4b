//! What a parent asks of a rank process, and what it answers.
//!
//! Through a channel, submissions and completions have a format of their own
//! (`wire`); over standard streams everything is one JSON object a line.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::LoaderConfig;
use crate::metrics::MetricsSnapshot;

/// The first line a rank gets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    /// Its configuration; `rank` says which it is.
    pub config: LoaderConfig,
    /// Where it writes its events; nowhere without.
    pub events_dir: Option<PathBuf>,
    /// Shards its device has room for.
    pub device_shards: u64,
    /// Seed of block ids and of contents.
    pub seed: u64,
}

/// A command with the number its answer will carry.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the parent.
    pub id: u64,
    /// What to do.
    pub command: Command,
}

/// What to do. Blocks are numbers that stand for ids (`replay::trace::block_id`);
/// the shards of `blocks[i]` lie one after the other on the device, the first
/// block's at shard `at`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Fill the whole device with poison.
    Poison,
    /// Load blocks onto the device.
    Load {
        /// Which.
        blocks: Vec<u64>,
        /// Where.
        at: u64,
    },
    /// Generate blocks on the device, and dump them.
    Dump {
        /// Which.
        blocks: Vec<u64>,
        /// Where.
        at: u64,
    },
    /// Compare blocks on the device, byte by byte, with what they must hold.
    Verify {
        /// Which.
        blocks: Vec<u64>,
        /// Where.
        at: u64,
    },
    /// Poison, load and verify in one: what a request of a replay needs.
    Serve {
        /// Which.
        blocks: Vec<u64>,
        /// Where.
        at: u64,
    },
    /// How far a chain of blocks is known, in the cache and in the backend.
    Lookup {
        /// Which.
        blocks: Vec<u64>,
    },
    /// Send a stream of tokens, as a model would; through a channel only.
    Generate {
        /// How many.
        tokens: u32,
        /// Time between two of them.
        pause_us: u64,
    },
    /// The engine's counters.
    Metrics,
    /// End everything and leave.
    Stop,
}

/// The answer to a [`Request`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reply {
    /// The request's number.
    pub id: u64,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The rank has started.
    Ready,
    /// It did not, or the command could not be run.
    Error(String),
    /// A load, dump, verify or serve has ended.
    Done(Done),
    /// The counters.
    Metrics(MetricsSnapshot),
    /// Left; nothing was still under way.
    Stopped {
        /// Whether the backend had ended its work.
        drained: bool,
    },
}

/// Figures of one command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// When it began (`CLOCK_MONOTONIC`).
    pub began_ns: u64,
    /// When it ended.
    pub ended_ns: u64,
    /// Shards found READY.
    pub hits: u64,
    /// Shards this rank loaded.
    pub owned: u64,
    /// Shards another rank loaded meanwhile.
    pub waited: u64,
    /// Shards that failed, and why, the first few.
    pub failed_shards: u64,
    /// The first few reasons.
    pub reasons: Vec<String>,
    /// Bytes that were compared and are right.
    pub verified_bytes: u64,
    /// Shards with a wrong byte.
    pub mismatched_shards: u64,
    /// Of a lookup: blocks from the front that the cache has.
    #[serde(default)]
    pub ready_blocks: u64,
    /// Of a lookup: blocks from the front that the cache or the backend has.
    #[serde(default)]
    pub found_blocks: u64,
}
