//! From what was written to what is possible: the one validation.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use ucm_core::limits::{
    MAX_PARTICIPANTS, MAX_SHARD_BYTES, MAX_SLOTS, MIN_SHARD_BYTES, PARTICIPANT_STEP,
};
use ucm_core::segment::geometry::{CacheShape, SlotStride};
use xxhash_rust::xxh3::xxh3_64;

use super::{ConfigError, LoaderConfig};
use crate::backend::file::IoEngine;
use crate::backend::file::layout::MAX_SHARDS_PER_BLOCK;
use crate::backend::file::store::Fsync;
use crate::backend::memory::is_plain_name;
use crate::backend::traits::StoreGeometry;

/// The share of the slots that is reserved unless the configuration says otherwise.
const RESERVED_SHARE: u32 = 16;
/// A day: beyond it a time is a mistake in the unit.
const MAX_TIME_MS: u64 = 24 * 60 * 60 * 1000;
/// More threads than any device has queues.
const MAX_WORKERS: u64 = 1024;
/// Entries of 8 bytes, so at most 128 MiB a ring.
const MAX_QUEUE_DEPTH: u64 = 1 << 24;

/// How a waiter waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WaitMode {
    /// A short spin, then asleep until woken.
    #[default]
    Futex,
    /// Gives the processor away and looks again, for ever: what the futex is
    /// measured against.
    Yield,
}

/// Which backend.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BackendChoice {
    /// Block files in a directory.
    Posix {
        /// The directory.
        dir: PathBuf,
    },
    /// A shared file in the shared-memory directory.
    Memory {
        /// Its name.
        name: String,
        /// Blocks it has room for.
        capacity_blocks: u64,
    },
}

/// A configuration that has been checked. Made by [`LoaderConfig::check`] only.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Config {
    /// Which cache of the machine.
    pub segment_id: String,
    /// Where shared memory is.
    pub shm_dir: PathBuf,
    /// Slots of the host cache.
    pub slot_count: u32,
    /// Of those, slots that only prefetch and prealloc may take.
    pub reserved_slots: u32,
    /// Bytes of a shard.
    pub shard_bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Shards of a block.
    pub shards_per_block: u32,
    /// Bytes of each tensor of a shard; empty when it is one piece.
    pub tensor_bytes: Vec<u64>,
    /// Whether the next shards' slots are prepared ahead.
    pub prealloc: bool,
    /// Ranks of this node.
    pub local_rank_size: u32,
    /// This process's rank, below `local_rank_size`.
    pub rank: u32,
    /// The device it drives.
    pub device_id: u32,
    /// Places in the participant table.
    pub participants: u32,
    /// Where shards come from.
    pub backend: BackendChoice,
    /// Threads that load from it.
    pub backend_workers: u32,
    /// Loads a rank may own at a time.
    pub claim_window: u32,
    /// Shards that are not READY yet that a rank may wait for at a time.
    pub lookahead: u32,
    /// Tasks that may wait for dispatch.
    pub waiting_queue_depth: u32,
    /// Shards that may wait for transfer.
    pub running_queue_depth: u32,
    /// Streams to copy to the device on.
    pub stream_number: u32,
    /// How long a load may take.
    pub timeout: Duration,
    /// How long the slot of a dead rank stays untouched.
    pub io_quarantine: Duration,
    /// Whether shards carry checksums.
    pub checksum: bool,
    /// Whether the cache stays when the last rank leaves.
    pub persist: bool,
    /// Whether to ask for huge pages.
    pub huge_pages: bool,
    /// Which NUMA node's memory to ask for.
    pub numa_node: Option<u32>,
    /// When a block file counts as written.
    pub fsync: Fsync,
    /// How block files are read.
    pub io_engine: IoEngine,
    /// Whether they are read past the page cache.
    pub direct_io: bool,
    /// What a store of block files may take.
    pub store_limit_bytes: Option<u64>,
    /// Whether ranks walk a task's shards in rotated order.
    pub rotate: bool,
    /// How waiters wait.
    pub wait_mode: WaitMode,
    /// Everything that must be equal for bytes to mean the same, as a number.
    pub content_tag: u64,
}

impl Config {
    /// What all processes of the cache must agree on.
    pub fn shape(&self) -> CacheShape {
        CacheShape {
            slot_count: self.slot_count,
            reserved_slots: self.reserved_slots,
            shard_bytes: self.shard_bytes,
            shards_per_block: self.shards_per_block,
            local_rank_size: self.local_rank_size,
            participants: self.participants,
            content_tag: self.content_tag,
        }
    }

    /// What the backend's store must have been made for.
    pub fn store_geometry(&self) -> StoreGeometry {
        StoreGeometry {
            shard_bytes: self.shard_bytes,
            shards_per_block: self.shards_per_block,
            content_tag: self.content_tag,
        }
    }
}

fn within(
    key: &'static str,
    value: impl Into<u64>,
    min: u64,
    max: u64,
    remedy: &'static str,
) -> Result<(), ConfigError> {
    let value = value.into();
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(ConfigError::OutOfRange { key, value, min, max, remedy })
    }
}

impl LoaderConfig {
    /// Checks everything and works out what was left to a default.
    pub fn check(self) -> Result<Config, ConfigError> {
        self.check_names()?;
        let shards_per_block = self.shards_per_block()?;
        self.check_tensors()?;
        self.check_ranks()?;
        let (slot_count, reserved_slots) = self.slots()?;
        self.check_counts()?;
        let io_quarantine_ms = self.io_quarantine_ms()?;
        let workers = self.backend_workers;
        let claim_window = self.claim_window.unwrap_or(workers.saturating_mul(2));
        within(
            "claim_window",
            claim_window,
            1,
            u64::from(u32::MAX),
            "let a rank own at least one load",
        )?;
        let lookahead = self.lookahead.unwrap_or(u32::MAX);
        within(
            "lookahead",
            lookahead,
            1,
            u64::from(u32::MAX),
            "let a rank wait for at least one shard",
        )?;
        Ok(Config {
            backend: self.backend_choice()?,
            content_tag: self.content_tag(),
            slot_count,
            reserved_slots,
            shards_per_block,
            tensor_bytes: self.tensor_bytes,
            prealloc: self.prealloc,
            claim_window,
            lookahead,
            device_id: self.device_id.unwrap_or(self.rank),
            timeout: Duration::from_millis(self.timeout_ms),
            io_quarantine: Duration::from_millis(io_quarantine_ms),
            segment_id: self.segment_id,
            shm_dir: self.shm_dir,
            shard_bytes: self.shard_bytes,
            block_bytes: self.block_bytes,
            local_rank_size: self.local_rank_size,
            rank: self.rank,
            participants: self.participants,
            backend_workers: self.backend_workers,
            waiting_queue_depth: self.waiting_queue_depth,
            running_queue_depth: self.running_queue_depth,
            stream_number: self.stream_number,
            checksum: self.checksum,
            persist: self.persist,
            huge_pages: self.huge_pages,
            numa_node: self.numa_node,
            fsync: self.fsync,
            io_engine: self.io_engine,
            direct_io: self.direct_io,
            store_limit_bytes: self.store_limit_bytes,
            rotate: self.rotate,
            wait_mode: self.wait_mode,
        })
    }

    /// Tensors must make up the shard, exactly.
    fn check_tensors(&self) -> Result<(), ConfigError> {
        let sum = self.tensor_bytes.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        let whole = self.tensor_bytes.is_empty()
            || (sum == self.shard_bytes && !self.tensor_bytes.contains(&0));
        if whole {
            return Ok(());
        }
        Err(ConfigError::Tensors { sum_bytes: sum, shard_bytes: self.shard_bytes })
    }

    fn check_names(&self) -> Result<(), ConfigError> {
        if !is_plain_name(&self.segment_id) {
            let value = self.segment_id.clone();
            return Err(ConfigError::BadName { key: "segment_id", value });
        }
        if !self.shm_dir.is_absolute() {
            let value = self.shm_dir.clone();
            return Err(ConfigError::RelativePath { key: "shm_dir", value });
        }
        Ok(())
    }

    fn shards_per_block(&self) -> Result<u32, ConfigError> {
        let Self { shard_bytes, block_bytes, .. } = *self;
        if shard_bytes == 0 {
            return Err(ConfigError::ShardZero { min: MIN_SHARD_BYTES });
        }
        let remedy = "cut blocks into shards of such a size";
        within("shard_bytes", shard_bytes, MIN_SHARD_BYTES, MAX_SHARD_BYTES, remedy)?;
        let max = shard_bytes.saturating_mul(MAX_SHARDS_PER_BLOCK.into());
        within("block_bytes", block_bytes, shard_bytes, max, "a block has 1 to 1048576 shards")?;
        if !block_bytes.is_multiple_of(shard_bytes) {
            let nearest = block_bytes.next_multiple_of(shard_bytes);
            return Err(ConfigError::ShardNotADivisor { shard_bytes, block_bytes, nearest });
        }
        // At most MAX_SHARDS_PER_BLOCK by the range above.
        Ok((block_bytes / shard_bytes) as u32)
    }

    fn check_ranks(&self) -> Result<(), ConfigError> {
        let Self { participants, local_rank_size, rank, .. } = *self;
        let (step, most) = (PARTICIPANT_STEP.into(), MAX_PARTICIPANTS.into());
        within("participants", participants, step, most, "32 serve a node of 8 ranks")?;
        if !participants.is_multiple_of(PARTICIPANT_STEP) {
            let (step, nearest) =
                (PARTICIPANT_STEP, participants.next_multiple_of(PARTICIPANT_STEP));
            return Err(ConfigError::ParticipantStep { participants, step, nearest });
        }
        // One place is left for a scheduler.
        let max = u64::from(participants) - 1;
        let remedy = "it counts this node's ranks, not the job's; more need more participants";
        within("local_rank_size", local_rank_size, 1, max, remedy)?;
        if rank >= local_rank_size {
            return Err(ConfigError::RankOutOfRange { rank, local_rank_size });
        }
        Ok(())
    }

    fn slots(&self) -> Result<(u32, u32), ConfigError> {
        let Self { capacity_bytes, local_rank_size, .. } = *self;
        let slot_bytes = SlotStride::for_shard(self.shard_bytes).bytes();
        let ranks = u64::from(local_rank_size);
        if capacity_bytes / slot_bytes < ranks {
            return Err(ConfigError::CapacityTooSmall {
                capacity_bytes,
                needed_bytes: ranks * slot_bytes,
                slot_bytes,
                local_rank_size,
            });
        }
        let max = u64::from(MAX_SLOTS) * slot_bytes;
        within("capacity_bytes", capacity_bytes, slot_bytes, max, "use larger shards")?;
        // At most MAX_SLOTS by the range above, and at least one a rank.
        let slot_count = (capacity_bytes / slot_bytes) as u32;
        let most = slot_count - local_rank_size;
        let reserved_slots = self.reserved_slots.unwrap_or((slot_count / RESERVED_SHARE).min(most));
        if reserved_slots > most {
            let max = most;
            let error =
                ConfigError::ReserveTooLarge { reserved_slots, slot_count, local_rank_size, max };
            return Err(error);
        }
        Ok((slot_count, reserved_slots))
    }

    fn check_counts(&self) -> Result<(), ConfigError> {
        let workers = "a few per rank saturate a disk";
        within("backend_workers", self.backend_workers, 1, MAX_WORKERS, workers)?;
        within("stream_number", self.stream_number, 1, 64, "4 keep a device busy")?;
        let (depth, max) = ("raise it if tasks are refused as too many", MAX_QUEUE_DEPTH);
        within("waiting_queue_depth", self.waiting_queue_depth, 1, max, depth)?;
        within("running_queue_depth", self.running_queue_depth, 1, max, depth)?;
        within(
            "timeout_ms",
            self.timeout_ms,
            1,
            MAX_TIME_MS,
            "it is in milliseconds, at most a day",
        )
    }

    fn io_quarantine_ms(&self) -> Result<u64, ConfigError> {
        let timeout_ms = self.timeout_ms;
        let io_quarantine_ms = self.io_quarantine_ms.unwrap_or(2 * timeout_ms);
        if io_quarantine_ms < timeout_ms {
            return Err(ConfigError::QuarantineTooShort { io_quarantine_ms, timeout_ms });
        }
        let remedy = "it is in milliseconds, at most two days";
        within("io_quarantine_ms", io_quarantine_ms, timeout_ms, 2 * MAX_TIME_MS, remedy)?;
        Ok(io_quarantine_ms)
    }

    fn backend_choice(&self) -> Result<BackendChoice, ConfigError> {
        let value = &self.backend;
        match value.split_once(':') {
            Some(("posix", dir)) if !dir.is_empty() => Ok(BackendChoice::Posix { dir: dir.into() }),
            Some(("memory", name)) if is_plain_name(name) => {
                let memory_backend_bytes = self.memory_backend_bytes;
                let capacity_blocks = memory_backend_bytes / self.block_bytes;
                if capacity_blocks == 0 {
                    let needed_bytes = self.block_bytes;
                    return Err(ConfigError::MemoryBackendTooSmall {
                        memory_backend_bytes,
                        needed_bytes,
                    });
                }
                Ok(BackendChoice::Memory { name: name.to_owned(), capacity_blocks })
            }
            Some(("memory", _)) => {
                Err(ConfigError::BadName { key: "backend", value: value.clone() })
            }
            _ => Err(ConfigError::UnknownBackend { value: value.clone() }),
        }
    }

    /// Two configurations with equal tags give the same bytes the same meaning.
    fn content_tag(&self) -> u64 {
        // Fixed-width numbers first, so that no two inputs run together.
        let mut parts = Vec::new();
        parts.extend(self.block_bytes.to_le_bytes());
        parts.extend(self.shard_bytes.to_le_bytes());
        parts.push(u8::from(self.checksum));
        parts.extend(self.model.as_bytes());
        xxh3_64(&parts)
    }
}
