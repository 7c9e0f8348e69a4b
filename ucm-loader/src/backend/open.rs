//! From a configuration to its backend.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::breaker::Breaker;
use crate::backend::error::OpenError;
use crate::backend::file::{FileBackend, FileOptions};
use crate::backend::memory::{MemoryBackend, MemoryOptions};
use crate::backend::probe;
use crate::backend::recorder::{EventLog, Recorder};
use crate::backend::threaded::Threads;
use crate::backend::traits::Backend;
use crate::config::{BackendChoice, Config};

/// Threads that write dumped shards.
const STORE_WORKERS: usize = 2;
/// Between two probes of a backend that fails.
const PROBE_PAUSE: Duration = Duration::from_secs(5);

/// Opens the backend that `config` names; with `log`, every load is recorded.
///
/// # Errors
/// See [`OpenError`].
pub fn open(config: &Config, log: Option<&Arc<EventLog>>) -> Result<Arc<dyn Backend>, OpenError> {
    let threads = Threads {
        load_workers: config.backend_workers as usize,
        store_workers: STORE_WORKERS,
        queue_depth: config.running_queue_depth as usize,
    };
    match &config.backend {
        BackendChoice::Memory { name, capacity_blocks } => {
            let options = memory(config, name, *capacity_blocks);
            Ok(recorded(MemoryBackend::open(&options, threads)?, log))
        }
        BackendChoice::Posix { dir } => {
            let options = FileOptions {
                fsync: config.fsync,
                verify: config.checksum,
                engine: config.io_engine,
                direct_io: config.direct_io,
                limit_bytes: config.store_limit_bytes,
                timeout: config.timeout,
                ..FileOptions::new(dir, config.store_geometry())
            };
            let backend = recorded(FileBackend::open(&options, threads)?, log);
            // A disk that keeps failing, or a mount that hangs, is left alone.
            let probe = probe::of_directory(dir.join("tmp"));
            Ok(Arc::new(Breaker::new(backend, probe, PROBE_PAUSE)))
        }
    }
}

/// The options of the memory backend, if that is what `config` names.
pub fn memory_options(config: &Config) -> Option<MemoryOptions> {
    match &config.backend {
        BackendChoice::Memory { name, capacity_blocks } => {
            Some(memory(config, name, *capacity_blocks))
        }
        BackendChoice::Posix { .. } => None,
    }
}

fn memory(config: &Config, name: &str, capacity_blocks: u64) -> MemoryOptions {
    MemoryOptions {
        shm_dir: config.shm_dir.clone(),
        name: name.to_owned(),
        geometry: config.store_geometry(),
        capacity_blocks,
        verify: config.checksum,
    }
}

fn recorded(backend: impl Backend + 'static, log: Option<&Arc<EventLog>>) -> Arc<dyn Backend> {
    match log {
        Some(log) => Arc::new(Recorder::new(backend, Arc::clone(log))),
        None => Arc::new(backend),
    }
}
