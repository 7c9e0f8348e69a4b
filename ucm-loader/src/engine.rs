//! The engine: one rank's cache, backend, device and pipelines, as a library.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ucm_core::device::Device;
use ucm_core::key::{BlockId, ShardKey};
use ucm_core::ring::{Consumer, Producer, Ring, Slot};
use ucm_core::rotation::RankCountMismatch;
use ucm_core::{DevicePtr, Role};
use ucm_posix::{Attachment, Segment};

use crate::backend::recorder::{EventKind, EventLog};
use crate::backend::traits::{Backend, BackendError, SharedMemory};
use crate::completion::CompletionFd;
use crate::config::Config;
use crate::dump::Dumper;
use crate::load::budget::Budget;
use crate::load::dispatch::Dispatcher;
use crate::load::transfer::{Item, Transferrer};
use crate::metrics::{Metrics, MetricsSnapshot};
use crate::task::{Destination, ShardTarget, TaskHandle, TaskOptions, TaskState};

mod error;
mod shared;

pub use error::{StartError, SubmitError};
pub(crate) use shared::Shared;

/// One part in so many of a rank's slots is for dumps.
const DUMP_PART: u32 = 4;

type Slots<T> = Box<[Slot<T>]>;
type SharedRing<T> = Arc<Ring<T, Slots<T>>>;
pub(crate) type End<T> = Consumer<T, Slots<T>, SharedRing<T>>;
pub(crate) type Start<T> = Producer<T, Slots<T>, SharedRing<T>>;
pub(crate) type WaitingConsumer = End<Arc<TaskState>>;
pub(crate) type WaitingProducer = Start<Arc<TaskState>>;
pub(crate) type RunningConsumer = End<Item>;
pub(crate) type RunningProducer = Start<Item>;

/// How far a chain of blocks is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Prefix {
    /// Blocks from the front whose every shard is READY in the host cache.
    pub ready_blocks: usize,
    /// Blocks from the front that the host cache or the backend has.
    pub found_blocks: usize,
}

/// Everything an engine is started with besides its configuration.
pub struct Parts {
    /// Where shards come from.
    pub backend: Arc<dyn Backend>,
    /// Where they go.
    pub device: Arc<dyn Device>,
    /// Notes publications and evictions, if given.
    pub log: Option<Arc<EventLog>>,
}

/// One rank's end of the shared cache.
pub struct Engine {
    shared: Arc<Shared>,
    waiting: Mutex<WaitingProducer>,
    dumper: Dumper,
    finished: Arc<CompletionFd>,
    threads: Vec<JoinHandle<()>>,
}

fn ring<T>(depth: u32) -> SharedRing<T> {
    // Depths come from a checked configuration, so a power of two above them
    // is within what a ring may be.
    let depth = depth.max(1).next_power_of_two();
    let slots: Slots<T> = (0..depth).map(|_| Slot::new()).collect();
    match Ring::new(slots) {
        Ok(ring) => Arc::new(ring),
        Err(_) => unreachable!("{depth} is a power of two"),
    }
}

impl Engine {
    /// Opens or joins the segment, takes the rank's place, and starts the
    /// pipelines' threads.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: Config, parts: Parts) -> Result<Self, StartError> {
        let options = config.segment_options()?;
        let segment = Arc::new(Segment::open_or_create(&options)?);
        if let Some(data) = segment.data() {
            let keeper = Box::new(Arc::clone(&segment));
            // SAFETY: the mapping is as long, writable, and lives as long as
            // the segment, which the keeper holds.
            let memory =
                unsafe { SharedMemory::new(data.base().as_ptr(), data.len_bytes(), keeper) };
            parts.backend.adopt_memory(memory);
        }
        let (rank, device_id) = (Some(config.rank), Some(config.device_id));
        let mut attachment = Attachment::join(segment, Role::Rank, rank, device_id)?;
        if let Some(log) = parts.log.clone() {
            attachment.observe_evictions(Arc::new(move |eviction| {
                log.record_at(EventKind::Evicted, &eviction.key, eviction.before_ns);
            }));
        }

        let shape = config.shape();
        let ordinary = shape.slot_count - shape.reserved_slots;
        let share = (ordinary / shape.local_rank_size).max(1);
        // Of a rank's slots, the part that dumps on their way to the backend may
        // hold; the rest is for loads, which somebody waits for.
        let dump_share = share / DUMP_PART;
        let device = parts.device;
        let device_error = |error| StartError::Device { name: device.name().to_owned(), error };
        device.bind().map_err(device_error)?;
        let queues = (0..config.stream_number.max(1))
            .map(|_| device.queue())
            .collect::<Result<Vec<_>, _>>()
            .map_err(device_error)?;
        let finished = CompletionFd::new()
            .map_err(|errno| StartError::Resource { what: "an eventfd", error: errno.into() })?;

        let waiting = ring::<Arc<TaskState>>(config.waiting_queue_depth);
        let running = ring::<Item>(config.running_queue_depth);
        let shared = Arc::new(Shared {
            budget: Budget::new(share - dump_share, config.claim_window, config.lookahead),
            dump_share: dump_share.max(1),
            config,
            attachment,
            backend: parts.backend,
            device: Arc::clone(&device),
            submitted: Arc::default(),
            dispatched: Arc::default(),
            metrics: Metrics::default(),
            log: parts.log,
            stopping: AtomicBool::new(false),
            dispatcher_gone: AtomicBool::new(false),
        });
        let ends = (
            Ring::producer(Arc::clone(&waiting)),
            Ring::consumer(waiting),
            Ring::producer(Arc::clone(&running)),
            Ring::consumer(running),
        );
        let (Some(submit), Some(take), Some(hand), Some(receive)) = ends else {
            unreachable!("fresh rings have all their ends");
        };

        let finished = Arc::new(finished);
        let mut engine = Self {
            dumper: Dumper::start(Arc::clone(&shared), Arc::clone(&finished))?,
            shared: Arc::clone(&shared),
            waiting: Mutex::new(submit),
            finished,
            threads: Vec::new(),
        };
        let dispatcher = Dispatcher::new(Arc::clone(&shared), take, hand);
        let transferrer = Transferrer::new(Arc::clone(&shared), receive, queues);
        engine.spawn("ucm_load_disp", move |shared| {
            dispatcher.run();
            shared.dispatcher_gone.store(true, Ordering::Release);
            shared.dispatched.ring();
        })?;
        engine.spawn("ucm_load_xfer", move |shared| {
            if let Err(error) = shared.device.bind() {
                tracing::error!(%error, "the transfer thread cannot use the device");
            }
            transferrer.run();
        })?;
        Ok(engine)
    }

    fn spawn(
        &mut self,
        name: &'static str,
        body: impl FnOnce(&Shared) + Send + 'static,
    ) -> Result<(), StartError> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || body(&shared))
            .map_err(|error| StartError::Resource { what: "a thread", error })?;
        self.threads.push(thread);
        Ok(())
    }

    /// Loads shards into device memory, each in one piece.
    ///
    /// # Safety
    /// Every target must be `shard_bytes` of the engine's device, free for the
    /// engine to write until the task has finished.
    ///
    /// # Errors
    /// See [`SubmitError`].
    pub unsafe fn load(
        &self,
        shards: Vec<ShardTarget>,
        options: &TaskOptions,
    ) -> Result<TaskHandle, SubmitError> {
        self.submit(shards, Destination::Contiguous, options)
    }

    /// Loads shards into device memory, each scattered over the tensors that
    /// `tensor_bytes` of the configuration lists: `addresses` has one row of
    /// them for each key. Pieces that touch on the device are one copy.
    ///
    /// # Safety
    /// As for [`load`](Self::load), for every tensor of every row.
    ///
    /// # Errors
    /// See [`SubmitError`].
    pub unsafe fn load_tensors(
        &self,
        keys: &[ShardKey],
        addresses: Vec<DevicePtr>,
        options: &TaskOptions,
    ) -> Result<TaskHandle, SubmitError> {
        let (shards, destination) = self.rows(keys, addresses)?;
        self.submit(shards, destination, options)
    }

    /// Brings shards from the backend into the host cache, ahead of a load.
    /// It may use the reserve; cancelling the handle ends it.
    ///
    /// # Errors
    /// See [`SubmitError`].
    pub fn prefetch(
        &self,
        keys: &[ShardKey],
        options: &TaskOptions,
    ) -> Result<TaskHandle, SubmitError> {
        let nowhere = |&key| ShardTarget { key, device: DevicePtr(0) };
        self.submit(keys.iter().map(nowhere).collect(), Destination::Host, options)
    }

    /// Dumps shards from device memory into the cache and, behind that, to the
    /// backend; a block's shards should come in one task. The task has
    /// finished when the backend has them.
    ///
    /// # Safety
    /// Every target must be `shard_bytes` of the engine's device, not written
    /// by anybody until the task has finished.
    ///
    /// # Errors
    /// See [`SubmitError`].
    pub unsafe fn dump(
        &self,
        shards: Vec<ShardTarget>,
        options: &TaskOptions,
    ) -> Result<TaskHandle, SubmitError> {
        self.dumper.submit(shards, Destination::Contiguous, options)
    }

    /// Dumps shards whose pieces lie in the tensors that `tensor_bytes` lists;
    /// see [`load_tensors`](Self::load_tensors) and [`dump`](Self::dump).
    ///
    /// # Safety
    /// As for [`dump`](Self::dump), for every tensor of every row.
    ///
    /// # Errors
    /// See [`SubmitError`].
    pub unsafe fn dump_tensors(
        &self,
        keys: &[ShardKey],
        addresses: Vec<DevicePtr>,
        options: &TaskOptions,
    ) -> Result<TaskHandle, SubmitError> {
        let (shards, destination) = self.rows(keys, addresses)?;
        self.dumper.submit(shards, destination, options)
    }

    fn rows(
        &self,
        keys: &[ShardKey],
        addresses: Vec<DevicePtr>,
    ) -> Result<(Vec<ShardTarget>, Destination), SubmitError> {
        let tensors = self.shared.config.tensor_bytes.len().max(1);
        if addresses.len() != keys.len().saturating_mul(tensors) {
            return Err(SubmitError::Addresses {
                shards: keys.len(),
                tensors,
                addresses: addresses.len(),
            });
        }
        let first = addresses.iter().step_by(tensors);
        let shards =
            keys.iter().zip(first).map(|(&key, &device)| ShardTarget { key, device }).collect();
        Ok((shards, Destination::Tensors(addresses.into_boxed_slice())))
    }

    fn submit(
        &self,
        shards: Vec<ShardTarget>,
        destination: Destination,
        options: &TaskOptions,
    ) -> Result<TaskHandle, SubmitError> {
        let depth = self.shared.config.running_queue_depth;
        if shards.len() > depth as usize {
            return Err(SubmitError::TaskTooLarge { shards: shards.len(), depth });
        }
        if self.shared.is_stopping() {
            return Err(SubmitError::ShuttingDown);
        }
        let (timeout, finished) = (self.shared.config.timeout, Arc::clone(&self.finished));
        let task = TaskState::new(shards, destination, options, timeout, finished);
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.push(Arc::clone(&task)).is_err() {
            return Err(SubmitError::QueueFull { depth: waiting.ring().capacity() });
        }
        drop(waiting);
        self.shared.submitted.ring();
        Ok(TaskHandle { state: task, nudge: Arc::clone(&self.shared.dispatched) })
    }

    /// How many blocks of a chain are in the host cache, and how many in it or
    /// the backend.
    ///
    /// # Errors
    /// The backend's, when it cannot say.
    pub fn prefix(&self, blocks: &[BlockId]) -> Result<Prefix, BackendError> {
        prefix(self.shared.attachment.cache().plane(), &*self.shared.backend, blocks)
    }

    /// Refreshes every resident shard of `blocks`; returns how many that were.
    pub fn touch(&self, blocks: &[BlockId]) -> u32 {
        self.shared.attachment.cache().touch(blocks)
    }

    /// Readable when a task has finished.
    pub fn completion_fd(&self) -> &CompletionFd {
        &self.finished
    }

    /// The counters.
    pub fn metrics(&self) -> MetricsSnapshot {
        self.shared.metrics.snapshot()
    }

    /// The place in the segment.
    pub fn attachment(&self) -> &Attachment {
        &self.shared.attachment
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// Whether the ranks attached now are as many as configured.
    pub fn check_ranks(&self) -> Option<RankCountMismatch> {
        let attached = self.shared.attachment.cache().plane().attached_ranks();
        RankCountMismatch::check(self.shared.config.local_rank_size, attached)
    }

    /// Ends what is under way, fails what is queued, stops the threads, and
    /// leaves the segment. `false` when the backend still had work at the end
    /// of `patience`; then the place is left when that work ends.
    pub fn shutdown(mut self, patience: Duration) -> bool {
        self.stop(patience)
    }

    fn stop(&mut self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        self.dumper.stop();
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.submitted.ring();
        self.shared.dispatched.ring();
        self.shared.budget.nudge();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a pipeline thread panicked");
            }
        }
        self.shared.backend.flush(deadline).is_ok()
    }
}

/// See [`Engine::prefix`]; for whoever is not an engine (a scheduler's scout).
///
/// # Errors
/// The backend's, when it cannot say.
pub fn prefix(
    plane: &ucm_core::ControlPlane<'_>,
    backend: &dyn Backend,
    blocks: &[BlockId],
) -> Result<Prefix, BackendError> {
    let ready_blocks = plane.ready_prefix(blocks);
    let mut found_blocks = ready_blocks;
    while found_blocks < blocks.len() {
        let rest = &blocks[found_blocks..];
        let stored = backend.longest_prefix(rest)?;
        found_blocks += stored;
        // A block that was dumped and is still on its way to the backend is
        // in the cache alone; the chain may go on behind it.
        let cached = plane.ready_prefix(&rest[stored..]);
        found_blocks += cached;
        if cached == 0 {
            break;
        }
    }
    Ok(Prefix { ready_blocks, found_blocks })
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.stop(Duration::from_secs(30));
        }
    }
}
