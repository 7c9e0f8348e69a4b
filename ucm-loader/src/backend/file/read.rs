//! Reading blocks: a few verified files kept open, every byte checked.

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use ucm_core::key::{BlockId, ShardKey};
use xxhash_rust::xxh3::xxh3_64;

use super::collect::touch;
use super::layout::{BadObject, BlockLayout, ShardEntry};
use super::open_block::{DirectIo, OpenBlock, read_at, regular_length};
use super::store::{StoreDir, io_error};
use crate::backend::traits::{BackendError, LoadedShard};

/// Blocks remembered as bad when they cannot be moved away.
const MAX_REFUSED: usize = 4096;

/// The open files, least recently used out first.
#[derive(Default)]
struct Opened {
    files: HashMap<BlockId, (Arc<OpenBlock>, u64)>,
    clock: u64,
    /// Bad blocks that are still there because the store cannot be changed.
    refused: HashMap<BlockId, BackendError>,
}

impl Opened {
    fn get(&mut self, block: &BlockId) -> Option<Arc<OpenBlock>> {
        self.clock += 1;
        let (file, used) = self.files.get_mut(block)?;
        *used = self.clock;
        Some(Arc::clone(file))
    }

    /// Returns what had to go, so that it is closed outside the lock.
    fn insert(
        &mut self,
        block: BlockId,
        file: Arc<OpenBlock>,
        limit: usize,
    ) -> Option<Arc<OpenBlock>> {
        self.clock += 1;
        let mut gone = None;
        if self.files.len() >= limit && !self.files.contains_key(&block) {
            // A scan of a few hundred entries, once per opened file.
            let oldest = self.files.iter().min_by_key(|(_, (_, used))| *used);
            let oldest = oldest.map(|(block, _)| *block);
            gone = oldest.and_then(|block| self.files.remove(&block)).map(|(file, _)| file);
        }
        self.files.insert(block, (file, self.clock));
        gone
    }
}

/// The reading half of a store.
pub(super) struct Reader {
    dir: Arc<StoreDir>,
    layout: BlockLayout,
    verify: bool,
    limit: usize,
    pub(super) direct: DirectIo,
    opened: Mutex<Opened>,
}

impl Reader {
    pub(super) fn new(
        dir: Arc<StoreDir>,
        layout: BlockLayout,
        verify: bool,
        limit: usize,
        direct: DirectIo,
    ) -> Self {
        Self { dir, layout, verify, limit: limit.max(1), direct, opened: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Opened> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads one shard into the front of `buffer`. `key.shard` is in range.
    pub(super) fn load(
        &self,
        key: ShardKey,
        buffer: &mut [u8],
    ) -> Result<LoadedShard, BackendError> {
        let block = self.block(key)?;
        let entry = self.entry(key, &block, buffer.len() as u64)?;
        let target = &mut buffer[..entry.len_bytes as usize];
        let (path, offset) = (self.dir.block_path(&key.block), self.layout.shard_offset(key.shard));
        let got_bytes = block
            .read(target, offset, &path, &self.direct)
            .map_err(|error| io_error("pread", &path, &error))?;
        self.conclude(key, &block, entry, got_bytes, target)
    }

    /// Where a shard is and how it can be read into `room_bytes`.
    pub(super) fn entry(
        &self,
        key: ShardKey,
        block: &OpenBlock,
        room_bytes: u64,
    ) -> Result<ShardEntry, BackendError> {
        let entry = block.table[key.shard as usize];
        let len_bytes = entry.len_bytes;
        if len_bytes > room_bytes {
            return Err(BackendError::DoesNotFit { key, len_bytes, room_bytes });
        }
        Ok(entry)
    }

    /// What a read of `got_bytes` into `target` was worth.
    pub(super) fn conclude(
        &self,
        key: ShardKey,
        block: &OpenBlock,
        entry: ShardEntry,
        got_bytes: u64,
        target: &[u8],
    ) -> Result<LoadedShard, BackendError> {
        let ShardEntry { len_bytes, checksum } = entry;
        if got_bytes < len_bytes {
            // Cut off after its header was checked.
            let error = BackendError::ShortRead { got_bytes, wanted_bytes: len_bytes };
            return Err(self.refuse(key.block, &block.plain, error));
        }
        if let Some(stored) = checksum.filter(|_| self.verify) {
            let computed = xxh3_64(target);
            if computed != stored {
                let path = self.dir.block_path(&key.block);
                let error = BackendError::ChecksumMismatch { key, path, stored, computed };
                return Err(self.refuse(key.block, &block.plain, error));
            }
        }
        Ok(LoadedShard { len_bytes, checksum })
    }

    /// The block's file if it is open, or why it will not be.
    pub(super) fn peek(&self, block: &BlockId) -> Option<Result<Arc<OpenBlock>, BackendError>> {
        let mut opened = self.lock();
        if let Some(error) = opened.refused.get(block) {
            return Some(Err(error.clone()));
        }
        opened.get(block).map(Ok)
    }

    /// The block's file, from the ones that are open or newly opened and checked.
    pub(super) fn block(&self, key: ShardKey) -> Result<Arc<OpenBlock>, BackendError> {
        if let Some(known) = self.peek(&key.block) {
            return known;
        }
        let path = self.dir.block_path(&key.block);
        let plain = match self.direct.open_plain(&path) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Err(BackendError::NotFound(key)),
            Err(Errno::LOOP) => {
                return Err(BackendError::BadObject { path, reason: BadObject::NotAFile });
            }
            Err(error) => return Err(io_error("open", &path, &error.into())),
        };
        let table = self.check(key.block, &plain, path.clone())?;
        touch(&plain);
        let direct = self.direct.open_direct(&path, &plain);
        let block = Arc::new(OpenBlock { plain, direct, table });
        let gone = self.lock().insert(key.block, Arc::clone(&block), self.limit);
        drop(gone);
        Ok(block)
    }

    /// Believes nothing of a file before its length and its header agree.
    fn check(
        &self,
        block: BlockId,
        file: &File,
        path: PathBuf,
    ) -> Result<Vec<ShardEntry>, BackendError> {
        let length =
            regular_length(file).map_err(|error| io_error("fstat", &path, &error.into()))?;
        let Some(found_bytes) = length else {
            return Err(BackendError::BadObject { path, reason: BadObject::NotAFile });
        };
        let mut header = vec![0; self.layout.header_bytes() as usize];
        let got =
            read_at(file, &mut header, 0).map_err(|error| io_error("pread", &path, &error))?;
        // The header first: of a file of another version or geometry, too,
        // the length is wrong, but that is not what is the matter with it.
        let decoded = self.layout.decode(block, &header[..got as usize]);
        let expected_bytes = self.layout.file_bytes();
        let reason = match decoded {
            Ok(table) if found_bytes == expected_bytes => return Ok(table),
            Ok(_) | Err(BadObject::Length { .. }) => {
                BadObject::Length { found_bytes, expected_bytes }
            }
            Err(reason) => reason,
        };
        Err(self.refuse(block, file, BackendError::BadObject { path, reason }))
    }

    /// Puts a bad file aside and forgets it, so that it is not tried again.
    fn refuse(&self, block: BlockId, file: &File, error: BackendError) -> BackendError {
        let closed = self.lock().files.remove(&block);
        drop(closed);
        match self.dir.put_aside(&block, file) {
            Ok(true) => tracing::warn!(%block, %error, "a bad object was put aside"),
            // Somebody else has dealt with it.
            Ok(false) => {}
            Err(obstacle) => {
                let mut opened = self.lock();
                if opened.refused.len() < MAX_REFUSED {
                    opened.refused.insert(block, error.clone());
                }
                tracing::warn!(%block, %error, %obstacle, "a bad object cannot be put aside");
            }
        }
        error
    }
}
