//! What can go wrong with a backend: while it is opened, and with a request.

use std::path::PathBuf;

use ucm_core::key::ShardKey;
use ucm_core::slot::meta::LoadErrorCode;

use super::file::layout::BadObject;

/// Why a load, a store or a question was not answered.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The block is not there.
    #[error("block {} is not in the backend", .0.block)]
    NotFound(ShardKey),
    /// The block has fewer shards than that.
    #[error("shard {} of block {} was asked for, blocks have {shards_per_block}", key.shard, key.block)]
    ShardOutOfRange {
        /// What was asked for.
        key: ShardKey,
        /// Shards a block has.
        shards_per_block: u32,
    },
    /// The bytes do not fit: a load's buffer is smaller than the stored
    /// shard, or a store's bytes exceed the shard size.
    #[error("{len_bytes} bytes of shard {} of block {} do not fit into {room_bytes}", key.shard, key.block)]
    DoesNotFit {
        /// Which shard.
        key: ShardKey,
        /// How long it is.
        len_bytes: u64,
        /// How much room there is.
        room_bytes: u64,
    },
    /// The stored bytes are not what their checksum says.
    #[error("checksum of shard {} in {} is {stored:#018x}, its bytes have {computed:#018x}", key.shard, path.display())]
    ChecksumMismatch {
        /// Which shard.
        key: ShardKey,
        /// The object.
        path: PathBuf,
        /// What was stored at the dump.
        stored: u64,
        /// What the bytes have now.
        computed: u64,
    },
    /// The stored object is not what its name says.
    #[error("{} is not a usable block: {reason}", path.display())]
    BadObject {
        /// The object.
        path: PathBuf,
        /// What is wrong with it.
        reason: BadObject,
    },
    /// A system call failed.
    #[error("{operation} failed with errno {errno} on {}", path.display())]
    Io {
        /// The call.
        operation: &'static str,
        /// Its file.
        path: PathBuf,
        /// Its error number, positive.
        errno: i32,
    },
    /// Fewer bytes came than the object is long.
    #[error("read {got_bytes} of {wanted_bytes} bytes")]
    ShortRead {
        /// What came.
        got_bytes: u64,
        /// What should have.
        wanted_bytes: u64,
    },
    /// The same shard of a block was put twice.
    #[error("shard {} of block {} was put twice", .0.shard, .0.block)]
    PutTwice(ShardKey),
    /// Too many blocks are half written.
    #[error("{limit} blocks are being written already; finish or discard some")]
    TooManyUnfinished {
        /// How many may be.
        limit: usize,
    },
    /// The store has no room for another block.
    #[error("the store is full: it holds {capacity_blocks} blocks")]
    StoreFull {
        /// How many it has room for.
        capacity_blocks: u64,
    },
    /// The queue before the workers is full.
    #[error("the backend's queue of {depth} requests is full")]
    QueueFull {
        /// Its depth.
        depth: usize,
    },
    /// A fault-injecting middleware or the memory backend was told to fail.
    #[error("injected failure, errno {errno}")]
    Injected {
        /// The error number it pretends.
        errno: i32,
    },
    /// The breaker is open: the backend kept failing, and no probe has
    /// succeeded since.
    #[error("the backend is failing; it is asked again when a probe succeeds")]
    Unavailable,
    /// A request was dropped without an answer.
    #[error("the request was dropped without an answer")]
    Abandoned,
    /// The backend is being shut down.
    #[error("the backend is shutting down")]
    ShuttingDown,
    /// It was not done in time.
    #[error("not done by the deadline")]
    TimedOut,
}

impl BackendError {
    /// The code a slot keeps for the ranks that wait: errno values stay
    /// themselves, the rest map to the cache's own constants.
    pub fn code(&self) -> LoadErrorCode {
        match self {
            Self::NotFound(_) => LoadErrorCode::NOT_FOUND,
            Self::ChecksumMismatch { .. } => LoadErrorCode::CHECKSUM,
            Self::BadObject { .. } | Self::ShortRead { .. } | Self::DoesNotFit { .. } => {
                LoadErrorCode::BAD_OBJECT
            }
            Self::Io { errno, .. } | Self::Injected { errno } => LoadErrorCode(*errno),
            Self::ShardOutOfRange { .. } | Self::PutTwice(_) => LoadErrorCode(libc::EINVAL),
            Self::TooManyUnfinished { .. } => LoadErrorCode(libc::EMFILE),
            Self::StoreFull { .. } => LoadErrorCode(libc::ENOSPC),
            Self::QueueFull { .. } => LoadErrorCode(libc::EAGAIN),
            Self::Abandoned | Self::ShuttingDown => LoadErrorCode::ABANDONED,
            Self::TimedOut => LoadErrorCode::TIMED_OUT,
            Self::Unavailable => LoadErrorCode(libc::EHOSTDOWN),
        }
    }
}

impl From<&BackendError> for LoadErrorCode {
    fn from(error: &BackendError) -> Self {
        error.code()
    }
}

/// What a store remembers of the cache it was made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreGeometry {
    /// Bytes of a shard.
    pub shard_bytes: u64,
    /// Shards of a block.
    pub shards_per_block: u32,
    /// The cache's content tag: model, dtype, checksum kind.
    pub content_tag: u64,
}

impl std::fmt::Display for StoreGeometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { shard_bytes, shards_per_block, content_tag } = self;
        write!(f, "{shards_per_block} shards of {shard_bytes} bytes, content {content_tag:#018x}")
    }
}

/// Why a store could not be opened. Each says what to do about it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is nothing at the path.
    #[error("backend directory {} does not exist; create it (mkdir -p) or correct `backend`", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// There is something else at the path.
    #[error("backend path {} is not a directory; name one in `backend`", path.display())]
    NotADirectory {
        /// The path.
        path: PathBuf,
    },
    /// Nothing can be written there.
    #[error("backend directory {} cannot be written (errno {errno}); mount it read-write, or give this user the permission", path.display())]
    ReadOnly {
        /// The path.
        path: PathBuf,
        /// Why the probe failed.
        errno: i32,
    },
    /// The store belongs to a cache of another shape.
    #[error("{} holds {stored}, the configuration asks for {asked}; correct the configuration or use another backend path", path.display())]
    OtherGeometry {
        /// The store.
        path: PathBuf,
        /// What it holds.
        stored: StoreGeometry,
        /// What was asked for.
        asked: StoreGeometry,
    },
    /// The store's description cannot be read.
    #[error("{} is not a store of this version; move it away to start an empty one", path.display())]
    NotAStore {
        /// The file that should describe it.
        path: PathBuf,
    },
    /// A store's name has characters that a file name cannot have.
    #[error("store name {name:?} must be 1 to 64 of A-Z a-z 0-9 . _ - and not begin with a dot")]
    BadName {
        /// The name.
        name: String,
    },
    /// A shard or block size, or a count, that cannot be.
    #[error("{key} = {value} is outside {min}..={max}")]
    OutOfRange {
        /// What.
        key: &'static str,
        /// What it was.
        value: u64,
        /// The smallest that works.
        min: u64,
        /// The largest that works.
        max: u64,
    },
    /// The file system has no room for the whole store.
    #[error("{} needs {needed_bytes} bytes and its file system has {free_bytes} free; enlarge it or lower the capacity", path.display())]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// What it would take.
        needed_bytes: u64,
        /// What there is.
        free_bytes: u64,
    },
    /// The worker threads could not be started.
    #[error(
        "cannot start a worker thread (errno {errno}); raise the limit on threads or lower backend_workers"
    )]
    NoThread {
        /// Why.
        errno: i32,
    },
    /// The system has no io_uring for this process.
    #[error(
        "io_uring cannot be used here (errno {errno}); set io_engine to auto or threads, or allow it (container seccomp profile, sysctl kernel.io_uring_disabled)"
    )]
    NoUring {
        /// Why.
        errno: i32,
    },
    /// Some other system call failed.
    #[error("{operation} failed with errno {errno} on {}", path.display())]
    Io {
        /// The call.
        operation: &'static str,
        /// Its file.
        path: PathBuf,
        /// Its error number.
        errno: i32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errno_stays_itself_in_a_slots_error_code() {
        let error = BackendError::Io { operation: "pread", path: "x".into(), errno: libc::EIO };
        assert_eq!(error.code(), LoadErrorCode(libc::EIO));
        assert_eq!(BackendError::Injected { errno: 28 }.code(), LoadErrorCode(28));
        let missing = BackendError::NotFound(ShardKey::default());
        assert_eq!(LoadErrorCode::from(&missing), LoadErrorCode::NOT_FOUND);
    }
}
