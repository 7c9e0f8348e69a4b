//! What the driver is told: requests, memory, the end. Bounded, and it wakes a sleeping driver.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use ucm_core::key::ShardKey;

use super::super::layout::ShardEntry;
use super::super::open_block::OpenBlock;
use crate::backend::traits::{BackendError, LoadRequest, LoadedShard, OpenError, SharedMemory};

/// A request that counts as outstanding until it has been answered.
pub(super) struct Tracked {
    // In this order: answered first, then no longer counted.
    request: LoadRequest,
    deadline: Instant,
    _counted: Counted,
}

struct Counted(Arc<Counts>);

impl Drop for Counted {
    fn drop(&mut self) {
        let mut outstanding = self.0.lock();
        *outstanding -= 1;
        if *outstanding == 0 {
            self.0.idle.notify_all();
        }
    }
}

#[derive(Default)]
struct Counts {
    outstanding: Mutex<usize>,
    idle: Condvar,
}

impl Counts {
    fn lock(&self) -> MutexGuard<'_, usize> {
        self.outstanding.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tracked {
    pub(super) fn key(&self) -> ShardKey {
        self.request.key()
    }

    pub(super) fn request(&self) -> &LoadRequest {
        &self.request
    }

    pub(super) fn buffer(&mut self) -> &mut [u8] {
        self.request.buffer()
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    pub(super) fn is_late(&self) -> bool {
        Instant::now() >= self.deadline
    }

    pub(super) fn finish(self, result: Result<LoadedShard, BackendError>) {
        self.request.finish(result);
    }
}

/// A shard to read, from an open file.
pub(super) struct Job {
    pub(super) tracked: Tracked,
    pub(super) block: Arc<OpenBlock>,
    pub(super) entry: ShardEntry,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    memory: Option<SharedMemory>,
    /// The driver will not look here before it is woken.
    is_asleep: bool,
    is_stopping: bool,
    /// The driver has ended.
    is_gone: bool,
    /// The ring has failed, with this error number.
    broken: Option<i32>,
}

/// What the driver finds when it looks.
pub(super) struct Delivery {
    pub(super) jobs: Vec<Job>,
    pub(super) late: Vec<Job>,
    pub(super) memory: Option<SharedMemory>,
    pub(super) is_stopping: bool,
    /// The deadline of the first job that had to stay.
    pub(super) next_deadline: Option<Instant>,
}

/// The inbox.
pub(super) struct Inbox {
    state: Mutex<State>,
    gone: Condvar,
    counts: Arc<Counts>,
    bell: OwnedFd,
    depth: usize,
}

impl Inbox {
    pub(super) fn new(depth: usize) -> Result<Self, OpenError> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| OpenError::NoUring { errno: errno.raw_os_error() })?;
        let (state, gone, counts) = Default::default();
        Ok(Self { state, gone, counts, bell, depth })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Readable when a sleeping driver should look.
    pub(super) fn bell(&self) -> &OwnedFd {
        &self.bell
    }

    fn wake(&self, state: &mut State) {
        if std::mem::take(&mut state.is_asleep) {
            // The only failure is a counter at its maximum: readable already.
            let _full = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }

    /// Takes as many requests as there is room for and refuses the rest.
    pub(super) fn admit(&self, batch: Vec<LoadRequest>, deadline: Instant) -> Vec<Tracked> {
        let refusal = {
            let state = self.lock();
            match state.broken {
                _ if state.is_stopping => Some(BackendError::ShuttingDown),
                Some(errno) => Some(broken(errno)),
                None => None,
            }
        };
        let room = match refusal {
            Some(_) => 0,
            None => {
                let mut outstanding = self.counts.lock();
                let room = self.depth.saturating_sub(*outstanding).min(batch.len());
                *outstanding += room;
                room
            }
        };
        let why = refusal.unwrap_or(BackendError::QueueFull { depth: self.depth });
        let mut batch = batch.into_iter();
        let track =
            |request| Tracked { request, deadline, _counted: Counted(Arc::clone(&self.counts)) };
        let taken = batch.by_ref().take(room).map(track).collect();
        batch.for_each(|request| request.finish(Err(why.clone())));
        taken
    }

    /// Gives jobs to the driver.
    pub(super) fn deliver(&self, jobs: Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        let mut state = self.lock();
        let refusal = match state.broken {
            _ if state.is_stopping => Some(BackendError::ShuttingDown),
            Some(errno) => Some(broken(errno)),
            None => None,
        };
        let Some(why) = refusal else {
            state.jobs.extend(jobs);
            return self.wake(&mut state);
        };
        drop(state);
        jobs.into_iter().for_each(|job| job.tracked.finish(Err(why.clone())));
    }

    pub(super) fn adopt(&self, memory: SharedMemory) {
        let mut state = self.lock();
        state.memory = Some(memory);
        self.wake(&mut state);
    }

    /// What there is for the driver: at most `limit` jobs. If nothing is left
    /// behind, the bell is rung for what comes next.
    pub(super) fn take(&self, limit: usize, now: Instant) -> Delivery {
        let mut state = self.lock();
        let (mut jobs, mut late) = (Vec::new(), Vec::new());
        while let Some(job) = state.jobs.front() {
            let is_late = now >= job.tracked.deadline;
            if !is_late && jobs.len() == limit {
                break;
            }
            let to = if is_late { &mut late } else { &mut jobs };
            to.extend(state.jobs.pop_front());
        }
        state.is_asleep = true;
        Delivery {
            jobs,
            late,
            memory: state.memory.take(),
            is_stopping: state.is_stopping,
            next_deadline: state.jobs.front().map(|job| job.tracked.deadline),
        }
    }

    /// Refuses everything that the driver has not taken, and all that comes.
    pub(super) fn stop(&self) {
        let refused = {
            let mut state = self.lock();
            state.is_stopping = true;
            self.wake(&mut state);
            std::mem::take(&mut state.jobs)
        };
        let refuse = |job: Job| job.tracked.finish(Err(BackendError::ShuttingDown));
        refused.into_iter().for_each(refuse);
    }

    /// The ring has failed: nothing more can be read.
    pub(super) fn break_down(&self, errno: i32) {
        let refused = {
            let mut state = self.lock();
            state.broken = Some(errno);
            std::mem::take(&mut state.jobs)
        };
        refused.into_iter().for_each(|job| job.tracked.finish(Err(broken(errno))));
    }

    /// The driver's last word.
    pub(super) fn leave(&self) {
        self.lock().is_gone = true;
        self.gone.notify_all();
    }

    pub(super) fn wait_gone(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let is_here = |state: &mut State| !state.is_gone;
        let waited = self.gone.wait_timeout_while(self.lock(), left, is_here);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_gone
    }

    pub(super) fn wait_idle(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let is_busy = |outstanding: &mut usize| *outstanding > 0;
        let waited = self.counts.idle.wait_timeout_while(self.counts.lock(), left, is_busy);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
    }
}

fn broken(errno: i32) -> BackendError {
    BackendError::Io { operation: "io_uring_enter", path: "io_uring".into(), errno }
}
