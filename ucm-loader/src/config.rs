//! The configuration: one struct, put together from its sources, checked once.
//!
//! [`LoaderConfig`] is what files, environment and flags can say; later
//! sources win, in this order: defaults, TOML file, `UCM_*` variables, flags.
//! [`LoaderConfig::check`] turns it into a [`Config`], whose fields are known
//! to be possible and of which everything else is made.

mod check;
mod error;
mod segment;
mod source;
#[cfg(test)]
mod tests;

pub use check::{BackendChoice, Config, WaitMode};
pub use error::ConfigError;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::backend::file::IoEngine;
use crate::backend::file::store::Fsync;

/// Every key there is. Sizes are in bytes, times in milliseconds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoaderConfig {
    /// Which cache of the machine: part of its segments' names. 1 to 64 of
    /// `A-Z a-z 0-9 . _ -`.
    #[serde(deserialize_with = "source::text")]
    pub segment_id: String,
    /// Where shared memory is.
    pub shm_dir: PathBuf,
    /// Bytes of the host cache. Every slot has room for one shard.
    pub capacity_bytes: u64,
    /// Slots that only prefetch and prealloc may take. By default a sixteenth
    /// of all, but never so many that a rank is left without one.
    pub reserved_slots: Option<u32>,
    /// Bytes of a shard.
    pub shard_bytes: u64,
    /// Bytes of a block: a multiple of `shard_bytes`.
    pub block_bytes: u64,
    /// Bytes of each tensor that a shard is scattered over on the device, in
    /// the order in which they lie in the shard; together `shard_bytes`.
    /// Empty: a shard is one piece.
    pub tensor_bytes: Vec<u64>,
    /// Whether slots for the next shard of each block are prepared ahead: for
    /// engines that load layer by layer.
    pub prealloc: bool,
    /// Ranks of this node that share the cache.
    pub local_rank_size: u32,
    /// This process's rank on the node.
    pub rank: u32,
    /// The device it drives; by default the one of its rank's number.
    pub device_id: Option<u32>,
    /// Places in the participant table: ranks, schedulers, and spares for
    /// those that are dead and not yet reaped.
    pub participants: u32,
    /// Where shards come from: `posix:DIR` or `memory:NAME`.
    #[serde(deserialize_with = "source::text")]
    pub backend: String,
    /// Bytes a `memory:` backend has room for.
    pub memory_backend_bytes: u64,
    /// Threads that load from the backend.
    pub backend_workers: u32,
    /// Loads a rank may own at a time; by default twice `backend_workers`.
    pub claim_window: Option<u32>,
    /// Shards that are not READY yet, its own loads or others', that a rank
    /// may wait for at a time; by default as many as its share of the slots.
    pub lookahead: Option<u32>,
    /// Tasks that may wait for dispatch, rounded up to a power of two.
    pub waiting_queue_depth: u32,
    /// Shards that may wait for transfer, rounded up to a power of two.
    pub running_queue_depth: u32,
    /// Streams to copy to the device on.
    pub stream_number: u32,
    /// How long a load may take.
    pub timeout_ms: u64,
    /// How long the slot of a dead rank stays untouched, because IO it began
    /// may still write there; by default twice `timeout_ms`.
    pub io_quarantine_ms: Option<u64>,
    /// Whether shards carry checksums.
    pub checksum: bool,
    /// Whether the cache stays when the last rank leaves.
    pub persist: bool,
    /// Ask for huge pages under the host cache. Where the system gives none,
    /// one warning says so.
    pub huge_pages: bool,
    /// Ask for memory of this NUMA node; the segment's creator decides. Where
    /// the system will not, one warning says so.
    pub numa_node: Option<u32>,
    /// When a block file counts as written: `none`, `data` or `full`.
    pub fsync: Fsync,
    /// How block files are read: `auto`, `threads` or `uring`.
    pub io_engine: IoEngine,
    /// Whether block files are read past the page cache. Right where the
    /// store is larger than the memory left for it.
    pub direct_io: bool,
    /// What a `posix:` store may take of its medium; beyond that the blocks
    /// that were not read for longest are removed. By default no limit.
    pub store_limit_bytes: Option<u64>,
    /// Whether ranks walk a task's shards in rotated order.
    pub rotate: bool,
    /// How waiters wait: `futex`, or `yield` to measure the difference.
    pub wait_mode: WaitMode,
    /// What the bytes are: model, dtype, layout. Caches and stores of another
    /// name are refused, never mixed.
    #[serde(deserialize_with = "source::text")]
    pub model: String,
}

impl Default for LoaderConfig {
    fn default() -> Self {
        Self {
            segment_id: "default".to_owned(),
            shm_dir: "/dev/shm".into(),
            capacity_bytes: 1 << 30,
            reserved_slots: None,
            shard_bytes: 256 << 10,
            block_bytes: 2 << 20,
            tensor_bytes: Vec::new(),
            prealloc: true,
            local_rank_size: 1,
            rank: 0,
            device_id: None,
            participants: 32,
            backend: "posix:/var/lib/ucm".to_owned(),
            memory_backend_bytes: 1 << 30,
            backend_workers: 4,
            claim_window: None,
            lookahead: None,
            waiting_queue_depth: 8192,
            running_queue_depth: 524_288,
            stream_number: 4,
            timeout_ms: 30_000,
            io_quarantine_ms: None,
            checksum: true,
            persist: false,
            huge_pages: false,
            numa_node: None,
            fsync: Fsync::Data,
            io_engine: IoEngine::Auto,
            direct_io: false,
            store_limit_bytes: None,
            rotate: true,
            wait_mode: WaitMode::Futex,
            model: String::new(),
        }
    }
}
