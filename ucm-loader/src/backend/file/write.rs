//! Writing blocks: shards go into partial files, the last one publishes.
//!
//! The shards of a block may come from several processes and at different
//! times: all of them have the same partial file open, see [`Partial`].

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ucm_core::key::{BlockId, ShardKey};

use super::FileOptions;
use super::collect::Keeper;
use super::layout::{BlockLayout, Draft};
use super::partial::{Obstacle, Partial};
use super::store::{Fsync, StoreDir, io_error};
use crate::backend::traits::BackendError;

/// How far this process is with one shard of an unfinished block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Missing,
    Writing,
    Written,
}

/// A block that this process puts shards of.
struct Assembly {
    partial: Partial,
    shards: Mutex<Vec<Progress>>,
    /// Two threads may see at once that the last shard is there.
    publishing: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The writing half of a store.
pub(super) struct Writer {
    dir: Arc<StoreDir>,
    layout: BlockLayout,
    fsync: Fsync,
    limit: usize,
    /// How long another process's write of the same shard is waited for.
    timeout: Duration,
    keeper: Keeper,
    unfinished: Mutex<HashMap<BlockId, Arc<Assembly>>>,
}

impl Writer {
    pub(super) fn new(dir: Arc<StoreDir>, layout: BlockLayout, options: &FileOptions) -> Self {
        let FileOptions { fsync, unfinished_blocks: limit, timeout, limit_bytes, .. } = *options;
        let keeper = Keeper::new(limit_bytes);
        Self { dir, layout, fsync, limit, timeout, keeper, unfinished: Mutex::default() }
    }

    /// Takes one shard; if it was the last, publishes the block. `key.shard` is in range.
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
        let deadline = Instant::now() + self.timeout;
        let assembly = self.begin(key, deadline)?;
        let partial = &assembly.partial;
        // Without the lock: the shards of a block are written side by side.
        let written = partial.put(key, bytes, checksum, deadline);
        lock(&assembly.shards)[key.shard as usize] =
            if written.is_ok() { Progress::Written } else { Progress::Missing };
        let named = |obstacle| self.error(partial, obstacle);
        written.map_err(named)?;
        match partial.draft().map_err(named)? {
            Draft::Open(table) if table.iter().any(Option::is_none) => return Ok(()),
            Draft::Open(_) | Draft::Headed => {}
        }
        self.forget(key.block, &assembly);
        {
            let _one_at_a_time = lock(&assembly.publishing);
            partial.publish(&self.dir, self.fsync, deadline).map_err(named)?;
        }
        self.keeper.wrote(self.dir.root(), self.layout.file_bytes());
        Ok(())
    }

    /// Forgets what this process has put of an unfinished block; the file
    /// goes when nobody has it open any more.
    pub(super) fn discard(&self, block: &BlockId) {
        // Bound before it is dropped: dropping unlinks, and not under the lock.
        let forgotten = lock(&self.unfinished).remove(block);
        let Some(assembly) = forgotten else { return };
        let mine: Vec<_> = (0..)
            .zip(lock(&assembly.shards).iter().copied())
            .filter(|(_, progress)| *progress == Progress::Written)
            .collect();
        let deadline = Instant::now() + self.timeout;
        if let Err(obstacle) =
            assembly.partial.forget(mine.into_iter().map(|(shard, _)| shard), deadline)
        {
            let error = self.error(&assembly.partial, obstacle);
            tracing::warn!(%block, %error, "what was put of a discarded block stays in its partial file");
        }
    }

    fn error(&self, partial: &Partial, obstacle: Obstacle) -> BackendError {
        match obstacle {
            Obstacle::Io(call, error) => io_error(call, partial.path(), &error),
            Obstacle::Late => BackendError::TimedOut,
        }
    }

    /// No longer this process's business.
    fn forget(&self, block: BlockId, assembly: &Arc<Assembly>) {
        let mut unfinished = lock(&self.unfinished);
        if unfinished.get(&block).is_some_and(|found| Arc::ptr_eq(found, assembly)) {
            unfinished.remove(&block);
        }
    }

    /// The block's assembly, with this shard of it reserved for the caller.
    fn begin(&self, key: ShardKey, deadline: Instant) -> Result<Arc<Assembly>, BackendError> {
        loop {
            let assembly = self.assembly(key.block, deadline)?;
            let progress = lock(&assembly.shards)[key.shard as usize];
            if self.is_over(&assembly, progress) {
                self.forget(key.block, &assembly);
                continue;
            }
            let mut shards = lock(&assembly.shards);
            let progress = &mut shards[key.shard as usize];
            if *progress != Progress::Missing {
                return Err(BackendError::PutTwice(key));
            }
            *progress = Progress::Writing;
            drop(shards);
            return Ok(assembly);
        }
    }

    /// Whether another process has published this file and it is of no more
    /// use here: it has been removed since, or this shard is put once more.
    /// So it is when the block has become visible by another file: then this
    /// one was begun beside it, and lacks what was put before.
    fn is_over(&self, assembly: &Assembly, progress: Progress) -> bool {
        if progress == Progress::Written && self.is_visible(&assembly.partial.block()) {
            return true;
        }
        matches!(assembly.partial.draft(), Ok(Draft::Headed))
            && (progress == Progress::Written
                || matches!(assembly.partial.is_reachable(&self.dir), Ok(false)))
    }

    fn is_visible(&self, block: &BlockId) -> bool {
        self.dir.block_path(block).exists()
    }

    fn assembly(&self, block: BlockId, deadline: Instant) -> Result<Arc<Assembly>, BackendError> {
        if let Some(assembly) = lock(&self.unfinished).get(&block) {
            return Ok(Arc::clone(assembly));
        }
        self.make_room()?;
        let partial = Partial::open(&self.dir, block, self.layout, deadline);
        let partial = partial.map_err(|obstacle| match obstacle {
            Obstacle::Io(call, error) => io_error(call, &self.dir.root().join("tmp"), &error),
            Obstacle::Late => BackendError::TimedOut,
        })?;
        let shards = vec![Progress::Missing; self.layout.shards_per_block as usize];
        let (shards, publishing) = (Mutex::new(shards), Mutex::default());
        let made = Arc::new(Assembly { partial, shards, publishing });
        match lock(&self.unfinished).entry(block) {
            // Another thread was faster; it has the same file.
            Entry::Occupied(theirs) => Ok(Arc::clone(theirs.get())),
            Entry::Vacant(place) => Ok(Arc::clone(place.insert(made))),
        }
    }

    /// Refuses one block too many, when those that others have finished are gone.
    fn make_room(&self) -> Result<(), BackendError> {
        let mut unfinished = lock(&self.unfinished);
        if unfinished.len() < self.limit {
            return Ok(());
        }
        // A visible block needs none of the shards that were put beside it.
        let gone: Vec<_> =
            unfinished.extract_if(|block, _| self.dir.block_path(block).exists()).collect();
        let is_full = unfinished.len() >= self.limit;
        drop(unfinished);
        drop(gone);
        if is_full { Err(BackendError::TooManyUnfinished { limit: self.limit }) } else { Ok(()) }
    }
}
