//! What the threads of an engine share.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ucm_core::Loading;
use ucm_core::cache::Pinned;
use ucm_core::device::Device;
use ucm_core::key::ShardKey;
use ucm_core::slot::meta::LoadErrorCode;
use ucm_posix::Attachment;

use crate::backend::recorder::{EventKind, EventLog};
use crate::backend::traits::Backend;
use crate::config::Config;
use crate::doorbell::Doorbell;
use crate::load::budget::Budget;
use crate::metrics::Metrics;
use crate::task::{ShardError, TaskState};

/// What the threads of an engine share.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) attachment: Attachment,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) budget: Budget,
    /// Slots that dumps may pin at a time.
    pub(crate) dump_share: u32,
    /// A task waits for dispatch.
    pub(crate) submitted: Arc<Doorbell>,
    /// A shard waits for transfer.
    pub(crate) dispatched: Arc<Doorbell>,
    pub(crate) metrics: Metrics,
    pub(crate) log: Option<Arc<EventLog>>,
    pub(super) stopping: AtomicBool,
    pub(super) dispatcher_gone: AtomicBool,
}

impl Shared {
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    pub(crate) fn is_dispatcher_gone(&self) -> bool {
        self.dispatcher_gone.load(Ordering::Acquire)
    }

    pub(crate) fn shard_bytes(&self) -> usize {
        self.config.shard_bytes as usize
    }

    pub(crate) fn slot_ptr(&self, slot: u32) -> Option<NonNull<u8>> {
        self.attachment.segment().slot_ptr(slot)
    }

    pub(crate) fn record(&self, kind: EventKind, key: &ShardKey) {
        if let Some(log) = &self.log {
            log.record(kind, key, crate::backend::recorder::OK);
        }
    }

    /// READY. `None` only if this process is a copy of a rank that was reaped.
    pub(crate) fn publish(
        &self,
        loading: Loading,
        length_bytes: u32,
        checksum: u64,
    ) -> Option<Pinned> {
        match self.attachment.cache().publish(loading, length_bytes, checksum) {
            Ok(pinned) => Some(pinned),
            Err(reaped) => {
                tracing::error!("{reaped}");
                None
            }
        }
    }

    pub(crate) fn fail(&self, loading: Loading, code: LoadErrorCode) {
        if let Err(reaped) = self.attachment.cache().fail(loading, code) {
            tracing::error!("{reaped}");
        }
    }

    pub(crate) fn abandon(&self, loading: Loading) {
        self.fail(loading, LoadErrorCode::ABANDONED);
    }

    /// One shard of a task has ended.
    pub(crate) fn end(&self, task: &TaskState, index: usize, result: Result<(), ShardError>) {
        if result.is_err() {
            self.metrics.add(|m| &m.shard_failures, 1);
        }
        task.end(index, result);
    }
}
