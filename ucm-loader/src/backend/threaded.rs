//! Turns a store with blocking calls into a [`Backend`]: worker threads call it.

use std::sync::Arc;
use std::time::Instant;

use ucm_core::key::{BlockId, ShardKey};

use super::pool::{Pool, Rejected, Rejection};
use super::traits::{Backend, BackendError, LoadRequest, LoadedShard, OpenError, StoreRequest};

/// A store whose calls return when they are done.
pub trait BlockingStore: Send + Sync + 'static {
    /// Reads `key` into the front of `buffer` and checks it.
    fn load(&self, key: ShardKey, buffer: &mut [u8]) -> Result<LoadedShard, BackendError>;

    /// Takes the bytes of `key`; with the last shard, makes the block visible.
    fn store(&self, key: ShardKey, bytes: &[u8], checksum: Option<u64>)
    -> Result<(), BackendError>;

    /// Forgets an unfinished block.
    fn discard(&self, block: BlockId);

    /// Which blocks are complete.
    fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError>;
}

/// How many threads a store gets, and how many requests may wait for them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Threads {
    /// Threads that load.
    pub load_workers: usize,
    /// Threads that store. They are others, so that a dump, which nobody
    /// waits for, never stands before a load, which everybody waits for.
    pub store_workers: usize,
    /// Requests that may wait, for each of the two.
    pub queue_depth: usize,
}

/// A [`BlockingStore`] with threads of its own.
pub struct Threaded<S: BlockingStore> {
    store: Arc<S>,
    loads: Pool<LoadRequest>,
    stores: Pool<StoreRequest>,
}

impl<S: BlockingStore> Threaded<S> {
    /// Starts the threads.
    pub fn new(store: S, threads: Threads) -> Result<Self, OpenError> {
        Self::sharing(Arc::new(store), threads)
    }

    /// As [`new`](Self::new), for a store that others call as well.
    pub(super) fn sharing(store: Arc<S>, threads: Threads) -> Result<Self, OpenError> {
        let no_thread = |error: std::io::Error| OpenError::NoThread {
            errno: error.raw_os_error().unwrap_or(0),
        };
        let loader = Arc::clone(&store);
        let load = move |mut request: LoadRequest| {
            let result = loader.load(request.key(), request.buffer());
            request.finish(result);
        };
        let writer = Arc::clone(&store);
        let put = move |request: StoreRequest| {
            let result = writer.store(request.key(), request.bytes(), request.checksum());
            request.finish(result);
        };
        let Threads { load_workers, store_workers, queue_depth } = threads;
        let loads = Pool::new(load_workers, queue_depth, load).map_err(no_thread)?;
        let stores = Pool::new(store_workers, queue_depth, put).map_err(no_thread)?;
        Ok(Self { store, loads, stores })
    }

    /// The store itself, for what only its own kind can do.
    pub fn store(&self) -> &S {
        &self.store
    }
}

fn error_of(why: Rejection) -> BackendError {
    match why {
        Rejection::QueueFull { depth } => BackendError::QueueFull { depth },
        Rejection::Stopping => BackendError::ShuttingDown,
    }
}

fn by(reached: bool) -> Result<(), BackendError> {
    if reached { Ok(()) } else { Err(BackendError::TimedOut) }
}

impl<S: BlockingStore> Backend for Threaded<S> {
    fn submit(&self, batch: Vec<LoadRequest>) {
        if let Err(Rejected { jobs, why }) = self.loads.push(batch) {
            jobs.into_iter().for_each(|request| request.finish(Err(error_of(why))));
        }
    }

    fn put(&self, request: StoreRequest) {
        if let Err(Rejected { jobs, why }) = self.stores.push([request]) {
            jobs.into_iter().for_each(|request| request.finish(Err(error_of(why))));
        }
    }

    fn discard(&self, block: BlockId) {
        self.store.discard(block);
    }

    fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError> {
        self.store.exists(blocks)
    }

    fn flush(&self, deadline: Instant) -> Result<(), BackendError> {
        by(self.loads.wait_idle(deadline) && self.stores.wait_idle(deadline))
    }

    fn shutdown(&self, deadline: Instant) -> Result<(), BackendError> {
        // Both are told to stop even when the first is late.
        let (loads, stores) = (self.loads.stop(deadline), self.stores.stop(deadline));
        by(loads && stores)
    }
}
