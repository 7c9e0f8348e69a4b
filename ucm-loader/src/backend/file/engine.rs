//! The posix backend: a store, and the engine that hands its reads to the system.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use ucm_core::key::BlockId;

use super::uring::Uring;
use super::{FileOptions, FileStore};
use crate::backend::threaded::{Threaded, Threads};
use crate::backend::traits::{
    Backend, BackendError, LoadRequest, OpenError, SharedMemory, StoreRequest,
};

/// How reads are handed to the system.
///
/// A read that takes longer than the timeout fails with
/// [`BackendError::TimedOut`] only when the kernel can no longer write to its
/// buffer: `uring` asks the kernel to cancel it and waits until it says so. A
/// read that cannot be cancelled (it is with the device, or on a mount that
/// hangs) stays unanswered, and so keeps its slot, until it ends; whoever
/// waits for it has a deadline of his own. `threads` cannot cancel: there a
/// read that hangs is unanswered until it returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IoEngine {
    /// `uring` where reads are direct and the system has it, else `threads`:
    /// what is in the page cache is copied by as many threads as there are,
    /// which one submitting thread cannot keep up with.
    #[default]
    Auto,
    /// Threads that read.
    Threads,
    /// One thread that submits reads to an io_uring and takes completions.
    Uring,
}

/// The posix backend.
pub struct FileBackend {
    /// Writes always; reads unless there is a ring.
    threaded: Threaded<FileStore>,
    uring: Option<Uring>,
}

impl FileBackend {
    /// Opens a store and starts its threads.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(options: &FileOptions, threads: Threads) -> Result<Self, OpenError> {
        let store = Arc::new(FileStore::open(options)?);
        let start = || Uring::start(Arc::clone(&store), threads, options.timeout);
        let uring = match options.engine {
            IoEngine::Threads => None,
            IoEngine::Uring => Some(start()?),
            IoEngine::Auto if !options.direct_io => None,
            IoEngine::Auto => match start() {
                Err(OpenError::NoUring { errno }) => {
                    tracing::warn!(errno, "io_uring cannot be used here; reading with threads");
                    None
                }
                started => Some(started?),
            },
        };
        let load_workers = if uring.is_some() { 0 } else { threads.load_workers };
        let threaded = Threaded::sharing(store, Threads { load_workers, ..threads })?;
        Ok(Self { threaded, uring })
    }

    /// The store itself.
    pub fn store(&self) -> &FileStore {
        self.threaded.store()
    }

    /// The engine that reads: never [`IoEngine::Auto`].
    pub fn engine(&self) -> IoEngine {
        if self.uring.is_some() { IoEngine::Uring } else { IoEngine::Threads }
    }
}

impl Backend for FileBackend {
    fn submit(&self, batch: Vec<LoadRequest>) {
        match &self.uring {
            Some(uring) => uring.submit(batch),
            None => self.threaded.submit(batch),
        }
    }

    fn adopt_memory(&self, memory: SharedMemory) {
        if let Some(uring) = &self.uring {
            uring.adopt_memory(memory);
        }
    }

    fn put(&self, request: StoreRequest) {
        self.threaded.put(request);
    }

    fn discard(&self, block: BlockId) {
        self.threaded.discard(block);
    }

    fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError> {
        self.threaded.exists(blocks)
    }

    fn flush(&self, deadline: Instant) -> Result<(), BackendError> {
        self.threaded.flush(deadline)?;
        match &self.uring {
            Some(uring) if !uring.wait_idle(deadline) => Err(BackendError::TimedOut),
            _ => Ok(()),
        }
    }

    fn shutdown(&self, deadline: Instant) -> Result<(), BackendError> {
        // Both are told to stop even when the first is late.
        let has_ended = self.uring.as_ref().is_none_or(|uring| uring.stop(deadline));
        let threads = self.threaded.shutdown(deadline);
        if has_ended { threads } else { Err(BackendError::TimedOut) }
    }
}
