//! Writes down when every load began and ended, so that claims can be counted.
//!
//! [`Recorder`] wraps a backend and notes its loads in an [`EventLog`]; the
//! pipelines note in the same log when a copy is published or evicted.
//! [`read_events`] merges the logs of all processes, [`analyse`] counts what
//! the cache promises: no load of a key that is being loaded or is there.

mod analysis;
mod log;

pub use analysis::{LoadAnalysis, Step, analyse};
pub use log::{Event, EventKind, EventLog, LogError, now_ns, read_events};

use std::sync::Arc;
use std::time::Instant;

use ucm_core::key::BlockId;
use ucm_core::slot::meta::LoadErrorCode;

use super::traits::{Backend, BackendError, LoadRequest, SharedMemory, StoreRequest};

/// The code of an event that went well.
pub const OK: LoadErrorCode = LoadErrorCode(0);

/// A backend whose loads are recorded.
pub struct Recorder<B> {
    inner: B,
    log: Arc<EventLog>,
}

impl<B: Backend> Recorder<B> {
    /// Records the loads of `inner` in `log`.
    pub fn new(inner: B, log: Arc<EventLog>) -> Self {
        Self { inner, log }
    }

    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// The start is in the file before the load begins; the end is there
    /// before anybody is told of it.
    fn recorded(&self, request: LoadRequest) -> LoadRequest {
        let (key, log) = (request.key(), Arc::clone(&self.log));
        let start = log.record(EventKind::LoadStart, &key, OK);
        request.intercept(move |_, result| {
            let outcome = result.as_ref().map_or_else(BackendError::code, |_| OK);
            log.record_end(start, &key, outcome);
            result
        })
    }
}

impl<B: Backend> Backend for Recorder<B> {
    fn submit(&self, batch: Vec<LoadRequest>) {
        self.inner.submit(batch.into_iter().map(|request| self.recorded(request)).collect());
    }

    fn adopt_memory(&self, memory: SharedMemory) {
        self.inner.adopt_memory(memory);
    }

    fn put(&self, request: StoreRequest) {
        self.inner.put(request);
    }

    fn discard(&self, block: BlockId) {
        self.inner.discard(block);
    }

    fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError> {
        self.inner.exists(blocks)
    }

    fn longest_prefix(&self, blocks: &[BlockId]) -> Result<usize, BackendError> {
        self.inner.longest_prefix(blocks)
    }

    fn flush(&self, deadline: Instant) -> Result<(), BackendError> {
        self.inner.flush(deadline)
    }

    fn shutdown(&self, deadline: Instant) -> Result<(), BackendError> {
        self.inner.shutdown(deadline)
    }
}

#[cfg(test)]
mod tests {
    use ucm_core::key::ShardKey;

    use super::*;
    use crate::backend::memory::{MemoryBackend, MemoryOptions};
    use crate::backend::testing::*;
    use crate::backend::traits::StoreGeometry;

    #[test]
    fn a_recorded_backend_tells_of_every_load_and_how_it_ended() {
        let dir = tempfile::tempdir().unwrap();
        let options = MemoryOptions {
            shm_dir: dir.path().to_owned(),
            name: "recorded".to_owned(),
            geometry: StoreGeometry { shard_bytes: 64, shards_per_block: 1, content_tag: 0 },
            capacity_blocks: 4,
            verify: true,
        };
        let log = Arc::new(EventLog::create(dir.path(), 5).unwrap());
        let inner = MemoryBackend::open(&options, THREADS).unwrap();
        let backend = Recorder::new(inner, log);
        put_block(&backend, id(1), 1, 64);
        assert_block(&backend, id(1), 1, 64);
        let missing = ShardKey::new(id(2), 0);
        assert!(load(&backend, missing, 64).1.is_err());

        let events = read_events(dir.path()).unwrap();
        let seen: Vec<_> =
            events.iter().map(|e| (e.kind, e.key.block, e.outcome, e.rank)).collect();
        let not_found = LoadErrorCode::NOT_FOUND;
        assert_eq!(
            seen,
            [
                (EventKind::LoadStart, id(1), OK, 5),
                (EventKind::LoadEnd, id(1), OK, 5),
                (EventKind::LoadStart, id(2), OK, 5),
                (EventKind::LoadEnd, id(2), not_found, 5),
            ]
        );
        let analysis = analyse(&events);
        assert_eq!((analysis.backend_loads, analysis.failed_loads), (2, 1));
        assert_eq!((analysis.unfinished_loads, analysis.peak_in_flight), (0, 1));
    }
}
