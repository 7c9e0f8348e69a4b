//! The posix backend: one file a block, in a directory.
//!
//! A block is assembled in a temporary file, by one process or several, and
//! renamed to its final name when it is complete, so a name that exists stands
//! for a whole block. [`layout`] is the file format, [`store`] the directory,
//! `write` the assembly and `read` the way back.

pub mod collect;
mod engine;
pub mod layout;
mod open_block;
mod partial;
#[cfg(test)]
mod power;
mod read;
pub mod store;
#[cfg(test)]
mod tests;
pub mod upkeep;
mod uring;
mod write;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Access, access};
use rustix::io::Errno;
use ucm_core::key::{BlockId, ShardKey};

use self::layout::BlockLayout;
use self::open_block::DirectIo;
use self::read::Reader;
use self::store::{Fsync, StoreDir, io_error};
use self::write::Writer;
use super::threaded::BlockingStore;
use super::traits::{BackendError, LoadedShard, OpenError, StoreGeometry};

pub use self::engine::{FileBackend, IoEngine};

/// Verified files that are kept open for the next shard of the same block.
const DEFAULT_OPEN_FILES: usize = 128;
/// Blocks one process may be writing at a time; each has a descriptor.
const DEFAULT_UNFINISHED_BLOCKS: usize = 256;
/// How long a read may take.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// How to open a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileOptions {
    /// The directory. It must exist.
    pub dir: PathBuf,
    /// What the store holds; one that was made for something else is refused.
    pub geometry: StoreGeometry,
    /// When a block counts as written.
    pub fsync: Fsync,
    /// Whether loads compare the bytes with their stored checksum.
    pub verify: bool,
    /// Files kept open for reading.
    pub open_files: usize,
    /// Blocks that may be half written at a time.
    pub unfinished_blocks: usize,
    /// How reads are handed to the system.
    pub engine: IoEngine,
    /// Whether reads go past the page cache, as far as alignment allows.
    pub direct_io: bool,
    /// What the blocks may take on the medium; the coldest go beyond.
    pub limit_bytes: Option<u64>,
    /// How long a read may take; see [`IoEngine`].
    pub timeout: Duration,
}

impl FileOptions {
    /// A verifying store in `dir` with the default limits.
    pub fn new(dir: impl Into<PathBuf>, geometry: StoreGeometry) -> Self {
        Self {
            dir: dir.into(),
            geometry,
            fsync: Fsync::default(),
            verify: true,
            open_files: DEFAULT_OPEN_FILES,
            unfinished_blocks: DEFAULT_UNFINISHED_BLOCKS,
            engine: IoEngine::default(),
            direct_io: false,
            limit_bytes: None,
            timeout: DEFAULT_TIMEOUT,
        }
    }
}

/// The store itself, with blocking calls.
pub struct FileStore {
    dir: Arc<StoreDir>,
    layout: BlockLayout,
    reader: Reader,
    writer: Writer,
}

impl FileStore {
    /// Opens the store, or makes an empty directory into one.
    pub fn open(options: &FileOptions) -> Result<Self, OpenError> {
        let dir = Arc::new(StoreDir::open(&options.dir, &options.geometry)?);
        let layout = BlockLayout::from(options.geometry);
        let direct = DirectIo::new(options.direct_io);
        let (verify, open_files) = (options.verify, options.open_files);
        let reader = Reader::new(Arc::clone(&dir), layout, verify, open_files, direct);
        let writer = Writer::new(Arc::clone(&dir), layout, options);
        Ok(Self { dir, layout, reader, writer })
    }

    /// The store's directory.
    pub fn root(&self) -> &Path {
        self.dir.root()
    }

    /// Where a block is, or would be.
    pub fn block_path(&self, block: &BlockId) -> PathBuf {
        self.dir.block_path(block)
    }

    /// Where in its file a shard begins, in bytes.
    pub fn shard_offset(&self, shard: u32) -> u64 {
        self.layout.shard_offset(shard)
    }

    /// Refuses a shard that no block has.
    fn check_shard(&self, key: ShardKey) -> Result<(), BackendError> {
        let shards_per_block = self.layout.shards_per_block;
        if key.shard < shards_per_block {
            Ok(())
        } else {
            Err(BackendError::ShardOutOfRange { key, shards_per_block })
        }
    }
}

impl BlockingStore for FileStore {
    fn load(&self, key: ShardKey, buffer: &mut [u8]) -> Result<LoadedShard, BackendError> {
        self.check_shard(key)?;
        self.reader.load(key, buffer)
    }

    fn store(
        &self,
        key: ShardKey,
        bytes: &[u8],
        checksum: Option<u64>,
    ) -> Result<(), BackendError> {
        self.check_shard(key)?;
        self.writer.store(key, bytes, checksum)
    }

    fn discard(&self, block: BlockId) {
        self.writer.discard(&block);
    }

    fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError> {
        let exists = |block: &BlockId| {
            let path = self.dir.block_path(block);
            match access(&path, Access::EXISTS) {
                Ok(()) => Ok(true),
                Err(Errno::NOENT) => Ok(false),
                Err(error) => Err(io_error("access", &path, &error.into())),
            }
        };
        blocks.iter().map(exists).collect()
    }
}
