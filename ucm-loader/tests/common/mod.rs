//! What the tests share: a private corner of shared memory, and memory that plays a device.
#![allow(dead_code, clippy::unwrap_used)]

pub mod child;
pub mod doubles;
pub mod rank;

use std::cell::UnsafeCell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ucm_core::cache::{Audit, Census};
use ucm_core::{DevicePtr, ShardKey};
use ucm_loader::backend::memory::MemoryStore;
use ucm_loader::backend::open::memory_options;
use ucm_loader::content;
use ucm_loader::replay::trace::block_id;
use ucm_loader::{LoaderConfig, ShardTarget};
use ucm_posix::{Segment, SegmentId, SegmentWatcher, ShmDir};

/// Only a hang takes this long; nothing is measured by it.
pub const WATCHDOG: Duration = Duration::from_secs(60);
/// Seed of ids and contents, also in rank processes.
pub const SEED: u64 = 77;
/// The id of the one segment in a corner.
pub const ID: &str = "cache";
pub const SHARD_BYTES: u64 = 4096;
pub const SHARDS_PER_BLOCK: u32 = 4;

/// Looks again until it is so; a hang fails the test.
#[track_caller]
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !so() {
        assert!(began.elapsed() < WATCHDOG, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The shards of blocks, in order.
pub fn keys(blocks: Range<u64>) -> Vec<ShardKey> {
    let shards = |number| {
        (0..SHARDS_PER_BLOCK).map(move |shard| ShardKey::new(block_id(SEED, number), shard))
    };
    blocks.flat_map(shards).collect()
}

/// A private directory in shared memory and one for files. Both go at the end.
pub struct Corner {
    shm: TempDir,
    files: TempDir,
}

impl Corner {
    pub fn new() -> Self {
        let shm = tempfile::Builder::new().prefix("ucm-test-").tempdir_in("/dev/shm").unwrap();
        Self { shm, files: tempfile::tempdir().unwrap() }
    }

    pub fn shm(&self) -> &Path {
        self.shm.path()
    }

    /// A directory for files, made if need be.
    pub fn dir(&self, name: &str) -> PathBuf {
        let path = self.files.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    /// Small shards, `slots` of them, over a memory backend.
    pub fn config(&self, ranks: u32, slots: u64) -> LoaderConfig {
        LoaderConfig {
            segment_id: ID.to_owned(),
            shm_dir: self.shm().to_owned(),
            capacity_bytes: slots * SHARD_BYTES,
            reserved_slots: Some(0),
            shard_bytes: SHARD_BYTES,
            block_bytes: SHARD_BYTES * u64::from(SHARDS_PER_BLOCK),
            local_rank_size: ranks,
            backend: "memory:store".to_owned(),
            memory_backend_bytes: 4 << 20,
            backend_workers: 2,
            waiting_queue_depth: 64,
            running_queue_depth: 4096,
            timeout_ms: 30_000,
            fsync: ucm_loader::backend::file::store::Fsync::None,
            ..LoaderConfig::default()
        }
    }

    /// The same over block files in `store`.
    pub fn file_config(&self, ranks: u32, slots: u64) -> LoaderConfig {
        let backend = format!("posix:{}", self.dir("store").display());
        LoaderConfig { backend, ..self.config(ranks, slots) }
    }

    /// The memory store behind `config`, to set what it does and ask what it did.
    pub fn store(&self, config: &LoaderConfig) -> MemoryStore {
        let checked = config.clone().check().unwrap();
        MemoryStore::open(&memory_options(&checked).unwrap()).unwrap()
    }

    /// Names in shared memory, without the memory backend's.
    pub fn segment_files(&self) -> Vec<String> {
        files_of(self.shm()).into_iter().filter(|name| !name.ends_with(".mem")).collect()
    }

    /// The segment, for looking at.
    pub fn segment(&self) -> Segment {
        Segment::join_existing(&ShmDir::new(self.shm()), &SegmentId::new(ID).unwrap()).unwrap()
    }

    /// What is in the segment, read-only: pins in all, and slots by state.
    pub fn look(&self) -> (u64, Census) {
        let id = SegmentId::new(ID).unwrap();
        let watcher = SegmentWatcher::open(&ShmDir::new(self.shm()), &id).unwrap();
        let plane = watcher.plane();
        let audit = Audit::new(&plane);
        (audit.pins(), audit.census())
    }

    /// A pin may outlive its task's report by a moment, but not for long.
    #[track_caller]
    pub fn until_no_pins(&self) {
        until("no pins are left", || self.look().0 == 0);
    }

    /// Puts `blocks` into the backend by a rank of a cache that is then gone.
    #[track_caller]
    pub fn fill_backend(&self, config: &LoaderConfig, blocks: Range<u64>) {
        let alone = LoaderConfig {
            local_rank_size: 1,
            capacity_bytes: 1 << 20,
            timeout_ms: 30_000,
            io_quarantine_ms: None,
            claim_window: None,
            ..config.clone()
        };
        let rank = rank::Rank::start(alone, 0);
        let report = rank.dump(&keys(blocks)).wait(WATCHDOG).unwrap();
        assert_eq!(report.failures, []);
        rank.leave();
        assert_eq!(self.segment_files(), [""; 0]);
    }
}

/// Names in a directory, sorted; none if it is not there.
pub fn files_of(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Memory that plays a device.
pub struct Memory {
    bytes: Box<[UnsafeCell<u8>]>,
}

// SAFETY: plain memory; who may touch which shard when is each test's business.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(shards: usize) -> Self {
        let len = shards * SHARD_BYTES as usize;
        let poisoned = || UnsafeCell::new(content::POISON_BYTE);
        Self { bytes: std::iter::repeat_with(poisoned).take(len).collect() }
    }

    fn range(&self, at: usize) -> &[UnsafeCell<u8>] {
        let start = at * SHARD_BYTES as usize;
        &self.bytes[start..start + SHARD_BYTES as usize]
    }

    pub fn address(&self, at: usize) -> DevicePtr {
        DevicePtr(self.range(at).as_ptr() as u64)
    }

    /// The bytes of a shard that no task uses.
    pub fn shard(&self, at: usize) -> &[u8] {
        let cells = self.range(at);
        // SAFETY: initialised, as long as the slice of cells; no task is under
        // way on this shard, by the caller's word.
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast(), cells.len()) }
    }

    /// Overwrites a shard that no task uses.
    pub fn set(&self, at: usize, write: impl FnOnce(&mut [u8])) {
        let mut bytes = self.shard(at).to_vec();
        write(&mut bytes);
        for (cell, byte) in self.range(at).iter().zip(bytes) {
            // SAFETY: no task is under way on this shard, by the caller's word.
            unsafe { cell.get().write(byte) }
        }
    }

    /// `keys` one after the other, from shard `at` on.
    pub fn targets(&self, keys: &[ShardKey], at: usize) -> Vec<ShardTarget> {
        let target = |(key, at)| ShardTarget { key, device: self.address(at) };
        keys.iter().copied().zip(at..).map(target).collect()
    }
}
