//! The one thread that drives a ring: queues reads, enters them together, takes completions.
//!
//! A buffer belongs to the kernel from the entering of its read until that
//! read's completion. So a request is answered by a completion and by nothing
//! else: one that is late is cancelled, and answered when the kernel says
//! that it is done with it, one way or the other. If the driver should end
//! with reads under way, their requests are leaked on purpose.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use super::super::FileStore;
use super::super::open_block::is_refusal;
use super::super::store::io_error;
use super::inbox::{Delivery, Inbox, Job};
use super::memory::Registered;
use crate::backend::traits::{BackendError, OpenError};

/// Reads that are with the kernel at a time.
const FLIGHTS: usize = 64;
/// Each read may need a cancellation beside it, and there is the bell.
const RING_ENTRIES: u32 = 256;
const _: () = assert!(2 * FLIGHTS < RING_ENTRIES as usize);
/// The most that one read asks for.
const MAX_READ_BYTES: usize = 1 << 30;

const BELL: u64 = u64::MAX;
const CANCEL: u64 = u64::MAX - 1;
/// The number of a flight, in the low bits of what names its read.
const NUMBER_BITS: u32 = 16;

/// A job that is under way.
struct Flight {
    job: Job,
    got: usize,
    /// The number of its latest read: a cancellation means that one only.
    read: u64,
    /// The kernel may write to the buffer.
    is_in_kernel: bool,
    is_cancelled: bool,
    /// The latest read was direct.
    is_direct: bool,
    /// A direct read was refused.
    is_plain_only: bool,
}

/// Flights by number. What is with the kernel when they go is never answered.
struct Flights(Vec<Option<Flight>>);

impl Drop for Flights {
    fn drop(&mut self) {
        for flight in self.0.drain(..).flatten() {
            if flight.is_in_kernel {
                std::mem::forget(flight);
            }
        }
    }
}

/// The thread's state. The ring goes before the memory it knows of.
pub(super) struct Driver {
    ring: IoUring,
    memory: Registered,
    store: Arc<FileStore>,
    inbox: Arc<Inbox>,
    flights: Flights,
    free: Vec<usize>,
    to_enter: VecDeque<usize>,
    next_read: u64,
    is_bell_armed: bool,
}

impl Driver {
    /// Makes a ring, to be driven by the calling thread.
    pub(super) fn new(store: Arc<FileStore>, inbox: Arc<Inbox>) -> Result<Self, OpenError> {
        let ring = build_ring()?;
        Ok(Self {
            ring,
            memory: Registered::default(),
            store,
            inbox,
            flights: Flights((0..FLIGHTS).map(|_| None).collect()),
            free: (0..FLIGHTS).rev().collect(),
            to_enter: VecDeque::with_capacity(FLIGHTS),
            next_read: 0,
            is_bell_armed: false,
        })
    }

    /// Runs until the inbox says stop and nothing is under way.
    pub(super) fn run(mut self) {
        let inbox = Arc::clone(&self.inbox);
        loop {
            let now = Instant::now();
            let Delivery { jobs, late, memory, is_stopping, next_deadline } =
                inbox.take(self.free.len(), now);
            if let Some(memory) = memory {
                self.memory.register(&self.ring, memory);
            }
            // The kernel never had them.
            late.into_iter().for_each(|job| job.tracked.finish(Err(BackendError::TimedOut)));
            jobs.into_iter().for_each(|job| self.begin(job));
            if is_stopping && self.free.len() == FLIGHTS {
                break;
            }
            self.queue();
            let deadline = self.cancel_late(now).into_iter().chain(next_deadline).min();
            if let Err(errno) = self.enter(deadline) {
                tracing::error!(errno, "io_uring failed; the backend reads nothing more");
                inbox.break_down(errno);
                break;
            }
            self.reap();
        }
        drop(self);
        inbox.leave();
    }

    fn begin(&mut self, job: Job) {
        if job.entry.len_bytes == 0 {
            return self.conclude(job, 0);
        }
        let Some(number) = self.free.pop() else {
            // `take` was given the number of free ones.
            return job.tracked.finish(Err(BackendError::Abandoned));
        };
        self.flights.0[number] = Some(Flight {
            job,
            got: 0,
            read: 0,
            is_in_kernel: false,
            is_cancelled: false,
            is_direct: false,
            is_plain_only: false,
        });
        self.to_enter.push_back(number);
    }

    /// Queues what is to be entered.
    fn queue(&mut self) {
        if !self.is_bell_armed {
            let bell = Fd(self.inbox.bell().as_raw_fd());
            let entry = opcode::PollAdd::new(bell, libc::POLLIN as u32).build().user_data(BELL);
            self.is_bell_armed = push(&mut self.ring, &entry);
        }
        while let Some(number) = self.to_enter.pop_front() {
            let entry = self.read_of(number);
            if !entry.is_some_and(|entry| push(&mut self.ring, &entry)) {
                self.to_enter.push_front(number);
                return;
            }
            if let Some(flight) = &mut self.flights.0[number] {
                flight.is_in_kernel = true;
            }
        }
    }

    /// The next read of a flight.
    fn read_of(&mut self, number: usize) -> Option<squeue::Entry> {
        let flight = self.flights.0[number].as_mut()?;
        let Flight { job, got, .. } = flight;
        let key = job.tracked.key();
        let (start, _) = job.tracked.request().target();
        let target = start.wrapping_add(*got);
        let offset = self.store.shard_offset(key.shard) + *got as u64;
        let left = job.entry.len_bytes as usize - *got;
        let step = job.block.step(target as usize, offset, left, !flight.is_plain_only);
        let len_bytes = step.len_bytes.min(MAX_READ_BYTES);
        flight.is_direct = step.is_direct;
        self.next_read += 1;
        flight.read = self.next_read << NUMBER_BITS | number as u64;
        let (fd, len) = (Fd(step.file.as_raw_fd()), len_bytes as u32);
        let entry = match self.memory.buffer_of(target as usize, len_bytes) {
            Some(buffer) => opcode::ReadFixed::new(fd, target, len, buffer).offset(offset).build(),
            None => opcode::Read::new(fd, target, len).offset(offset).build(),
        };
        Some(entry.user_data(flight.read))
    }

    /// Asks the kernel to give up what is late; returns the next deadline.
    fn cancel_late(&mut self, now: Instant) -> Option<Instant> {
        let mut next = None;
        for flight in self.flights.0.iter_mut().flatten() {
            if flight.is_cancelled {
                continue;
            }
            let deadline = flight.job.tracked.deadline();
            if now < deadline {
                next = next.into_iter().chain([deadline]).min();
                continue;
            }
            let cancel = opcode::AsyncCancel::new(flight.read).build().user_data(CANCEL);
            flight.is_cancelled = push(&mut self.ring, &cancel);
        }
        next
    }

    /// Enters what is queued and waits for a completion or `deadline`.
    fn enter(&mut self, deadline: Option<Instant>) -> Result<(), i32> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.map(Timespec::from);
        let args = timeout.as_ref().map_or(SubmitArgs::new(), |t| SubmitArgs::new().timespec(t));
        let Err(error) = self.ring.submitter().submit_with_args(1, &args) else { return Ok(()) };
        match error.raw_os_error().unwrap_or(libc::EIO) {
            // Completions must be taken before more can be entered.
            libc::ETIME | libc::EINTR | libc::EBUSY => Ok(()),
            libc::EAGAIN => {
                // The kernel is short of memory for the moment.
                std::thread::sleep(Duration::from_millis(1));
                Ok(())
            }
            errno => Err(errno),
        }
    }

    fn reap(&mut self) {
        let done: Vec<_> =
            self.ring.completion().map(|done| (done.user_data(), done.result())).collect();
        for (name, result) in done {
            match name {
                BELL => {
                    self.is_bell_armed = false;
                    let mut count = [0; 8];
                    // EAGAIN: it was heard already.
                    let _heard = rustix::io::read(self.inbox.bell(), &mut count);
                }
                CANCEL => {}
                name => self.landed(name, result),
            }
        }
    }

    /// A read has ended: the kernel is done with its buffer.
    fn landed(&mut self, name: u64, result: i32) {
        let number = (name & ((1 << NUMBER_BITS) - 1)) as usize;
        let Some(Some(flight)) = self.flights.0.get_mut(number) else { return };
        flight.is_in_kernel = false;
        let is_late = flight.is_cancelled || flight.job.tracked.is_late();
        let path = || self.store.block_path(&flight.job.tracked.key().block);
        let ended = match result {
            more if more > 0 => {
                flight.got += more as usize;
                let is_whole = flight.got as u64 >= flight.job.entry.len_bytes;
                if is_whole { Some(Ok(())) } else { None }
            }
            0 => Some(Ok(())),
            error => match -error {
                libc::EINTR | libc::EAGAIN | libc::ECANCELED => None,
                errno if flight.is_direct && is_refusal(Some(errno)) => {
                    let refusal = rustix::io::Errno::from_raw_os_error(errno);
                    self.store.reader.direct.refused(&path(), refusal);
                    flight.is_plain_only = true;
                    None
                }
                errno => {
                    let error = std::io::Error::from_raw_os_error(errno);
                    Some(Err(io_error("io_uring read", &path(), &error)))
                }
            },
        };
        if ended.is_none() && !is_late {
            self.to_enter.push_back(number);
            return;
        }
        let Some(flight) = self.flights.0[number].take() else { return };
        self.free.push(number);
        match ended {
            Some(Ok(())) => self.conclude(flight.job, flight.got),
            Some(Err(error)) => flight.job.tracked.finish(Err(error)),
            None => flight.job.tracked.finish(Err(BackendError::TimedOut)),
        }
    }

    fn conclude(&self, job: Job, got: usize) {
        let Job { mut tracked, block, entry } = job;
        let key = tracked.key();
        let target = &tracked.buffer()[..entry.len_bytes as usize];
        let result = self.store.reader.conclude(key, &block, entry, got as u64, target);
        tracked.finish(result);
    }
}

/// Queues one entry; `false` if the queue is full until the next entering.
fn push(ring: &mut IoUring, entry: &squeue::Entry) -> bool {
    // SAFETY: a read's buffer is its request's, which is answered (or leaked)
    // only after the completion, and its file is open as long as the flight
    // holds the block; the bell lives in the inbox, and polling it or
    // cancelling a read refers to no memory at all.
    unsafe { ring.submission().push(entry) }.is_ok()
}

fn build_ring() -> Result<IoUring, OpenError> {
    let refused = |error: std::io::Error| OpenError::NoUring {
        errno: error.raw_os_error().unwrap_or(libc::ENOSYS),
    };
    let mut builder = IoUring::builder();
    builder.dontfork();
    let plain = builder.clone();
    // One thread, which takes completions when it waits for them: cheapest.
    builder.setup_coop_taskrun().setup_single_issuer().setup_defer_taskrun();
    let ring = match builder.build(RING_ENTRIES) {
        // A kernel that does not know these.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => plain.build(RING_ENTRIES),
        built => built,
    }
    .map_err(refused)?;
    // Waiting with a timeout, and completions that are never dropped: 5.11.
    if ring.params().is_feature_ext_arg() && ring.params().is_feature_nodrop() {
        Ok(ring)
    } else {
        Err(OpenError::NoUring { errno: libc::ENOSYS })
    }
}
