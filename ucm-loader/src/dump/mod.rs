//! The dump pipeline: device to slot, READY, and behind that slot to backend.
//!
//! One thread (`ucm_dump`) takes tasks in order. A shard is READY for every
//! rank as soon as it is in its slot; its pin stays until the backend has its
//! block ([`blocks`]), and how many may be on that way at a time is bounded.

pub(crate) mod blocks;
pub(crate) mod stage;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::completion::CompletionFd;
use crate::engine::{Shared, StartError, SubmitError};
use crate::load::budget::Budget;
use crate::task::{Destination, ShardError, ShardTarget, TaskHandle, TaskOptions, TaskState};
use stage::Stager;

/// The dump pipeline of an engine.
pub(crate) struct Dumper {
    shared: Arc<Shared>,
    tasks: Mutex<Option<SyncSender<Arc<TaskState>>>>,
    finished: Arc<CompletionFd>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Dumper {
    pub(crate) fn start(
        shared: Arc<Shared>,
        finished: Arc<CompletionFd>,
    ) -> Result<Self, StartError> {
        let depth = shared.config.waiting_queue_depth as usize;
        let (tasks, queue) = sync_channel(depth);
        let stopping = Arc::new(AtomicBool::new(false));
        // A block's shards keep their pins until the last of them is stored.
        let pins = shared.dump_share.max(shared.config.shards_per_block);
        let budget = Arc::new(Budget::new(pins, u32::MAX, u32::MAX));
        let queue_id = shared
            .device
            .queue()
            .map_err(|error| StartError::Device { name: shared.device.name().to_owned(), error })?;
        let stager = Stager::new(Arc::clone(&shared), budget, queue_id);
        let stop = Arc::clone(&stopping);
        let thread = std::thread::Builder::new()
            .name("ucm_dump".to_owned())
            .spawn(move || run(&stager, &queue, &stop))
            .map_err(|error| StartError::Resource { what: "a thread", error })?;
        let tasks = Mutex::new(Some(tasks));
        Ok(Self { shared, tasks, finished, stopping, thread: Some(thread) })
    }

    pub(crate) fn submit(
        &self,
        shards: Vec<ShardTarget>,
        destination: Destination,
        options: &TaskOptions,
    ) -> Result<TaskHandle, SubmitError> {
        let tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(tasks) = tasks.as_ref() else { return Err(SubmitError::ShuttingDown) };
        let (timeout, finished) = (self.shared.config.timeout, Arc::clone(&self.finished));
        let task = TaskState::new(shards, destination, options, timeout, finished);
        match tasks.try_send(Arc::clone(&task)) {
            Ok(()) => Ok(TaskHandle { state: task, nudge: Arc::clone(&self.shared.dispatched) }),
            Err(TrySendError::Full(_)) => {
                Err(SubmitError::QueueFull { depth: self.shared.config.waiting_queue_depth })
            }
            Err(TrySendError::Disconnected(_)) => Err(SubmitError::ShuttingDown),
        }
    }

    /// Refuses new tasks, fails those queued, ends the one under way.
    pub(crate) fn stop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the dump thread panicked");
        }
    }
}

impl Drop for Dumper {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run(stager: &Stager, queue: &Receiver<Arc<TaskState>>, stopping: &AtomicBool) {
    if let Err(error) = stager.bind() {
        tracing::error!(%error, "the dump thread cannot use the device");
    }
    // Ends when the sender is gone and the queue is empty.
    while let Ok(task) = queue.recv() {
        let is_stopping = || stopping.load(Ordering::Acquire);
        let taken = stager.take_blocks(&task, is_stopping);
        for index in 0..task.shards.len() {
            match &taken {
                Err(error) => stager.refuse(&task, index, error.clone()),
                Ok(()) if is_stopping() => stager.fail(&task, index, ShardError::ShuttingDown),
                Ok(()) => stager.dump(&task, index),
            }
        }
    }
}
