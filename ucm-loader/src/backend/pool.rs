//! A fixed set of worker threads behind one bounded queue.
//!
//! Storage calls block, so they run here. Idle workers sleep on a condition
//! variable; a batch is queued under one lock and wakes as many as it has jobs.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a dropped pool waits for the jobs that are running.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// A job that could not be queued, and why.
#[derive(PartialEq, Eq, Debug)]
pub struct Rejected<J> {
    /// The jobs, in their order.
    pub jobs: Vec<J>,
    /// Why.
    pub why: Rejection,
}

/// Why a job could not be queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Rejection {
    /// The queue is full.
    #[error("the queue of {depth} jobs is full")]
    QueueFull {
        /// How many it takes.
        depth: usize,
    },
    /// The pool is being stopped.
    #[error("the pool is stopping")]
    Stopping,
}

struct Queue<J> {
    waiting: VecDeque<J>,
    running: usize,
    live_workers: usize,
    stopping: bool,
}

struct Inner<J> {
    queue: Mutex<Queue<J>>,
    /// Signalled when there is a job or an end.
    work: Condvar,
    /// Signalled when the pool becomes idle or a worker ends.
    idle: Condvar,
    depth: usize,
}

impl<J> Inner<J> {
    fn lock(&self) -> MutexGuard<'_, Queue<J>> {
        // Handlers run outside the lock, so a poisoned queue is still whole.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps on `idle` until `reached`, or returns `false` at the deadline.
    fn wait_until(&self, deadline: Instant, reached: impl Fn(&Queue<J>) -> bool) -> bool {
        let mut queue = self.lock();
        while !reached(&queue) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let woken = self.idle.wait_timeout(queue, left);
            queue = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn work(&self, handler: &(dyn Fn(J) + Send + Sync)) {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.waiting.pop_front() {
                queue.running += 1;
                drop(queue);
                // A panicking handler drops its job, which tells the job's
                // owner; the worker stays for the others.
                if catch_unwind(AssertUnwindSafe(|| handler(job))).is_err() {
                    tracing::error!("a storage worker panicked; its request was abandoned");
                }
                queue = self.lock();
                queue.running -= 1;
                if queue.running == 0 && queue.waiting.is_empty() {
                    self.idle.notify_all();
                }
            } else if queue.stopping {
                queue.live_workers -= 1;
                self.idle.notify_all();
                return;
            } else {
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// The threads and their queue.
pub struct Pool<J: Send + 'static> {
    inner: Arc<Inner<J>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl<J: Send + 'static> Pool<J> {
    /// Starts `workers` threads named `ucm_io_<n>`; the queue before them
    /// takes `depth` jobs. The error is the first thread's that would not start.
    pub fn new(
        workers: usize,
        depth: usize,
        handler: impl Fn(J) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let queue =
            Queue { waiting: VecDeque::new(), running: 0, live_workers: 0, stopping: false };
        let (work, idle) = (Condvar::new(), Condvar::new());
        let inner = Arc::new(Inner { queue: Mutex::new(queue), work, idle, depth });
        let pool = Self { inner, threads: Mutex::new(Vec::new()) };
        let handler: Arc<dyn Fn(J) + Send + Sync> = Arc::new(handler);
        for number in 0..workers {
            let (inner, handler) = (Arc::clone(&pool.inner), Arc::clone(&handler));
            pool.inner.lock().live_workers += 1;
            let started = thread::Builder::new()
                .name(format!("ucm_io_{number}"))
                .spawn(move || inner.work(&*handler));
            match started {
                Ok(thread) => pool.lock_threads().push(thread),
                Err(error) => {
                    pool.inner.lock().live_workers -= 1;
                    return Err(error);
                }
            }
        }
        Ok(pool)
    }

    fn lock_threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues as many of `jobs` as there is room for and hands the rest back.
    pub fn push(&self, jobs: impl IntoIterator<Item = J>) -> Result<(), Rejected<J>> {
        let mut jobs = jobs.into_iter();
        let mut queue = self.inner.lock();
        let why = if queue.stopping {
            Rejection::Stopping
        } else {
            let room = self.inner.depth.saturating_sub(queue.waiting.len());
            let before = queue.waiting.len();
            queue.waiting.extend(jobs.by_ref().take(room));
            for _ in before..queue.waiting.len() {
                self.inner.work.notify_one();
            }
            Rejection::QueueFull { depth: self.inner.depth }
        };
        // The rest is collected without the lock: its iterator is the caller's.
        drop(queue);
        let jobs: Vec<J> = jobs.collect();
        if jobs.is_empty() { Ok(()) } else { Err(Rejected { jobs, why }) }
    }

    /// Waits until nothing is queued or running; `false` at the deadline.
    pub fn wait_idle(&self, deadline: Instant) -> bool {
        self.inner.wait_until(deadline, |queue| queue.running == 0 && queue.waiting.is_empty())
    }

    /// Takes no more jobs, drops the queued ones, and waits for the running
    /// ones and their threads. `false` if one is still running at the
    /// deadline: its thread is left to end on its own.
    pub fn stop(&self, deadline: Instant) -> bool {
        let dropped = {
            let mut queue = self.inner.lock();
            queue.stopping = true;
            std::mem::take(&mut queue.waiting)
        };
        self.inner.work.notify_all();
        // Outside the lock: dropping a job runs its owner's completion.
        drop(dropped);
        if !self.inner.wait_until(deadline, |queue| queue.live_workers == 0) {
            return false;
        }
        let me = thread::current().id();
        for thread in self.lock_threads().drain(..) {
            // A worker may hold the last reference to its own pool.
            if thread.thread().id() != me {
                let _ = thread.join();
            }
        }
        true
    }
}

impl<J: Send + 'static> Drop for Pool<J> {
    fn drop(&mut self) {
        if !self.stop(Instant::now() + DROP_PATIENCE) {
            tracing::warn!("a storage worker is still busy; its thread is left to end on its own");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    type Gate = (mpsc::Receiver<u32>, mpsc::Sender<()>);

    /// A pool whose jobs report that they run and then wait to be let go.
    fn gated(workers: usize, depth: usize) -> (Pool<u32>, Gate) {
        let (began, runs) = mpsc::channel();
        let (go, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let pool = Pool::new(workers, depth, move |job| {
            let _ = began.send(job);
            let _ = gate.lock().unwrap().recv();
        });
        (pool.unwrap(), (runs, go))
    }

    #[test]
    fn jobs_beyond_the_depth_come_back_in_their_order() {
        let (pool, (runs, go)) = gated(1, 2);
        pool.push([1]).unwrap();
        assert_eq!(runs.recv(), Ok(1));
        let rejected = pool.push([2, 3, 4, 5]).unwrap_err();
        let why = Rejection::QueueFull { depth: 2 };
        assert_eq!(rejected, Rejected { jobs: vec![4, 5], why });
        (0..3).for_each(|_| go.send(()).unwrap());
        assert!(pool.wait_idle(soon()));
        assert_eq!(runs.try_iter().collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn as_many_jobs_run_at_once_as_there_are_workers() {
        let (pool, (runs, go)) = gated(3, 8);
        pool.push([1, 2, 3]).unwrap();
        // All three report before any is let go.
        let mut seen: Vec<u32> = runs.iter().take(3).collect();
        seen.sort_unstable();
        assert_eq!(seen, [1, 2, 3]);
        (0..3).for_each(|_| go.send(()).unwrap());
        assert!(pool.wait_idle(soon()));
    }

    #[test]
    fn waiting_for_an_idle_pool_ends_at_the_deadline() {
        let (pool, (runs, go)) = gated(1, 8);
        pool.push([1]).unwrap();
        assert_eq!(runs.recv(), Ok(1));
        assert!(!pool.wait_idle(Instant::now() + Duration::from_millis(10)));
        go.send(()).unwrap();
        assert!(pool.wait_idle(soon()));
    }

    #[test]
    fn stopping_drops_what_is_queued_and_refuses_what_comes() {
        let (dropped, drops) = mpsc::channel();
        #[derive(Debug)]
        struct Job(mpsc::Sender<()>);
        impl Drop for Job {
            fn drop(&mut self) {
                let _ = self.0.send(());
            }
        }
        let (began, runs) = mpsc::channel();
        let (go, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let pool = Pool::new(1, 8, move |_job: Job| {
            let _ = began.send(());
            let _ = gate.lock().unwrap().recv();
        });
        let pool = pool.unwrap();
        pool.push([Job(dropped.clone())]).unwrap();
        runs.recv().unwrap();
        pool.push([Job(dropped.clone()), Job(dropped.clone())]).unwrap();
        assert!(!pool.stop(Instant::now()));
        assert_eq!(drops.try_iter().count(), 2, "the queued ones, not the running one");
        let rejected = pool.push([Job(dropped)]).unwrap_err();
        assert_eq!(rejected.why, Rejection::Stopping);
        go.send(()).unwrap();
        assert!(pool.stop(soon()));
    }

    #[test]
    fn a_panicking_job_does_not_take_its_worker_along() {
        let (sender, receiver) = mpsc::channel();
        let pool = Pool::new(1, 8, move |job: u32| {
            assert_ne!(job, 1, "planted");
            sender.send(job).unwrap();
        });
        let pool = pool.unwrap();
        pool.push([1, 2]).unwrap();
        assert_eq!(receiver.recv(), Ok(2));
        assert!(pool.wait_idle(soon()));
    }

    #[test]
    fn workers_carry_their_names() {
        let (sender, receiver) = mpsc::channel();
        let pool = Pool::new(1, 8, move |(): ()| {
            sender.send(thread::current().name().map(str::to_owned)).unwrap();
        });
        let pool = pool.unwrap();
        pool.push([()]).unwrap();
        assert_eq!(receiver.recv().unwrap().as_deref(), Some("ucm_io_0"));
    }
}
