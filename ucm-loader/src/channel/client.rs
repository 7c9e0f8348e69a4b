//! One worker process behind its channel, from the engine's side.

use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ucm_core::channel::frame::HEADER_BYTES;
use ucm_core::channel::layout::MAX_INPUT_BYTES;
use ucm_core::channel::{FrameHeader, IllegalStatus, InputError, Kind, Parameters, Status};
use ucm_posix::channel::{EngineInput, Spins};
use ucm_posix::{ChannelOpenError, EngineChannel, SegmentId, ShmDir, monotonic_ns};

use crate::channel::reader::{Heard, Reader, Waiting};
use crate::rank::protocol::{Command, Setup};
use crate::rank::wire::{WireError, encode_command};

/// How long a worker may take from its start to its attaching.
const ATTACH_PATIENCE: Duration = Duration::from_secs(60);
/// A wait looks this often whether the worker lives.
const SLICE: Duration = Duration::from_millis(50);
/// How long a worker may take to leave once its engine has gone.
const LEAVE_PATIENCE: Duration = Duration::from_secs(5);

/// Why a worker could not do something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The channel.
    #[error(transparent)]
    Open(#[from] ChannelOpenError),
    /// The process could not be started.
    #[error("a worker could not be started: {0}")]
    Spawn(#[from] std::io::Error),
    /// It is dead.
    #[error("the worker has died")]
    Dead,
    /// It is alive and did not do it in time.
    #[error("the worker was {status:?} for {waited_ms} ms")]
    Slow {
        /// What it was doing.
        status: Status,
        /// For how long that was looked at.
        waited_ms: u64,
    },
    /// The input refused a message.
    #[error(transparent)]
    Input(InputError),
    /// The channel's status is none.
    #[error(transparent)]
    Illegal(IllegalStatus),
    /// A command that has no frame.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The worker is not in a state in which this can be done.
    #[error("the worker is {0:?}")]
    Status(Status),
}

/// How a dead worker was replaced.
#[derive(Clone, Copy, Debug)]
pub struct Restarted {
    /// The new epoch.
    pub epoch: u32,
    /// From the call to the new worker's attaching.
    pub took: Duration,
}

/// What a request waits on: tokens, if it streams, then its outcome. It ends
/// without one when the worker dies.
pub type Answers = Receiver<Heard>;

/// A worker process and its channel.
pub struct Worker {
    channel: EngineChannel,
    input: Mutex<EngineInput>,
    waiting: Arc<Waiting>,
    child: Mutex<Child>,
    reader: Mutex<Option<JoinHandle<Reader>>>,
    stop: Arc<AtomicBool>,
    next_tag: AtomicU64,
    start: StartWith,
}

struct StartWith {
    program: PathBuf,
    dir: ShmDir,
    id: SegmentId,
}

impl StartWith {
    fn spawn(&self) -> std::io::Result<Child> {
        Process::new(&self.program)
            .args(["rank", "--channel", self.id.as_str(), "--shm-dir"])
            .arg(&self.dir.path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
    }
}

/// A name for a channel that no other process of this machine uses.
pub(crate) fn channel_id(label: &str) -> Result<SegmentId, ucm_posix::SegmentError> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    SegmentId::new(&format!("{label}-{}-{number}", std::process::id()))
}

impl Worker {
    /// Makes the channel `id` in `dir` and starts `program` (this one, `ucm`)
    /// as its worker. It need not have attached when this returns.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn start(program: &Path, dir: &ShmDir, id: &SegmentId) -> Result<Self, ClientError> {
        let (channel, input, output) = EngineChannel::create(dir, id, Spins::default())?;
        let start = StartWith { program: program.to_owned(), dir: dir.clone(), id: id.clone() };
        let child = Mutex::new(start.spawn()?);
        let waiting = Arc::<Waiting>::default();
        let stop = Arc::new(AtomicBool::new(false));
        let worker = Self {
            channel: channel.clone(),
            input: Mutex::new(input),
            waiting: Arc::clone(&waiting),
            child,
            reader: Mutex::new(None),
            stop: Arc::clone(&stop),
            next_tag: AtomicU64::new(1),
            start,
        };
        let reader = Reader::new(output, channel, waiting, stop);
        *lock(&worker.reader) = Some(read(reader, &worker.start)?);
        Ok(worker)
    }

    /// The channel: its status, and whether the worker lives.
    pub fn channel(&self) -> &EngineChannel {
        &self.channel
    }

    /// The process's id.
    pub fn pid(&self) -> u32 {
        lock(&self.child).id()
    }

    fn wait_attached(&self) -> Result<(), ClientError> {
        let began = Instant::now();
        while !self.channel.status().wait_attached(monotonic_ns() + slice_ns()) {
            // Before it attaches it holds no byte: only the process tells.
            if lock(&self.child).try_wait()?.is_some() {
                return Err(ClientError::Dead);
            }
            if began.elapsed() >= ATTACH_PATIENCE {
                return Err(self.slow(Status::Idle, began));
            }
        }
        Ok(())
    }

    fn slow(&self, status: Status, began: Instant) -> ClientError {
        ClientError::Slow { status, waited_ms: began.elapsed().as_millis() as u64 }
    }

    /// Sends a command; several may be under way at a time.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn send(
        &self,
        command: &Command,
        seed: u64,
        patience: Duration,
    ) -> Result<Answers, ClientError> {
        let (kind, payload) = encode_command(command, seed)?;
        let tag = self.next_tag.fetch_add(1, Ordering::Relaxed);
        let (tell, answers) = channel();
        self.waiting.lock().insert(tag, tell);
        let sent = self.deliver(kind, tag, &payload, patience);
        // The reader may have ended before the request was listed.
        if sent.is_err() || lock(&self.reader).as_ref().is_none_or(JoinHandle::is_finished) {
            self.waiting.lock().remove(&tag);
        }
        sent.map(|()| answers)
    }

    fn deliver(
        &self,
        kind: Kind,
        tag: u64,
        payload: &[u8],
        patience: Duration,
    ) -> Result<(), ClientError> {
        let mut input = lock(&self.input);
        let pieces = payload.chunks(MAX_INPUT_BYTES - HEADER_BYTES);
        let count = pieces.len().max(1);
        let pieces = pieces.chain(payload.is_empty().then_some(&[][..]));
        for (number, piece) in pieces.enumerate() {
            let header = FrameHeader::new(kind, tag, piece.len(), number + 1 < count);
            let message = [bytemuck::bytes_of(&header), piece].concat();
            self.await_mine(patience)?;
            let sent = match kind {
                Kind::Setup => input.load_weights(&message),
                _ => input.execute(&message),
            };
            sent.map_err(ClientError::Input)?;
        }
        Ok(())
    }

    /// Waits until the input is the engine's.
    fn await_mine(&self, patience: Duration) -> Result<(), ClientError> {
        let began = Instant::now();
        loop {
            match self.channel.status().get().map_err(ClientError::Illegal)? {
                Status::Idle | Status::ReqData => return Ok(()),
                Status::Done | Status::Error => {
                    // Somebody else of ours may be quicker: it is Idle then, too.
                    let _moved = self.channel.status().acknowledge();
                }
                status => self.wait_change(status, began, patience)?,
            }
        }
    }

    /// Waits until the worker is not in `status` any more, or not any more.
    fn wait_change(
        &self,
        status: Status,
        began: Instant,
        patience: Duration,
    ) -> Result<(), ClientError> {
        if self.channel.status().wait_while(status, monotonic_ns() + slice_ns()).is_err() {
            if self.channel.status().is_attached() {
                if !self.channel.is_worker_alive() {
                    return Err(ClientError::Dead);
                }
            } else if lock(&self.child).try_wait()?.is_some() {
                return Err(ClientError::Dead);
            }
            if began.elapsed() >= patience {
                return Err(self.slow(status, began));
            }
        }
        Ok(())
    }

    /// Has it load weights, once it has attached: for a rank, start its engine.
    /// The answer says whether that went well.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn load_weights(&self, setup: &Setup, patience: Duration) -> Result<Answers, ClientError> {
        self.wait_attached()?;
        let payload = serde_json::to_vec(setup).map_err(WireError::from)?;
        let tag = self.next_tag.fetch_add(1, Ordering::Relaxed);
        let (tell, answers) = channel();
        self.waiting.lock().insert(tag, tell);
        self.rest(patience)?;
        self.deliver(Kind::Setup, tag, &payload, patience)?;
        Ok(answers)
    }

    /// Sets what counts beside the next command.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn set_parameters(&self, parameters: &Parameters) -> Result<(), ClientError> {
        lock(&self.input).set_parameters(parameters).map_err(ClientError::Input)
    }

    /// Stops what is under way. Says how long the worker took to answer.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Status`] when there is nothing to
    /// interrupt.
    pub fn interrupt(&self, patience: Duration) -> Result<Duration, ClientError> {
        let began = Instant::now();
        if self.channel.status().interrupt().is_err() {
            let status = self.channel.status().get().map_err(ClientError::Illegal)?;
            return Err(ClientError::Status(status));
        }
        while self.channel.status().get().map_err(ClientError::Illegal)? == Status::Interrupt {
            self.wait_change(Status::Interrupt, began, patience)?;
        }
        Ok(began.elapsed())
    }

    /// Brings it to Idle, from wherever it is; stops what is under way.
    fn rest(&self, patience: Duration) -> Result<(), ClientError> {
        let began = Instant::now();
        loop {
            match self.channel.status().get().map_err(ClientError::Illegal)? {
                Status::Idle => return Ok(()),
                Status::Done | Status::Error => {
                    let _moved = self.channel.status().acknowledge();
                }
                status @ (Status::Interrupt | Status::UnloadWeights) => {
                    self.wait_change(status, began, patience)?;
                }
                _ => {
                    // It may have moved on by itself: looked at again above.
                    let _moved = self.channel.status().interrupt();
                }
            }
        }
    }

    /// Has it give its device's memory back, and keep its process; stops what
    /// is under way. Says how long that took.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn unload_weights(&self, patience: Duration) -> Result<Duration, ClientError> {
        let began = Instant::now();
        self.rest(patience)?;
        if self.channel.status().unload_weights().is_err() {
            let status = self.channel.status().get().map_err(ClientError::Illegal)?;
            return Err(ClientError::Status(status));
        }
        while self.channel.status().get().map_err(ClientError::Illegal)? == Status::UnloadWeights {
            self.wait_change(Status::UnloadWeights, began, patience)?;
        }
        Ok(began.elapsed())
    }

    /// Puts a new process in the place of one that has died, on the same
    /// channel. What the dead one has published has been delivered before.
    ///
    /// # Errors
    /// [`ClientError::Open`] while it lives; see [`ClientError`].
    pub fn restart(&self) -> Result<Restarted, ClientError> {
        let began = Instant::now();
        let mut place = lock(&self.reader);
        let Some(thread) = place.take() else { return Err(ClientError::Dead) };
        if self.channel.is_worker_alive() {
            let path = self.channel.path().to_owned();
            *place = Some(thread);
            return Err(ChannelOpenError::WorkerAlive { path }.into());
        }
        // It sees the death within a slice, reads to the end, and ends.
        let Ok(mut reader) = thread.join() else { return Err(ClientError::Dead) };
        let epoch = reader.output.begin_epoch()?;
        reader.drain();
        let _reaped = lock(&self.child).wait();
        *lock(&self.child) = self.start.spawn()?;
        *place = Some(read(reader, &self.start)?);
        drop(place);
        self.wait_attached()?;
        Ok(Restarted { epoch, took: began.elapsed() })
    }
}

/// Starts a reader. It begins to count on the worker being alive once that has
/// attached.
fn read(mut reader: Reader, start: &StartWith) -> std::io::Result<JoinHandle<Reader>> {
    let name = format!("ucm_read_{}", start.id);
    std::thread::Builder::new().name(name).spawn(move || {
        let deadline = Instant::now() + ATTACH_PATIENCE;
        while !reader.stop.load(Ordering::Acquire)
            && !reader.channel.status().wait_attached(monotonic_ns() + slice_ns())
        {
            if Instant::now() >= deadline {
                break;
            }
        }
        reader.output.learn_peer();
        reader.run()
    })
}

fn slice_ns() -> u64 {
    SLICE.as_nanos() as u64
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(reader) = lock(&self.reader).take() {
            let _panicked = reader.join();
        }
        // Killed when it does not leave by itself; one that was told to stop
        // has left or is leaving.
        let mut child = lock(&self.child);
        if self.channel.status().get() != Ok(Status::Done) {
            let _gone = child.kill();
        }
        let deadline = Instant::now() + LEAVE_PATIENCE;
        while let Ok(None) = child.try_wait() {
            if Instant::now() >= deadline {
                let _gone = child.kill();
                let _reaped = child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
