//! One shard's dump: into a slot (unless some rank has it there), then to the backend.

use std::sync::Arc;
use std::time::Duration;

use ucm_core::cache::{GetError, Got, Pinned};
use ucm_core::device::{CopyKind, DeviceError, QueueId};
use ucm_core::host::Waiter;
use ucm_core::limits::MAX_OWNER_DEATHS;
use ucm_core::segment::counters::Counter;
use ucm_core::slot::meta::LoadErrorCode;
use ucm_posix::SystemWaiter;
use xxhash_rust::xxh3::xxh3_64;

use crate::backend::recorder::EventKind;
use crate::backend::traits::{RawBufConst, StoreRequest};
use crate::crash::crash_point;
use crate::dump::blocks::Blocks;
use crate::engine::Shared;
use crate::load::budget::Budget;
use crate::scatter;
use crate::task::{ShardError, TaskState};

/// Does the work of the dump thread.
pub(crate) struct Stager {
    shared: Arc<Shared>,
    budget: Arc<Budget>,
    blocks: Arc<Blocks>,
    queue: QueueId,
}

/// A longest sleep while all pins are out; then the deadline is looked at again.
const ROOM_SLICE_NS: u64 = 100_000_000;
/// How long a slot is waited for before the pins of unfinished blocks are given up.
const SLOT_PATIENCE_NS: u64 = 250_000_000;

impl Stager {
    pub(crate) fn new(shared: Arc<Shared>, budget: Arc<Budget>, queue: QueueId) -> Self {
        let blocks = Arc::new(Blocks::new(Arc::clone(&shared), Arc::clone(&budget)));
        Self { shared, budget, blocks, queue }
    }

    pub(crate) fn bind(&self) -> Result<(), DeviceError> {
        self.shared.device.bind()
    }

    /// Waits until no earlier task writes a block of `task`, then takes them.
    pub(crate) fn take_blocks(
        &self,
        task: &TaskState,
        is_stopping: impl Fn() -> bool,
    ) -> Result<(), ShardError> {
        loop {
            if is_stopping() {
                return Err(ShardError::ShuttingDown);
            }
            let now_ns = SystemWaiter.now_ns();
            if let Some(error) = task.stopped(now_ns) {
                return Err(error);
            }
            let slice_ns = ROOM_SLICE_NS.min(task.deadline_ns - now_ns);
            if self.blocks.take(&task.shards, Duration::from_nanos(slice_ns)) {
                return Ok(());
            }
        }
    }

    /// Ends a shard of a task whose blocks were not taken.
    pub(crate) fn refuse(&self, task: &TaskState, index: usize, error: ShardError) {
        self.shared.end(task, index, Err(error));
    }

    /// Fails a shard of a task whose blocks were.
    pub(crate) fn fail(&self, task: &TaskState, index: usize, error: ShardError) {
        self.blocks.end(task.shards[index].key.block, None);
        self.shared.end(task, index, Err(error));
    }

    /// Dumps one shard of `task`; it ends now if that fails, else when the
    /// backend has it.
    pub(crate) fn dump(&self, task: &Arc<TaskState>, index: usize) {
        match self.stage(task, index) {
            Ok(pinned) => self.store(task, index, pinned),
            Err(error) => self.fail(task, index, error),
        }
    }

    /// The shard in a READY slot, pinned.
    fn stage(&self, task: &TaskState, index: usize) -> Result<Pinned, ShardError> {
        while !self.budget.has_room() {
            let now_ns = SystemWaiter.now_ns();
            if let Some(error) = task.stopped(now_ns) {
                return Err(error);
            }
            if self.blocks.held() >= self.budget.max_pins() {
                // Nothing is under way that would make room.
                self.blocks.let_go();
                continue;
            }
            self.budget.wait_for_room(ROOM_SLICE_NS.min(task.deadline_ns - now_ns));
        }
        // An owner that dies is no failure of the shard: the next one takes over.
        for _ in 0..MAX_OWNER_DEATHS {
            match self.stage_once(task, index) {
                Err(ShardError::OwnersDied { .. }) => {}
                result => return result,
            }
        }
        Err(ShardError::OwnersDied { deaths: MAX_OWNER_DEATHS })
    }

    /// As [`stage`](Self::stage), until an owner dies.
    fn stage_once(&self, task: &TaskState, index: usize) -> Result<Pinned, ShardError> {
        let key = task.shards[index].key;
        let cache = self.shared.attachment.cache();
        let soon_ns = SystemWaiter.now_ns().saturating_add(SLOT_PATIENCE_NS);
        let got = match cache.get(&key, task.deadline_ns.min(soon_ns)) {
            Err(GetError::NothingEvictable | GetError::BucketsPinned | GetError::Deadline) => {
                // Perhaps every rank waits for the slots that the others hold.
                self.blocks.let_go();
                cache.get(&key, task.deadline_ns)?
            }
            got => got?,
        };
        match got {
            // Content-addressed: what is there already is the same.
            Got::Hit(pinned) => Ok(pinned),
            Got::Wait(pending) => cache.wait(pending, task.deadline_ns).map_err(|error| {
                use ucm_core::cache::WaitError;
                match error {
                    WaitError::Failed(code) => ShardError::Load(code),
                    WaitError::OwnerDied => ShardError::OwnersDied { deaths: 1 },
                    WaitError::Poisoned => ShardError::Cache(GetError::Poisoned),
                    _ => ShardError::Deadline,
                }
            }),
            Got::Owner(loading) => {
                let slot = loading.slot();
                match self.gather(task, index, slot) {
                    Ok(checksum) => {
                        crash_point!(DumpStaged);
                        self.shared.record(EventKind::Published, &key);
                        let length_bytes = self.shared.config.shard_bytes as u32;
                        let pinned = self.shared.publish(loading, length_bytes, checksum);
                        cache.add(Counter::Dumped, 1);
                        crash_point!(DumpPublished);
                        pinned.ok_or(ShardError::Load(LoadErrorCode::OWNER_DIED))
                    }
                    Err(error) => {
                        self.shared.abandon(loading);
                        Err(error)
                    }
                }
            }
        }
    }

    /// Copies a shard from the device into `slot`, which this rank owns;
    /// returns its checksum (0 when they are switched off).
    fn gather(&self, task: &TaskState, index: usize, slot: u32) -> Result<u64, ShardError> {
        let shared = &self.shared;
        let missing = ShardError::Load(LoadErrorCode::BAD_OBJECT);
        let host = shared.slot_ptr(slot).ok_or(missing)?;
        let config = &shared.config;
        let mut copies = Vec::new();
        scatter::copies(
            CopyKind::DeviceToHost,
            task,
            index,
            host.as_ptr(),
            config.shard_bytes,
            &config.tensor_bytes,
            &mut copies,
        );
        if let Some(event) = task.event {
            shared.device.queue_wait_raw(self.queue, event)?;
        }
        // SAFETY: the slot is LOADING and this rank's until it is published
        // or abandoned, after the wait below; the device ranges are the
        // submitter's word (`Engine::dump`).
        unsafe { shared.device.copy_batch(self.queue, &copies) }?;
        let fence = shared.device.record(self.queue)?;
        shared.device.wait(fence)?;
        let copied_bytes = copies.iter().map(|op| op.len_bytes).sum();
        shared.metrics.add(|m| &m.d2h_bytes, copied_bytes);
        if !shared.config.checksum {
            return Ok(0);
        }
        // SAFETY: as above, and the copy is done.
        let bytes = unsafe { std::slice::from_raw_parts(host.as_ptr(), shared.shard_bytes()) };
        Ok(xxh3_64(bytes))
    }

    /// Hands a pinned shard to the backend; the pin goes when it has it.
    fn store(&self, task: &Arc<TaskState>, index: usize, pinned: Pinned) {
        let shared = Arc::clone(&self.shared);
        let key = task.shards[index].key;
        let (_, checksum) = shared.attachment.cache().payload(&pinned);
        let Some(slot) = shared.slot_ptr(pinned.slot()) else {
            shared.attachment.cache().release(pinned);
            return self.fail(task, index, ShardError::Load(LoadErrorCode::BAD_OBJECT));
        };
        // SAFETY: READY and pinned until the completion lets go of it, which
        // also holds the mapping (through the attachment).
        let bytes = unsafe { RawBufConst::new(slot.as_ptr(), shared.shard_bytes()) };
        let checksum = shared.config.checksum.then_some(checksum);
        let (budget, blocks) = (Arc::clone(&self.budget), Arc::clone(&self.blocks));
        let task = Arc::clone(task);
        budget.pin();
        let done = move |result: Result<(), crate::backend::traits::BackendError>| {
            let result = result.map_err(|error| {
                tracing::warn!(block = %key.block, shard = key.shard, %error, "dump failed");
                ShardError::Store(error.code())
            });
            if result.is_ok() {
                crash_point!(DumpStored);
                shared.metrics.add(|m| &m.stored, 1);
                blocks.end(key.block, Some(pinned));
            } else {
                shared.attachment.cache().release(pinned);
                budget.unpin();
                blocks.end(key.block, None);
            }
            shared.end(&task, index, result);
        };
        self.shared.backend.put(StoreRequest::new(key, bytes, checksum, done));
    }
}
