//! The memory backend: blocks in a shared file that all processes map.
//!
//! It is for tests and benchmarks: it has a latency and failures that any
//! process can set for all of them, and it costs one copy. A block's slot is
//! filled privately and becomes visible with one compare-exchange, so a
//! writer's death at any moment leaves the store whole; the slots it was
//! filling stay lost, as does the room of a killed writer's blocks. Blocks are
//! never removed. Bytes that another process overwrites in place are found by
//! their checksum and reported, but stay.

mod map;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use ucm_core::key::{BlockId, ShardKey};
use ucm_core::sync::{AtomicU64, Ordering};
use xxhash_rust::xxh3::xxh3_64;

use self::map::{Planted, StoreMap};
use super::file::layout::BadObject;
use super::file::store::check_geometry;
use super::threaded::{BlockingStore, Threaded, Threads};
use super::traits::{BackendError, LoadedShard, OpenError, StoreGeometry};
use crate::content::mix;

const HAS_CHECKSUM: u64 = 1 << 63;
const MILLION: u64 = 1_000_000;
/// Marks a planted failure that is being written.
const BUSY: u64 = u64::MAX;

/// How to open a memory store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryOptions {
    /// The shared-memory directory.
    pub shm_dir: PathBuf,
    /// The store's name; its file is `ucm.<name>.mem`.
    pub name: String,
    /// What it holds.
    pub geometry: StoreGeometry,
    /// Blocks it has room for. All of it is reserved when the store is made.
    pub capacity_blocks: u64,
    /// Whether loads compare the bytes with their stored checksum.
    pub verify: bool,
}

/// A block this process is filling.
struct Unfinished {
    slot: u32,
    taken: Vec<bool>,
    written: u32,
}

#[derive(Default)]
struct Private {
    unfinished: HashMap<BlockId, Unfinished>,
    /// Slots this process was given and has not published.
    spare: Vec<u32>,
}

/// The store itself, with blocking calls.
pub struct MemoryStore {
    path: PathBuf,
    map: StoreMap,
    geometry: StoreGeometry,
    verify: bool,
    private: Mutex<Private>,
}

/// The memory backend.
pub type MemoryBackend = Threaded<MemoryStore>;

impl MemoryBackend {
    /// Opens or makes a store and starts its threads.
    pub fn open(options: &MemoryOptions, threads: Threads) -> Result<Self, OpenError> {
        Self::new(MemoryStore::open(options)?, threads)
    }
}

/// Whether `name` can be part of a file name in a shared directory.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(plain) && !name.starts_with('.')
}

impl MemoryStore {
    /// Opens the store, or makes it if there is none.
    pub fn open(options: &MemoryOptions) -> Result<Self, OpenError> {
        check_geometry(&options.geometry)?;
        let path = Self::path_of(&options.shm_dir, &options.name)?;
        let map = StoreMap::open(&path, &options.geometry, options.capacity_blocks)?;
        let (geometry, verify) = (options.geometry, options.verify);
        Ok(Self { path, map, geometry, verify, private: Mutex::default() })
    }

    fn path_of(shm_dir: &Path, name: &str) -> Result<PathBuf, OpenError> {
        if is_plain_name(name) {
            Ok(shm_dir.join(format!("ucm.{name}.mem")))
        } else {
            Err(OpenError::BadName { name: name.to_owned() })
        }
    }

    /// Removes a store's file. Processes that have it open keep it until they
    /// end. `false` if there was none.
    pub fn unlink(shm_dir: &Path, name: &str) -> Result<bool, OpenError> {
        let path = Self::path_of(shm_dir, name)?;
        match std::fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                Err(OpenError::Io { operation: "unlink", path, errno })
            }
        }
    }

    /// From now on every load of every process sleeps so long before it copies.
    pub fn set_latency(&self, latency: Duration) {
        let latency_ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.map.header().latency_ns.store(latency_ns, Ordering::Relaxed);
    }

    /// From now on `ppm` of a million loads fail with EIO, chosen by `seed`
    /// and the running number of the load.
    pub fn set_failures(&self, ppm: u32, seed: u64) {
        self.map.header().failure_seed.store(seed, Ordering::Relaxed);
        self.map.header().failures_ppm.store(ppm.into(), Ordering::Relaxed);
    }

    /// The next `count` loads of `key` fail with EIO, whichever process makes
    /// them. `false` if too many keys are to fail already.
    pub fn fail_next(&self, key: ShardKey, count: u64) -> bool {
        let (low, high) = key.block.words();
        let take = |place: &&Planted| {
            count > 0
                && place
                    .remaining
                    .compare_exchange(0, BUSY, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
        };
        let Some(place) = self.map.header().planted.iter().find(take) else { return count == 0 };
        place.key_low.store(low, Ordering::Relaxed);
        place.key_high.store(high, Ordering::Relaxed);
        place.shard.store(key.shard.into(), Ordering::Relaxed);
        // SYNC(memory.planted): Release, so that a load that reads the count
        // with Acquire in `must_fail` reads this key and no older one.
        place.remaining.store(count.min(BUSY - 1), Ordering::Release);
        true
    }

    /// Loads that all processes have begun.
    pub fn loads(&self) -> u64 {
        self.map.header().loads.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Private> {
        self.private.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this load is one that was told to fail.
    fn must_fail(&self, key: ShardKey) -> bool {
        let header = self.map.header();
        let number = header.loads.fetch_add(1, Ordering::Relaxed);
        let ppm = header.failures_ppm.load(Ordering::Relaxed);
        let seed = header.failure_seed.load(Ordering::Relaxed);
        if ppm > 0 && mix(mix(seed).wrapping_add(number)) % MILLION < ppm {
            return true;
        }
        let (low, high) = key.block.words();
        // SYNC(memory.planted): Acquire; pairs with the Release store in `fail_next`.
        let hit = |place: &Planted| {
            let is_it = place.remaining.load(Ordering::Acquire) != 0
                && place.key_low.load(Ordering::Relaxed) == low
                && place.key_high.load(Ordering::Relaxed) == high
                && place.shard.load(Ordering::Relaxed) == u64::from(key.shard);
            is_it && countdown(&place.remaining)
        };
        header.planted.iter().any(hit)
    }

    /// The table's words from where `block` would be, each once.
    fn probe(&self, block: &BlockId) -> (u64, impl Iterator<Item = &AtomicU64>) {
        let hash = ShardKey::new(*block, 0).hash();
        let table = self.map.table();
        let (before, after) = table.split_at(hash.0 as usize & (table.len() - 1));
        (u64::from(hash.fingerprint()) << 32, after.iter().chain(before))
    }

    /// The slot a table word names, if the word is `block`'s.
    fn slot_of(&self, word: u64, fingerprint: u64, block: &BlockId) -> Option<u32> {
        if word & !u64::from(u32::MAX) != fingerprint {
            return None;
        }
        // Read from shared memory, so checked before it is used.
        let slot = (word as u32).checked_sub(1)?;
        if u64::from(slot) >= self.map.capacity_blocks {
            return None;
        }
        let record = self.map.record(slot);
        let (low, high) = block.words();
        let same =
            record[0].load(Ordering::Relaxed) == low && record[1].load(Ordering::Relaxed) == high;
        same.then_some(slot)
    }

    fn find(&self, block: &BlockId) -> Option<u32> {
        let (fingerprint, words) = self.probe(block);
        // SYNC(memory.table): Acquire pairs with the exchange in `publish`
        // and makes the record and the bytes of a named slot readable.
        let words = words.map(|word| word.load(Ordering::Acquire)).take_while(|word| *word != 0);
        words.into_iter().find_map(|word| self.slot_of(word, fingerprint, block))
    }

    /// Makes `slot` visible as `block`; `false` if another copy already is.
    fn publish(&self, block: &BlockId, slot: u32) -> bool {
        let (fingerprint, words) = self.probe(block);
        let mine = fingerprint | (u64::from(slot) + 1);
        for word in words {
            // SYNC(memory.table): Release publishes the slot to `find`;
            // Acquire on failure lets the other's record be compared. Words
            // never go back to 0, so two writers of one block meet here.
            match word.compare_exchange(0, mine, Ordering::Release, Ordering::Acquire) {
                Ok(_) => return true,
                Err(theirs) if self.slot_of(theirs, fingerprint, block).is_some() => return false,
                Err(_) => {}
            }
        }
        // The table is twice the capacity, so only a damaged one is full.
        false
    }

    /// A slot for a new block: a spare one, or the next that nobody has had.
    fn new_slot(&self, private: &mut Private) -> Result<u32, BackendError> {
        if let Some(slot) = private.spare.pop() {
            return Ok(slot);
        }
        let capacity_blocks = self.map.capacity_blocks;
        let full = BackendError::StoreFull { capacity_blocks };
        let next = &self.map.header().next_slot;
        if next.load(Ordering::Relaxed) >= capacity_blocks {
            return Err(full);
        }
        let slot = next.fetch_add(1, Ordering::Relaxed);
        u32::try_from(slot).ok().filter(|_| slot < capacity_blocks).ok_or(full)
    }

    /// The slot for this shard's bytes, which are this call's alone until
    /// [`written`](Self::written).
    fn begin(&self, key: ShardKey) -> Result<u32, BackendError> {
        let mut private = self.lock();
        if !private.unfinished.contains_key(&key.block) {
            let slot = self.new_slot(&mut private)?;
            let taken = vec![false; self.geometry.shards_per_block as usize];
            private.unfinished.insert(key.block, Unfinished { slot, taken, written: 0 });
        }
        let block = private.unfinished.get_mut(&key.block);
        let block = block.ok_or(BackendError::Abandoned)?;
        if std::mem::replace(&mut block.taken[key.shard as usize], true) {
            return Err(BackendError::PutTwice(key));
        }
        Ok(block.slot)
    }

    /// Notes that one more shard is complete; with the last, publishes.
    fn written(&self, block: BlockId) {
        let mut private = self.lock();
        let Some(unfinished) = private.unfinished.get_mut(&block) else { return };
        unfinished.written += 1;
        if unfinished.written < self.geometry.shards_per_block {
            return;
        }
        let slot = unfinished.slot;
        private.unfinished.remove(&block);
        let (low, high) = block.words();
        self.map.record(slot)[0].store(low, Ordering::Relaxed);
        self.map.record(slot)[1].store(high, Ordering::Relaxed);
        if !self.publish(&block, slot) {
            private.spare.push(slot);
        }
    }

    fn check_shard(&self, key: ShardKey) -> Result<(), BackendError> {
        let shards_per_block = self.geometry.shards_per_block;
        if key.shard < shards_per_block {
            Ok(())
        } else {
            Err(BackendError::ShardOutOfRange { key, shards_per_block })
        }
    }
}

/// Takes one from a count that is neither used up nor being set.
fn countdown(remaining: &AtomicU64) -> bool {
    let one_less = |count: u64| count.checked_sub(1).filter(|_| count != BUSY);
    remaining.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
}

impl BlockingStore for MemoryStore {
    fn load(&self, key: ShardKey, buffer: &mut [u8]) -> Result<LoadedShard, BackendError> {
        self.check_shard(key)?;
        let latency_ns = self.map.header().latency_ns.load(Ordering::Relaxed);
        if latency_ns > 0 {
            thread::sleep(Duration::from_nanos(latency_ns));
        }
        if self.must_fail(key) {
            return Err(BackendError::Injected { errno: libc::EIO });
        }
        let slot = self.find(&key.block).ok_or(BackendError::NotFound(key))?;
        let entry = 2 + 2 * key.shard as usize;
        let record = self.map.record(slot);
        let word = record[entry].load(Ordering::Relaxed);
        let len_bytes = word & !HAS_CHECKSUM;
        if len_bytes > self.geometry.shard_bytes {
            let reason = BadObject::ShardLength { shard: key.shard, len_bytes };
            return Err(BackendError::BadObject { path: self.path.clone(), reason });
        }
        let room_bytes = buffer.len() as u64;
        let Some(target) = buffer.get_mut(..len_bytes as usize) else {
            return Err(BackendError::DoesNotFit { key, len_bytes, room_bytes });
        };
        let source = self.map.shard(slot, key.shard, len_bytes);
        // SAFETY: `shard` checked the source to be in the mapping, which no
        // buffer of a caller's overlaps; a published slot is not written again.
        unsafe { target.as_mut_ptr().copy_from_nonoverlapping(source, target.len()) };
        let stored = record[entry + 1].load(Ordering::Relaxed);
        let checksum = (word & HAS_CHECKSUM != 0).then_some(stored);
        if let Some(stored) = checksum.filter(|_| self.verify) {
            let computed = xxh3_64(target);
            if computed != stored {
                let path = self.path.clone();
                return Err(BackendError::ChecksumMismatch { key, path, stored, computed });
            }
        }
        Ok(LoadedShard { len_bytes, checksum })
    }

    fn store(
        &self,
        key: ShardKey,
        bytes: &[u8],
        checksum: Option<u64>,
    ) -> Result<(), BackendError> {
        self.check_shard(key)?;
        let (len_bytes, room_bytes) = (bytes.len() as u64, self.geometry.shard_bytes);
        if len_bytes > room_bytes {
            return Err(BackendError::DoesNotFit { key, len_bytes, room_bytes });
        }
        let slot = self.begin(key)?;
        let target = self.map.shard(slot, key.shard, len_bytes);
        // SAFETY: `shard` checked the target to be in the mapping; the slot is
        // unpublished and this shard of it was just taken by this call.
        unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        let entry = 2 + 2 * key.shard as usize;
        let flag = if checksum.is_some() { HAS_CHECKSUM } else { 0 };
        self.map.record(slot)[entry].store(len_bytes | flag, Ordering::Relaxed);
        self.map.record(slot)[entry + 1].store(checksum.unwrap_or(0), Ordering::Relaxed);
        self.written(key.block);
        Ok(())
    }

    fn discard(&self, block: BlockId) {
        // The slot is not reused: a store of one of its shards may be running.
        self.lock().unfinished.remove(&block);
    }

    fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError> {
        Ok(blocks.iter().map(|block| self.find(block).is_some()).collect())
    }
}
