//! A task: shards to move, and how each of them fared.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ucm_core::cache::GetError;
use ucm_core::device::DeviceError;
use ucm_core::host::Waiter;
use ucm_core::slot::meta::LoadErrorCode;
use ucm_core::sync::{AtomicU32, Ordering as CoreOrdering};
use ucm_core::{DevicePtr, ShardKey};
use ucm_posix::SystemWaiter;

use crate::completion::CompletionFd;
use crate::doorbell::Doorbell;

/// One shard, and where on the device it is or goes: `shard_bytes` from there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardTarget {
    /// Which shard.
    pub key: ShardKey,
    /// Its first byte on the device.
    pub device: DevicePtr,
}

/// How a task is run.
#[derive(Clone, Debug, Default)]
pub struct TaskOptions {
    /// An event of the device's framework that the copies wait for.
    pub event: Option<u64>,
    /// How long the task may take; the engine's `timeout_ms` without.
    pub timeout: Option<Duration>,
    /// Load from the backend although the cache has it, as long as no other
    /// rank is copying from it (what is there is then replaced).
    pub backend_only: bool,
}

/// What becomes of a shard once it is READY.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Destination {
    /// One piece, at each shard's own address.
    Contiguous,
    /// `tensors` pieces a shard, each at an address of its own, row after row.
    Tensors(Box<[DevicePtr]>),
    /// It stays in the host cache.
    Host,
}

/// Why one shard of a task did not make it. It fails no other.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// The backend could not deliver it.
    #[error("the load failed: {0}")]
    Load(LoadErrorCode),
    /// The cache had no place for it.
    #[error(transparent)]
    Cache(#[from] GetError),
    /// The task's deadline passed first.
    #[error("the task's deadline passed")]
    Deadline,
    /// The task was cancelled.
    #[error("the task was cancelled")]
    Cancelled,
    /// So many ranks died while loading it that trying on would risk the rest.
    #[error("{deaths} ranks died while loading this shard")]
    OwnersDied {
        /// How many.
        deaths: u32,
    },
    /// The copy to or from the device failed.
    #[error("the device copy failed: {0}")]
    Device(#[from] DeviceError),
    /// The backend did not take a dumped shard.
    #[error("the write to the backend failed: {0}")]
    Store(LoadErrorCode),
    /// The pipeline's queue was full.
    #[error("the running queue of {depth} shards is full; raise running_queue_depth")]
    QueueFull {
        /// Its depth.
        depth: u32,
    },
    /// The engine was shut down.
    #[error("the engine is shutting down")]
    ShuttingDown,
}

/// A failed shard of a task.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShardFailure {
    /// Its place in the task.
    pub index: usize,
    /// Which shard.
    pub key: ShardKey,
    /// Why.
    pub error: ShardError,
}

/// How a task went, shard by shard.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TaskReport {
    /// Shards of the task.
    pub shards: usize,
    /// Found READY.
    pub hits: u64,
    /// Loaded from the backend by this rank.
    pub owned: u64,
    /// Waited for while another rank loaded them.
    pub waited: u64,
    /// Those that failed, in no particular order.
    pub failures: Vec<ShardFailure>,
}

impl TaskReport {
    /// Whether every shard made it.
    pub fn is_complete(&self) -> bool {
        self.failures.is_empty()
    }
}

/// How far a task is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TaskStatus {
    /// So many of its shards have ended.
    Running {
        /// Ended, one way or the other.
        ended: usize,
        /// In all.
        shards: usize,
    },
    /// All have.
    Finished(TaskReport),
}

/// The task was not finished in time; it goes on, and its handle with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{ended} of {shards} shards had ended after {waited_ms} ms")]
pub struct NotFinished {
    /// Shards that have ended.
    pub ended: usize,
    /// Shards in all.
    pub shards: usize,
    /// How long was waited.
    pub waited_ms: u64,
}

/// What the pipelines know of a task.
pub(crate) struct TaskState {
    pub(crate) shards: Vec<ShardTarget>,
    pub(crate) deadline_ns: u64,
    pub(crate) event: Option<u64>,
    pub(crate) backend_only: bool,
    pub(crate) destination: Destination,
    /// Shards that have not ended; the futex word of `wait`.
    remaining: AtomicU32,
    cancelled: AtomicBool,
    pub(crate) hits: AtomicU64,
    pub(crate) owned: AtomicU64,
    pub(crate) waited: AtomicU64,
    failures: Mutex<Vec<ShardFailure>>,
    finished: Arc<CompletionFd>,
}

impl TaskState {
    pub(crate) fn new(
        shards: Vec<ShardTarget>,
        destination: Destination,
        options: &TaskOptions,
        default_timeout: Duration,
        finished: Arc<CompletionFd>,
    ) -> Arc<Self> {
        let timeout = options.timeout.unwrap_or(default_timeout);
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        // Task sizes are checked against the queue's depth, far below 2^32.
        let remaining = AtomicU32::new(shards.len() as u32);
        let task = Arc::new(Self {
            shards,
            deadline_ns: SystemWaiter.now_ns().saturating_add(timeout_ns),
            event: options.event,
            backend_only: options.backend_only,
            destination,
            remaining,
            cancelled: AtomicBool::new(false),
            hits: AtomicU64::new(0),
            owned: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            failures: Mutex::new(Vec::new()),
            finished,
        });
        if task.shards.is_empty() {
            task.finished.signal();
        }
        task
    }

    /// One shard has ended. Exactly once for each.
    pub(crate) fn end(&self, index: usize, result: Result<(), ShardError>) {
        if let Err(error) = result {
            let key = self.shards[index].key;
            let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
            failures.push(ShardFailure { index, key, error });
        }
        // SYNC(task.remaining): Release; pairs with the Acquire load in
        // `ended`: whoever sees zero sees every failure and every copied byte.
        if self.remaining.fetch_sub(1, CoreOrdering::AcqRel) == 1 {
            SystemWaiter.wake_all(&self.remaining);
            self.finished.signal();
        }
    }

    fn ended(&self) -> usize {
        // SYNC(task.remaining): Acquire; pairs with the AcqRel subtraction in `end`.
        self.shards.len() - self.remaining.load(CoreOrdering::Acquire) as usize
    }

    /// Why nothing more should be begun for this task, if so.
    pub(crate) fn stopped(&self, now_ns: u64) -> Option<ShardError> {
        if self.cancelled.load(Ordering::Relaxed) {
            Some(ShardError::Cancelled)
        } else if now_ns >= self.deadline_ns {
            Some(ShardError::Deadline)
        } else {
            None
        }
    }

    fn report(&self) -> TaskReport {
        TaskReport {
            shards: self.shards.len(),
            hits: self.hits.load(Ordering::Relaxed),
            owned: self.owned.load(Ordering::Relaxed),
            waited: self.waited.load(Ordering::Relaxed),
            failures: self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// A submitted task. Dropping the handle leaves the task running.
pub struct TaskHandle {
    pub(crate) state: Arc<TaskState>,
    pub(crate) nudge: Arc<Doorbell>,
}

impl TaskHandle {
    /// How far it is. Never blocks.
    pub fn check(&self) -> TaskStatus {
        let (ended, shards) = (self.state.ended(), self.state.shards.len());
        if ended == shards {
            TaskStatus::Finished(self.state.report())
        } else {
            TaskStatus::Running { ended, shards }
        }
    }

    /// Sleeps until every shard has ended, at most `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<TaskReport, NotFinished> {
        let began_ns = SystemWaiter.now_ns();
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        loop {
            let remaining = self.state.remaining.load(CoreOrdering::Acquire);
            if remaining == 0 {
                return Ok(self.state.report());
            }
            let waited_ns = SystemWaiter.now_ns() - began_ns;
            if waited_ns >= timeout_ns {
                let shards = self.state.shards.len();
                let waited_ms = waited_ns / 1_000_000;
                return Err(NotFinished { ended: self.state.ended(), shards, waited_ms });
            }
            // Woken by the last shard alone: the word changes with every
            // shard, so the sleep may end early, and that is all.
            let left_ns = (timeout_ns - waited_ns).min(100_000_000);
            SystemWaiter.wait(&self.state.remaining, remaining, left_ns);
        }
    }

    /// Begins no more shards of this task and stops waiting for others' loads.
    /// Those under way end by themselves. Idempotent.
    pub fn cancel(&self) {
        self.state.cancelled.store(true, Ordering::Relaxed);
        self.nudge.ring();
    }
}

impl fmt::Debug for TaskHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskHandle").field("status", &self.check()).finish_non_exhaustive()
    }
}
