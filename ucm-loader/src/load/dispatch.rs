//! The dispatch stage: arbitrate, claim, submit. Short, and never blocked on IO.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ucm_core::cache::{Ask, GetError, Got, Mode, Pool};
use ucm_core::host::Waiter;
use ucm_core::rotation::{RankCountMismatch, Rotation};
use ucm_posix::SystemWaiter;

use crate::engine::{RunningProducer, Shared, WaitingConsumer};
use crate::load::fetch::Batch;
use crate::load::transfer::{Item, Stage};
use crate::task::{Destination, ShardError, TaskState};

/// How long the dispatcher sleeps at most before it looks after the dead.
const JANITOR_NS: u64 = 1_000_000_000;

/// Slots and buckets that the janitor looks at a time: half a megabyte.
const INSPECTED: u32 = 4096;

/// The state of the dispatch thread.
pub(crate) struct Dispatcher {
    shared: Arc<Shared>,
    waiting: WaitingConsumer,
    running: RunningProducer,
    batch: Batch,
    ranks_checked: bool,
    cleaned_ns: u64,
    /// Slots and buckets below this were inspected in this round.
    inspected: u32,
}

impl Dispatcher {
    pub(crate) fn new(
        shared: Arc<Shared>,
        waiting: WaitingConsumer,
        running: RunningProducer,
    ) -> Self {
        let batch = Batch::new(Arc::clone(&shared));
        let cleaned_ns = SystemWaiter.now_ns();
        Self { shared, waiting, running, batch, ranks_checked: false, cleaned_ns, inspected: 0 }
    }

    /// Runs until the engine stops.
    pub(crate) fn run(mut self) {
        loop {
            let heard = self.shared.submitted.listen();
            if let Some(task) = self.waiting.pop() {
                self.check_ranks();
                self.dispatch(&task);
                self.clean();
                continue;
            }
            if self.shared.is_stopping() {
                return;
            }
            self.shared.submitted.sleep(heard, JANITOR_NS);
            self.clean();
        }
    }

    /// About once a second: looks after the dead, and whether a part of the
    /// segment is what it should be. Between two tasks at the earliest.
    fn clean(&mut self) {
        let now_ns = SystemWaiter.now_ns();
        if now_ns - self.cleaned_ns >= JANITOR_NS {
            self.cleaned_ns = now_ns;
            let reaped = self.shared.attachment.cache().reap_dead();
            if reaped > 0 {
                tracing::info!(reaped, "reaped dead participants");
            }
            self.inspect();
        }
    }

    /// The next part of the control plane, all of it in turn.
    fn inspect(&mut self) {
        let plane = self.shared.attachment.cache().plane();
        let end = self.inspected.saturating_add(INSPECTED);
        let known = plane.is_poisoned();
        if !plane.inspect(self.inspected..end) && !known {
            tracing::error!(
                "the segment was found corrupt while in use; every request of every rank fails \
                 from here on; ranks that start again make a new one"
            );
        }
        let parts = plane.geometry().bucket_count.max(plane.geometry().shape.slot_count);
        self.inspected = if end < parts { end } else { 0 };
    }

    /// Says once, with the first task, that the ranks are not those configured.
    fn check_ranks(&mut self) {
        if !std::mem::replace(&mut self.ranks_checked, true) {
            let plane = self.shared.attachment.cache().plane();
            let configured = self.shared.config.local_rank_size;
            if let Some(mismatch) = RankCountMismatch::check(configured, plane.attached_ranks()) {
                tracing::warn!("{mismatch}");
            }
        }
    }

    fn dispatch(&mut self, task: &Arc<TaskState>) {
        let config = &self.shared.config;
        let order = if config.rotate {
            Rotation::new(task.shards.len(), config.device_id, config.local_rank_size)
        } else {
            Rotation::natural(task.shards.len())
        };
        for index in order {
            let result = self.dispatch_shard(task, index);
            if let Err(error) = result {
                self.shared.end(task, index, Err(error));
            }
        }
        self.batch.submit();
        self.shared.dispatched.ring();
        self.prepare_next(task);
    }

    /// While nothing else is to be done: slots for the shards that follow the
    /// task's in their blocks, so that the next task (of the next layer) finds
    /// them without evicting anything. What the task has itself is known
    /// already, and past a block's end there is nothing.
    fn prepare_next(&mut self, task: &TaskState) {
        if !self.shared.config.prealloc {
            return;
        }
        let cache = self.shared.attachment.cache();
        for target in &task.shards {
            if !self.waiting.is_empty() || self.shared.is_stopping() {
                return;
            }
            cache.prepare_next(&target.key);
        }
    }

    /// Brings one shard to the transfer stage, or says why not.
    fn dispatch_shard(&mut self, task: &Arc<TaskState>, index: usize) -> Result<(), ShardError> {
        loop {
            let now_ns = SystemWaiter.now_ns();
            if self.shared.is_stopping() {
                return Err(ShardError::ShuttingDown);
            }
            if let Some(error) = task.stopped(now_ns) {
                return Err(error);
            }
            if self.shared.budget.has_room() {
                break;
            }
            // Whatever is claimed must be under way before we sleep on it,
            // and what is dispatched must be known to the other stage.
            self.batch.submit();
            self.shared.dispatched.ring();
            let timeout_ns = (task.deadline_ns - now_ns).min(JANITOR_NS);
            self.shared.budget.wait_for_room(timeout_ns);
        }
        let key = task.shards[index].key;
        let cache = self.shared.attachment.cache();
        let ask = Ask {
            mode: if task.backend_only { Mode::Reload } else { Mode::Cached },
            pool: match task.destination {
                Destination::Host => Pool::WithReserve,
                _ => Pool::Ordinary,
            },
        };
        let got = match cache.get_with(&key, ask, 0) {
            // Every slot is in use, perhaps by loads of ours that the backend
            // does not know of yet: hand them over before waiting for room.
            Err(GetError::NothingEvictable | GetError::Deadline) => {
                self.batch.submit();
                self.shared.dispatched.ring();
                cache.get_with(&key, ask, task.deadline_ns)
            }
            got => got,
        };
        let stage = match got? {
            Got::Hit(pinned) => {
                task.hits.fetch_add(1, Ordering::Relaxed);
                self.shared.metrics.add(|m| &m.hits, 1);
                Stage::Ready(pinned)
            }
            Got::Wait(pending) => {
                task.waited.fetch_add(1, Ordering::Relaxed);
                self.shared.metrics.add(|m| &m.waits, 1);
                Stage::Pending(pending)
            }
            Got::Owner(loading) => {
                task.owned.fetch_add(1, Ordering::Relaxed);
                self.shared.metrics.add(|m| &m.owned, 1);
                Stage::Pending(self.batch.load(key, loading)?)
            }
        };
        self.shared.budget.pin();
        if matches!(stage, Stage::Pending(_)) {
            self.shared.budget.look_ahead();
        }
        let item = Item { task: Arc::clone(task), index, stage, deaths: 0 };
        if let Err(full) = self.running.push(item) {
            full.0.drop_pin(&self.shared);
            let depth = self.running.ring().capacity();
            return Err(ShardError::QueueFull { depth });
        }
        // The other stage may sleep on what it has; one ring for the first
        // shards, then one for each batch, is soon enough for hits, and owned
        // shards take far longer than that.
        if index.is_multiple_of(16) {
            self.shared.dispatched.ring();
        }
        Ok(())
    }
}
