//! Reads through io_uring: a bounded inbox, threads that open files, one that drives the ring.
//!
//! A request whose block is open goes straight to the [`driver`]; one whose
//! block is not is first given to a thread that opens and checks the file, so
//! that an `open` that hangs holds up its own requests and no others.

mod driver;
mod inbox;
mod memory;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ucm_core::key::BlockId;

use self::driver::Driver;
use self::inbox::{Inbox, Job, Tracked};
use super::FileStore;
use super::open_block::OpenBlock;
use crate::backend::pool::Pool;
use crate::backend::threaded::Threads;
use crate::backend::traits::{BackendError, LoadRequest, OpenError, SharedMemory};

/// Threads that open and check files; a few keep a ring busy.
const MAX_OPENERS: usize = 4;
/// How long setting up a ring may take.
const SETUP_PATIENCE: Duration = Duration::from_secs(10);
/// How long a dropped engine waits for the reads that are under way.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// Requests of one block that is not open yet.
type Unopened = (BlockId, Vec<Tracked>);

/// The engine.
pub(super) struct Uring {
    store: Arc<FileStore>,
    inbox: Arc<Inbox>,
    openers: Pool<Unopened>,
    driver: Mutex<Option<JoinHandle<()>>>,
    timeout: Duration,
}

impl Uring {
    /// Sets up a ring and starts its threads.
    pub(super) fn start(
        store: Arc<FileStore>,
        threads: Threads,
        timeout: Duration,
    ) -> Result<Self, OpenError> {
        let no_thread = |error: std::io::Error| OpenError::NoThread {
            errno: error.raw_os_error().unwrap_or(0),
        };
        let inbox = Arc::new(Inbox::new(threads.queue_depth)?);
        // The ring is made by the thread that submits to it: the kernel then
        // knows that there is only one.
        let (tell, told) = mpsc::sync_channel(1);
        let (its_store, its_inbox) = (Arc::clone(&store), Arc::clone(&inbox));
        let driver = thread::Builder::new()
            .name("ucm_uring".to_owned())
            .spawn(move || match Driver::new(its_store, its_inbox) {
                Ok(driver) => {
                    let _starter_is_gone = tell.send(Ok(()));
                    driver.run();
                }
                Err(error) => {
                    let _starter_is_gone = tell.send(Err(error));
                }
            })
            .map_err(no_thread)?;
        match told.recv_timeout(SETUP_PATIENCE) {
            Ok(made) => made?,
            Err(_) => return Err(OpenError::NoUring { errno: libc::ETIMEDOUT }),
        }
        let openers = threads.load_workers.clamp(1, MAX_OPENERS);
        let (its_store, its_inbox) = (Arc::clone(&store), Arc::clone(&inbox));
        let open = move |group: Unopened| open_block(&its_store, &its_inbox, group);
        let openers = Pool::new(openers, threads.queue_depth, open).map_err(no_thread)?;
        Ok(Self { store, inbox, openers, driver: Mutex::new(Some(driver)), timeout })
    }

    /// See [`Backend::submit`](crate::backend::Backend::submit).
    pub(super) fn submit(&self, batch: Vec<LoadRequest>) {
        let deadline = Instant::now() + self.timeout;
        let mut ready = Vec::new();
        let mut unopened: Vec<Unopened> = Vec::new();
        for tracked in self.inbox.admit(batch, deadline) {
            let key = tracked.key();
            if let Err(error) = self.store.check_shard(key) {
                tracked.finish(Err(error));
                continue;
            }
            match self.store.reader.peek(&key.block) {
                Some(Ok(block)) => ready.extend(plan(&self.store, &block, tracked)),
                Some(Err(error)) => tracked.finish(Err(error)),
                None => match unopened.iter_mut().find(|(block, _)| *block == key.block) {
                    Some((_, group)) => group.push(tracked),
                    None => unopened.push((key.block, vec![tracked])),
                },
            }
        }
        self.inbox.deliver(ready);
        // The queue is as deep as the inbox, so only a stop refuses.
        if let Err(rejected) = self.openers.push(unopened) {
            let requests = rejected.jobs.into_iter().flat_map(|(_, group)| group);
            requests.for_each(|request| request.finish(Err(BackendError::ShuttingDown)));
        }
    }

    pub(super) fn adopt_memory(&self, memory: SharedMemory) {
        self.inbox.adopt(memory);
    }

    /// Waits until every request has been answered; `false` at the deadline.
    pub(super) fn wait_idle(&self, deadline: Instant) -> bool {
        self.inbox.wait_idle(deadline)
    }

    /// Refuses what the kernel has not got, waits for the rest. `false` when
    /// some of it is still there at the deadline: the driver keeps it.
    pub(super) fn stop(&self, deadline: Instant) -> bool {
        self.inbox.stop();
        let are_closed = self.openers.stop(deadline);
        let has_ended = self.inbox.wait_gone(deadline);
        if has_ended {
            let mut driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
            let me = thread::current().id();
            if let Some(driver) = driver.take().filter(|driver| driver.thread().id() != me)
                && driver.join().is_err()
            {
                tracing::error!("the io_uring thread panicked");
            }
        }
        are_closed && has_ended
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        if !self.stop(Instant::now() + DROP_PATIENCE) {
            tracing::warn!("reads are still under way; their thread is left to end on its own");
        }
    }
}

/// What a request is to the ring; answers it if nothing has to be read.
fn plan(store: &FileStore, block: &Arc<OpenBlock>, tracked: Tracked) -> Option<Job> {
    let key = tracked.key();
    let (_, room) = tracked.request().target();
    match store.reader.entry(key, block, room as u64) {
        Err(error) => {
            tracked.finish(Err(error));
            None
        }
        Ok(entry) => Some(Job { tracked, block: Arc::clone(block), entry }),
    }
}

/// Opens and checks a block's file and passes its requests on.
fn open_block(store: &FileStore, inbox: &Inbox, (_, group): Unopened) {
    let mut ready = Vec::with_capacity(group.len());
    for tracked in group {
        if tracked.is_late() {
            // Nothing was asked of the kernel for it.
            tracked.finish(Err(BackendError::TimedOut));
            continue;
        }
        // After the first of the group this is a look at what is open.
        match store.reader.block(tracked.key()) {
            Ok(block) => ready.extend(plan(store, &block, tracked)),
            Err(error) => tracked.finish(Err(error)),
        }
    }
    inbox.deliver(ready);
}
