//! One engine in this process, with its device memory.

use std::sync::Arc;

use ucm_core::ShardKey;
use ucm_core::device::{Device, HostDevice};
use ucm_loader::backend::open::open;
use ucm_loader::backend::traits::Backend;
use ucm_loader::engine::{Parts, StartError, SubmitError};
use ucm_loader::{Engine, LoaderConfig, TaskHandle, TaskOptions, TaskReport, content};

use super::{Memory, SEED, WATCHDOG};

/// Shards its memory has room for.
const ROOM: usize = 512;

/// An engine and the memory it copies to. The engine goes first.
pub struct Rank {
    pub engine: Engine,
    pub memory: Memory,
}

impl Rank {
    /// Rank `rank` of the cache that `config` describes.
    #[track_caller]
    pub fn start(config: LoaderConfig, rank: u32) -> Self {
        Self::try_start(config, rank).unwrap_or_else(|error| panic!("rank {rank}: {error}"))
    }

    pub fn try_start(config: LoaderConfig, rank: u32) -> Result<Self, StartError> {
        let backend = open(&LoaderConfig { rank, ..config.clone() }.check().unwrap(), None);
        Self::with(config, rank, backend.unwrap(), Arc::new(HostDevice))
    }

    /// With a backend and a device of the test's.
    pub fn with(
        config: LoaderConfig,
        rank: u32,
        backend: Arc<dyn Backend>,
        device: Arc<dyn Device>,
    ) -> Result<Self, StartError> {
        let config = LoaderConfig { rank, ..config }.check().unwrap();
        let engine = Engine::start(config, Parts { backend, device, log: None })?;
        Ok(Self { engine, memory: Memory::new(ROOM) })
    }

    /// All ranks of the cache.
    #[track_caller]
    pub fn all(config: &LoaderConfig) -> Vec<Self> {
        (0..config.local_rank_size).map(|rank| Self::start(config.clone(), rank)).collect()
    }

    /// Loads `keys` to the front of the memory, which is poisoned before.
    #[track_caller]
    pub fn load(&self, keys: &[ShardKey]) -> TaskHandle {
        self.try_load(keys, 0).unwrap()
    }

    /// The same from shard `at` on.
    pub fn try_load(&self, keys: &[ShardKey], at: usize) -> Result<TaskHandle, SubmitError> {
        (at..at + keys.len()).for_each(|at| self.memory.set(at, content::poison));
        // SAFETY: the targets are in memory that outlives the engine, and the
        // tests do not touch them before the task has ended.
        unsafe { self.engine.load(self.memory.targets(keys, at), &TaskOptions::default()) }
    }

    /// Dumps `keys` from the front of the memory, filled with what they hold.
    #[track_caller]
    pub fn dump(&self, keys: &[ShardKey]) -> TaskHandle {
        self.dump_at(keys, 0)
    }

    /// The same from shard `at` on.
    #[track_caller]
    pub fn dump_at(&self, keys: &[ShardKey], at: usize) -> TaskHandle {
        for (at, key) in (at..).zip(keys) {
            self.memory.set(at, |bytes| content::fill(bytes, SEED, key, 0));
        }
        // SAFETY: as in `try_load`.
        unsafe { self.engine.dump(self.memory.targets(keys, at), &TaskOptions::default()) }.unwrap()
    }

    /// Whether shard `at` of the memory holds `key`, every byte of it.
    pub fn holds(&self, key: &ShardKey, at: usize) -> bool {
        content::verify(self.memory.shard(at), SEED, key, 0).is_none()
    }

    /// The front of the memory holds `keys`, every byte of them.
    #[track_caller]
    pub fn assert_holds(&self, keys: &[ShardKey]) {
        for (at, key) in keys.iter().enumerate() {
            assert!(self.holds(key, at), "shard {at} of the task has a wrong byte");
        }
    }

    /// Loads `keys`, all of which must come, and checks every byte.
    #[track_caller]
    pub fn load_right(&self, keys: &[ShardKey]) -> ucm_loader::TaskReport {
        let report = self.load(keys).wait(WATCHDOG).unwrap();
        assert_eq!(report.failures, []);
        self.assert_holds(keys);
        report
    }

    /// The same in another way.
    #[track_caller]
    pub fn load_with(&self, keys: &[ShardKey], options: &TaskOptions) -> TaskReport {
        (0..keys.len()).for_each(|at| self.memory.set(at, content::poison));
        // SAFETY: as in `try_load`.
        let task = unsafe { self.engine.load(self.memory.targets(keys, 0), options) }.unwrap();
        let report = task.wait(WATCHDOG).unwrap();
        self.assert_holds(keys);
        report
    }

    /// Leaves, with nothing under way.
    #[track_caller]
    pub fn leave(self) {
        assert!(self.engine.shutdown(WATCHDOG), "the backend still had work");
    }
}
