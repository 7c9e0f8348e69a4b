//! Why a configuration is refused: each variant names key, value, limit and remedy.

use std::path::PathBuf;

/// A configuration that cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file that was named is not there or cannot be read.
    #[error("configuration file {} cannot be read (errno {errno}); correct its path or its permissions", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        errno: i32,
    },
    /// A source has an unknown key or a value of another type.
    #[error("{0}; correct or remove the key")]
    Source(#[source] Box<figment::Error>),
    /// The tensors of a shard are not the shard.
    #[error(
        "tensor_bytes: the tensors are {sum_bytes} bytes together (each at least one), \
         a shard has shard_bytes = {shard_bytes}; list every tensor of a shard once"
    )]
    Tensors {
        /// What they come to.
        sum_bytes: u64,
        /// What they should.
        shard_bytes: u64,
    },
    /// A number outside its limits.
    #[error("{key} = {value} is outside {min}..={max}; {remedy}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// Its value.
        value: u64,
        /// The smallest that works.
        min: u64,
        /// The largest that works.
        max: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// The shard size is 0.
    #[error(
        "shard_bytes = 0 is below its minimum of {min}; set it to the bytes of one shard, for example 262144"
    )]
    ShardZero {
        /// The smallest that works.
        min: u64,
    },
    /// A block is not a whole number of shards.
    #[error(
        "shard_bytes = {shard_bytes} does not divide block_bytes = {block_bytes}; make block_bytes a multiple of it, for example {nearest}"
    )]
    ShardNotADivisor {
        /// Bytes of a shard.
        shard_bytes: u64,
        /// Bytes of a block.
        block_bytes: u64,
        /// The nearest multiple from `block_bytes` on.
        nearest: u64,
    },
    /// Less than one slot for every rank.
    #[error(
        "capacity_bytes = {capacity_bytes} is below {needed_bytes}, one slot of {slot_bytes} bytes for each of local_rank_size = {local_rank_size} ranks; raise it"
    )]
    CapacityTooSmall {
        /// The capacity.
        capacity_bytes: u64,
        /// The least that works.
        needed_bytes: u64,
        /// What one slot takes.
        slot_bytes: u64,
        /// How many ranks need one.
        local_rank_size: u32,
    },
    /// The reserve leaves less than one slot for every rank.
    #[error(
        "reserved_slots = {reserved_slots} of {slot_count} slots leaves less than one for each of local_rank_size = {local_rank_size} ranks; lower it to at most {max}, or raise capacity_bytes"
    )]
    ReserveTooLarge {
        /// The reserve.
        reserved_slots: u32,
        /// Slots in all.
        slot_count: u32,
        /// How many ranks need one.
        local_rank_size: u32,
        /// The largest reserve that works.
        max: u32,
    },
    /// The participant table does not come in that size.
    #[error("participants = {participants} is not a multiple of {step}; use {nearest}")]
    ParticipantStep {
        /// The value.
        participants: u32,
        /// What it must be a multiple of.
        step: u32,
        /// The next multiple.
        nearest: u32,
    },
    /// The rank is not one of the node's.
    #[error(
        "rank = {rank} is outside 0..{local_rank_size} (local_rank_size); number the ranks of a node from 0, or raise local_rank_size"
    )]
    RankOutOfRange {
        /// The rank.
        rank: u32,
        /// Ranks of the node.
        local_rank_size: u32,
    },
    /// A name that cannot be part of a file name.
    #[error(
        "{key} = {value:?} must be 1 to 64 of A-Z a-z 0-9 . _ - and not begin with a dot; choose such a name"
    )]
    BadName {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
    },
    /// A directory that is not named from the root.
    #[error("{key} = {} is not an absolute path; write it from / on", value.display())]
    RelativePath {
        /// The key.
        key: &'static str,
        /// Its value.
        value: PathBuf,
    },
    /// The backend is of no known kind.
    #[error("backend = {value:?} is neither posix:DIR nor memory:NAME; write one of the two")]
    UnknownBackend {
        /// Its value.
        value: String,
    },
    /// The quarantine would end while the IO it guards against may still run.
    #[error(
        "io_quarantine_ms = {io_quarantine_ms} is below timeout_ms = {timeout_ms}; set it to at least that, better twice as long"
    )]
    QuarantineTooShort {
        /// The quarantine.
        io_quarantine_ms: u64,
        /// How long a load may take.
        timeout_ms: u64,
    },
    /// The memory backend has no room for a single block.
    #[error(
        "memory_backend_bytes = {memory_backend_bytes} is below {needed_bytes}, one block; raise it"
    )]
    MemoryBackendTooSmall {
        /// The value.
        memory_backend_bytes: u64,
        /// The least that works.
        needed_bytes: u64,
    },
}

impl From<figment::Error> for ConfigError {
    fn from(error: figment::Error) -> Self {
        Self::Source(Box::new(error))
    }
}
