//! Writing blocks: each assembled in a temporary file, renamed when complete.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ucm_core::key::{BlockId, ShardKey};
use ucm_core::sync::{AtomicU32, Ordering};

use super::layout::{BlockLayout, ShardEntry};
use super::store::{Fsync, StoreDir, io_error, make_dir};
use crate::backend::traits::BackendError;
use crate::crash::crash_point;

/// How far one shard of an unfinished block is.
#[derive(Clone, Copy)]
enum Progress {
    Missing,
    Writing,
    Written(ShardEntry),
}

/// A block that is being written. Its temporary file goes with it.
struct Assembly {
    path: PathBuf,
    /// Locked, which tells sweepers that this process lives.
    file: File,
    shards: Mutex<Vec<Progress>>,
    /// 1 once the file has its final name and `path` is nobody's.
    renamed: AtomicU32,
}

impl Assembly {
    fn lock(&self) -> MutexGuard<'_, Vec<Progress>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Assembly {
    fn drop(&mut self) {
        if self.renamed.load(Ordering::Relaxed) == 0
            && let Err(error) = fs::remove_file(&self.path)
        {
            // The next opening of the store finds it unlocked and tries again.
            tracing::warn!(path = %self.path.display(), %error, "cannot remove an unfinished block");
        }
    }
}

/// The writing half of a store.
pub(super) struct Writer {
    dir: Arc<StoreDir>,
    layout: BlockLayout,
    fsync: Fsync,
    limit: usize,
    unfinished: Mutex<HashMap<BlockId, Arc<Assembly>>>,
}

impl Writer {
    pub(super) fn new(dir: Arc<StoreDir>, layout: BlockLayout, fsync: Fsync, limit: usize) -> Self {
        Self { dir, layout, fsync, limit, unfinished: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<BlockId, Arc<Assembly>>> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one shard; with the last, publishes the block. `key.shard` is in range.
    pub(super) fn store(
        &self,
        key: ShardKey,
        bytes: &[u8],
        checksum: Option<u64>,
    ) -> Result<(), BackendError> {
        let len_bytes = bytes.len() as u64;
        if len_bytes > self.layout.shard_bytes {
            let room_bytes = self.layout.shard_bytes;
            return Err(BackendError::DoesNotFit { key, len_bytes, room_bytes });
        }
        let assembly = self.assembly(key.block)?;
        let shard = key.shard as usize;
        match &mut assembly.lock()[shard] {
            slot @ Progress::Missing => *slot = Progress::Writing,
            Progress::Writing | Progress::Written(_) => return Err(BackendError::PutTwice(key)),
        }
        // Without the lock: the shards of a block are written side by side.
        let written = assembly.file.write_all_at(bytes, self.layout.shard_offset(key.shard));
        crash_point!(FileShardWritten);
        let complete = {
            let mut shards = assembly.lock();
            if let Err(error) = written {
                shards[shard] = Progress::Missing;
                return Err(io_error("pwrite", &assembly.path, &error));
            }
            shards[shard] = Progress::Written(ShardEntry { len_bytes, checksum });
            complete(&shards)
        };
        let Some(table) = complete else { return Ok(()) };
        self.discard(&key.block);
        self.publish(key.block, &assembly, &table)
    }

    /// Forgets an unfinished block; its file goes when the last write to it ends.
    pub(super) fn discard(&self, block: &BlockId) {
        // Bound before it is dropped: dropping unlinks, and not under the lock.
        let forgotten = self.lock().remove(block);
        drop(forgotten);
    }

    fn assembly(&self, block: BlockId) -> Result<Arc<Assembly>, BackendError> {
        {
            let unfinished = self.lock();
            if let Some(assembly) = unfinished.get(&block) {
                return Ok(Arc::clone(assembly));
            }
            if unfinished.len() >= self.limit {
                return Err(BackendError::TooManyUnfinished { limit: self.limit });
            }
        }
        let (path, file) = self
            .dir
            .temporary(&block.to_string())
            .map_err(|error| io_error("open", &self.dir.root().join("tmp"), &error))?;
        let shards = Mutex::new(vec![Progress::Missing; self.layout.shards_per_block as usize]);
        let made = Arc::new(Assembly { path, file, shards, renamed: AtomicU32::new(0) });
        crash_point!(FileMade);
        made.file
            .set_len(self.layout.file_bytes())
            .map_err(|error| io_error("ftruncate", &made.path, &error))?;
        match self.lock().entry(block) {
            // Another thread was faster; the file made here goes again.
            Entry::Occupied(theirs) => Ok(Arc::clone(theirs.get())),
            Entry::Vacant(place) => Ok(Arc::clone(place.insert(made))),
        }
    }

    /// Header, sync, rename: in this order nothing incomplete is ever visible.
    fn publish(
        &self,
        block: BlockId,
        assembly: &Assembly,
        table: &[ShardEntry],
    ) -> Result<(), BackendError> {
        let Assembly { path, file, .. } = assembly;
        file.write_all_at(&self.layout.encode(block, table), 0)
            .map_err(|error| io_error("pwrite", path, &error))?;
        crash_point!(FileHeaderWritten);
        match self.fsync {
            Fsync::None => Ok(()),
            Fsync::Data => file.sync_data(),
            Fsync::Full => file.sync_all(),
        }
        .map_err(|error| io_error("fsync", path, &error))?;
        let name = self.dir.block_path(&block);
        // An existing file of that name holds the same block, and whoever has
        // it open keeps it.
        self.rename(path, &name).map_err(|error| io_error("rename", &name, &error))?;
        crash_point!(FileRenamed);
        assembly.renamed.store(1, Ordering::Relaxed);
        if self.fsync == Fsync::Full {
            let parents = name.ancestors().skip(1).take(2);
            for dir in parents {
                File::open(dir)
                    .and_then(|dir| dir.sync_all())
                    .map_err(|error| io_error("fsync", dir, &error))?;
            }
        }
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        match fs::rename(from, to) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // The first block with this first byte.
                to.parent().map_or(Ok(()), make_dir)?;
                fs::rename(from, to)
            }
            other => other,
        }
    }
}

fn complete(shards: &[Progress]) -> Option<Vec<ShardEntry>> {
    let written = |progress: &Progress| match progress {
        Progress::Written(entry) => Some(*entry),
        Progress::Missing | Progress::Writing => None,
    };
    shards.iter().map(written).collect()
}
