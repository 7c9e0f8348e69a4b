//! The transfer stage: wait, copy, complete. Long, and never holds anything but pins.
//!
//! Shards are copied in the order in which they become READY, whoever loads
//! them. Each pin is dropped when its own copy is done.

use std::collections::VecDeque;
use std::sync::Arc;

use rustix::time::{ClockId, clock_gettime};
use ucm_core::cache::{GetError, Got, Pending, Pinned, Progress, WaitError};
use ucm_core::device::{CopyKind, CopyOp, Fence, QueueId};
use ucm_core::host::Waiter;
use ucm_core::limits::{MAX_OWNER_DEATHS, WAIT_SLICE_NS};
use ucm_core::sync::AtomicU32;
use ucm_posix::SystemWaiter;

use crate::config::WaitMode;
use crate::crash::crash_point;
use crate::engine::{RunningConsumer, Shared};
use crate::load::fetch::Batch;
use crate::scatter;
use crate::task::{Destination, ShardError, TaskState};

/// Where a shard is when it comes from the dispatcher.
pub(crate) enum Stage {
    /// READY and pinned.
    Ready(Pinned),
    /// Being loaded, by this rank or another.
    Pending(Pending),
}

/// One shard on its way.
pub(crate) struct Item {
    pub(crate) task: Arc<TaskState>,
    pub(crate) index: usize,
    pub(crate) stage: Stage,
    /// Owners of it that died while this task waited.
    pub(crate) deaths: u32,
}

impl Item {
    /// Lets go of the slot.
    pub(crate) fn drop_pin(self, shared: &Shared) {
        match self.stage {
            Stage::Ready(pinned) => shared.attachment.cache().release(pinned),
            Stage::Pending(pending) => {
                shared.attachment.cache().cancel(pending);
                shared.budget.caught_up();
            }
        }
        shared.budget.unpin();
    }
}

struct Waiting {
    task: Arc<TaskState>,
    index: usize,
    pending: Pending,
    deaths: u32,
}

struct Copying {
    task: Arc<TaskState>,
    index: usize,
    pinned: Pinned,
    fence: Fence,
}

/// `futex_waitv` takes 128 words; one is the doorbell.
const MAX_WATCHED: usize = 127;
/// Sleep while copies are on the device and nothing else can be done: their
/// fences are not words to sleep on.
const COPY_POLL_NS: u64 = 50_000;

/// The state of the transfer thread.
pub(crate) struct Transferrer {
    shared: Arc<Shared>,
    running: RunningConsumer,
    queues: Vec<QueueId>,
    next_queue: usize,
    waiting: Vec<Waiting>,
    copying: VecDeque<Copying>,
    /// The copies of one shard, kept for its memory.
    copies: Vec<CopyOp>,
    batch: Batch,
}

impl Transferrer {
    pub(crate) fn new(shared: Arc<Shared>, running: RunningConsumer, queues: Vec<QueueId>) -> Self {
        let batch = Batch::new(Arc::clone(&shared));
        Self {
            shared,
            running,
            queues,
            next_queue: 0,
            waiting: Vec::new(),
            copying: VecDeque::new(),
            copies: Vec::new(),
            batch,
        }
    }

    /// Runs until the engine stops and everything in hand has ended.
    pub(crate) fn run(mut self) {
        loop {
            let heard = self.shared.dispatched.listen();
            let mut progress = self.take_dispatched();
            progress |= self.settle_waiting();
            progress |= self.finish_copies();
            self.batch.submit();
            if progress {
                continue;
            }
            let idle = self.waiting.is_empty() && self.copying.is_empty();
            if idle && self.shared.is_dispatcher_gone() && self.running.is_empty() {
                return;
            }
            self.sleep(heard);
        }
    }

    fn take_dispatched(&mut self) -> bool {
        let mut progress = false;
        while let Some(item) = self.running.pop() {
            progress = true;
            let Item { task, index, stage, deaths } = item;
            match stage {
                Stage::Ready(pinned) => self.copy(task, index, pinned),
                Stage::Pending(pending) => {
                    self.waiting.push(Waiting { task, index, pending, deaths });
                }
            }
        }
        progress
    }

    /// One look at every load that is waited for.
    fn settle_waiting(&mut self) -> bool {
        let mut progress = false;
        let now_ns = SystemWaiter.now_ns();
        let poisoned = self.shared.attachment.cache().plane().is_poisoned();
        let mut at = 0;
        while at < self.waiting.len() {
            let entry = &self.waiting[at];
            let cache = self.shared.attachment.cache();
            let loading = cache.poll(&entry.pending) == Progress::Loading;
            let wrong = poisoned.then_some(ShardError::Cache(GetError::Poisoned));
            let stopped = wrong.or_else(|| entry.task.stopped(now_ns));
            if loading && stopped.is_none() && !self.shared.is_stopping() {
                at += 1;
                continue;
            }
            progress = true;
            let Waiting { task, index, pending, deaths } = self.waiting.swap_remove(at);
            self.shared.budget.caught_up();
            let cache = self.shared.attachment.cache();
            match cache.settle(pending) {
                Ok(Ok(pinned)) => self.copy(task, index, pinned),
                Ok(Err(WaitError::OwnerDied)) => self.ask_again(task, index, deaths + 1),
                Ok(Err(WaitError::Failed(code))) => {
                    self.lose(&task, index, ShardError::Load(code));
                }
                Ok(Err(_)) => self.lose(&task, index, ShardError::Deadline),
                Err(pending) => {
                    cache.cancel(pending);
                    self.lose(&task, index, stopped.unwrap_or(ShardError::ShuttingDown));
                }
            }
        }
        progress
    }

    /// Ends a shard whose pin is gone already.
    fn lose(&self, task: &TaskState, index: usize, error: ShardError) {
        self.shared.budget.unpin();
        self.shared.end(task, index, Err(error));
    }

    /// The owner died: somebody else loads it now, perhaps this rank.
    fn ask_again(&mut self, task: Arc<TaskState>, index: usize, deaths: u32) {
        if deaths >= MAX_OWNER_DEATHS {
            // One bad page must not kill every rank in turn.
            return self.lose(&task, index, ShardError::OwnersDied { deaths });
        }
        let key = task.shards[index].key;
        // The share of pins is still held, so a slot is to be had; a short
        // deadline keeps the other shards from waiting behind this one.
        let soon_ns = SystemWaiter.now_ns().saturating_add(WAIT_SLICE_NS);
        let deadline_ns = task.deadline_ns.min(soon_ns);
        let pending = match self.shared.attachment.cache().get(&key, deadline_ns) {
            Ok(Got::Hit(pinned)) => return self.copy(task, index, pinned),
            Ok(Got::Wait(pending)) => Ok(pending),
            Ok(Got::Owner(loading)) => self.batch.load(key, loading),
            Err(error) => Err(error.into()),
        };
        match pending {
            Ok(pending) => {
                self.shared.budget.look_ahead();
                self.waiting.push(Waiting { task, index, pending, deaths });
            }
            Err(error) => self.lose(&task, index, error),
        }
    }

    fn copy(&mut self, task: Arc<TaskState>, index: usize, pinned: Pinned) {
        if task.destination == Destination::Host {
            // A prefetch: READY is all it wanted.
            self.shared.attachment.cache().release(pinned);
            self.shared.budget.unpin();
            return self.shared.end(&task, index, Ok(()));
        }
        let queue = self.queues[self.next_queue];
        self.next_queue = (self.next_queue + 1) % self.queues.len();
        match self.submit_copy(queue, &task, index, &pinned) {
            Ok(fence) => self.copying.push_back(Copying { task, index, pinned, fence }),
            Err(error) => {
                self.shared.attachment.cache().release(pinned);
                self.lose(&task, index, error);
            }
        }
    }

    fn submit_copy(
        &mut self,
        queue: QueueId,
        task: &TaskState,
        index: usize,
        pinned: &Pinned,
    ) -> Result<Fence, ShardError> {
        let shared = &self.shared;
        let Some(slot) = shared.slot_ptr(pinned.slot()) else {
            return Err(ShardError::Load(ucm_core::slot::meta::LoadErrorCode::BAD_OBJECT));
        };
        let config = &shared.config;
        scatter::copies(
            CopyKind::HostToDevice,
            task,
            index,
            slot.as_ptr(),
            config.shard_bytes,
            &config.tensor_bytes,
            &mut self.copies,
        );
        if let Some(event) = task.event {
            shared.device.queue_wait_raw(queue, event)?;
        }
        // SAFETY: the slot is READY and pinned until the fence is done; the
        // device ranges are the submitter's word (`Engine::load`).
        unsafe { shared.device.copy_batch(queue, &self.copies) }?;
        let copied_bytes = self.copies.iter().map(|op| op.len_bytes).sum();
        shared.metrics.add(|m| &m.h2d_bytes, copied_bytes);
        Ok(shared.device.record(queue)?)
    }

    fn finish_copies(&mut self) -> bool {
        let mut progress = false;
        for _ in 0..self.copying.len() {
            let Some(copying) = self.copying.pop_front() else { break };
            let done = match self.shared.device.is_done(copying.fence) {
                Ok(false) => {
                    self.copying.push_back(copying);
                    continue;
                }
                Ok(true) => Ok(()),
                Err(error) => Err(error.into()),
            };
            progress = true;
            crash_point!(LoadCopied);
            self.shared.attachment.cache().release(copying.pinned);
            self.shared.budget.unpin();
            self.shared.end(&copying.task, copying.index, done);
        }
        progress
    }

    /// Sleeps on the doorbell and on as many loads as the system watches.
    fn sleep(&mut self, heard: crate::doorbell::Heard) {
        let began_ns = SystemWaiter.now_ns();
        let cpu_before_ns = thread_cpu_ns();
        let waits = !self.waiting.is_empty();
        match self.shared.config.wait_mode {
            WaitMode::Futex => self.sleep_on_words(heard, began_ns),
            WaitMode::Yield if waits => std::thread::yield_now(),
            WaitMode::Yield => self.shared.dispatched.sleep(heard, WAIT_SLICE_NS),
        }
        if waits {
            let ended_ns = SystemWaiter.now_ns();
            let metrics = &self.shared.metrics;
            metrics.add(|m| &m.wait_cpu_ns, thread_cpu_ns() - cpu_before_ns);
            metrics.add(|m| &m.wait_wall_ns, ended_ns - began_ns);
        }
    }

    fn sleep_on_words(&mut self, heard: crate::doorbell::Heard, now_ns: u64) {
        let shared = Arc::clone(&self.shared);
        let cache = shared.attachment.cache();
        let mut words: Vec<(&AtomicU32, u32)> = Vec::with_capacity(MAX_WATCHED + 1);
        match shared.dispatched.arm(heard) {
            Some(word) => words.push(word),
            None => return,
        }
        let mut until_ns = u64::MAX;
        for entry in self.waiting.iter().take(MAX_WATCHED) {
            match cache.arm(&entry.pending) {
                Some(word) => words.push(word),
                None => return,
            }
        }
        for entry in &self.waiting {
            until_ns = until_ns.min(entry.task.deadline_ns);
        }
        let mut slice_ns = if self.waiting.is_empty() { u64::MAX >> 2 } else { WAIT_SLICE_NS };
        if !self.copying.is_empty() {
            slice_ns = COPY_POLL_NS;
        }
        let timeout_ns = slice_ns.min(until_ns.saturating_sub(now_ns));
        SystemWaiter.wait_any(&words, timeout_ns);
        // A slice that ran out in vain: is whoever loads this still alive?
        if timeout_ns == WAIT_SLICE_NS && SystemWaiter.now_ns() - now_ns >= WAIT_SLICE_NS {
            for entry in &self.waiting {
                cache.look_after_owner(&entry.pending);
            }
        }
    }
}

fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
