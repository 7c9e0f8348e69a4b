//! The worker's end: it is asked, answers, streams, and beats.

use core::fmt;

use crate::channel::input::InputReader;
use crate::channel::producer::ByteProducer;
use crate::channel::ring::{Parts, WildIndex};
use crate::channel::sleep::{Bell, Mode};
use crate::channel::status::{IllegalStatus, MoveError, Status, StatusWord, WaitError};
use crate::sync::Ordering;

/// Why the worker's end was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WorkerAttachError {
    /// The ring's indices contradict each other.
    Wild(WildIndex),
    /// Another worker has had this epoch; the engine has to begin a new one.
    EpochUsed(u32),
}

impl fmt::Display for WorkerAttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wild(error) => error.fmt(f),
            Self::EpochUsed(epoch) => {
                write!(f, "epoch {epoch} has had its worker; the engine must begin a new one")
            }
        }
    }
}
impl core::error::Error for WorkerAttachError {}

/// The worker's end of a channel. Its three parts may go to three threads.
pub struct WorkerEnd<'m, H> {
    /// Looking at the status, and moving it.
    pub status: WorkerStatus<'m, H>,
    /// What it is asked for.
    pub input: InputReader<'m, H>,
    /// Its stream.
    pub output: ByteProducer<'m, H>,
}

/// What the worker may do with the status; any number of copies.
pub struct WorkerStatus<'m, H> {
    word: StatusWord<'m, H>,
    epoch: u32,
}

impl<H: Clone> Clone for WorkerStatus<'_, H> {
    fn clone(&self) -> Self {
        Self { word: self.word.clone(), epoch: self.epoch }
    }
}

impl<'m, H: Bell> WorkerEnd<'m, H> {
    /// Takes the worker's end, in the channel's current epoch.
    ///
    /// # Safety
    /// There is no other worker's end of this channel, in whatever process.
    ///
    /// # Errors
    /// See [`WorkerAttachError`].
    pub unsafe fn attach(
        parts: Parts<'m>,
        host: H,
        mode: Mode,
        spins: u32,
    ) -> Result<Self, WorkerAttachError> {
        let header = parts.header;
        let peer = header.engine_mode.load(Ordering::Acquire);
        let epoch = header.epoch.load(Ordering::Acquire);
        if header.attached.load(Ordering::Acquire) == epoch {
            return Err(WorkerAttachError::EpochUsed(epoch));
        }
        let word = StatusWord { header, host: host.clone(), spins };
        // SAFETY: the caller's promise.
        let output = unsafe { ByteProducer::new(parts.output, host, mode, peer, spins) }
            .map_err(WorkerAttachError::Wild)?;
        header.worker_mode.store(mode.code(), Ordering::Relaxed);
        // SYNC(channel.attached): Release; pairs with the Acquire load in
        // `EngineStatus::is_attached`: the mode is there.
        header.attached.store(epoch, Ordering::Release);
        word.host.wake_all(&header.attached);
        Ok(Self {
            status: WorkerStatus { word: word.clone(), epoch },
            input: InputReader::new(parts, word),
            output,
        })
    }
}

impl<H: Bell> WorkerStatus<'_, H> {
    /// What the channel's status is.
    ///
    /// # Errors
    /// [`IllegalStatus`].
    #[inline]
    pub fn get(&self) -> Result<Status, IllegalStatus> {
        self.word.load()
    }

    /// Waits until the status is not `seen`.
    ///
    /// # Errors
    /// See [`WaitError`].
    pub fn wait_while(&self, seen: Status, deadline_ns: u64) -> Result<Status, WaitError> {
        self.word.wait_while(seen, deadline_ns)
    }

    /// The epoch it attached in.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Says that the worker goes forward.
    #[inline]
    pub fn beat(&self) {
        let heartbeat = &self.word.header.heartbeat;
        // Relaxed: it publishes nothing; that it changes is the message.
        heartbeat.fetch_add(1, Ordering::Relaxed);
    }

    /// The weights are there: LoadWeights -> Idle.
    ///
    /// # Errors
    /// See [`MoveError`]; the engine may have interrupted.
    pub fn loaded(&self) -> Result<(), MoveError> {
        self.word.exchange(Status::LoadWeights, Status::Idle)
    }

    /// The device's memory was given back: UnloadWeights -> Idle.
    ///
    /// # Errors
    /// See [`MoveError`].
    pub fn unloaded(&self) -> Result<(), MoveError> {
        self.word.exchange(Status::UnloadWeights, Status::Idle)
    }

    /// The stream begins: ExecInfer -> Streaming.
    ///
    /// # Errors
    /// See [`MoveError`]; the engine may have interrupted.
    pub fn stream(&self) -> Result<(), MoveError> {
        self.word.exchange(Status::ExecInfer, Status::Streaming)
    }

    /// The message was taken and another may come: ExecInfer or Streaming ->
    /// ReqData.
    ///
    /// # Errors
    /// See [`MoveError`]; the engine may have interrupted.
    pub fn request_data(&self) -> Result<(), MoveError> {
        self.word.advance(Status::ReqData, Status::worker_may).map(drop)
    }

    /// Through with it: ExecInfer or Streaming -> Done.
    ///
    /// # Errors
    /// See [`MoveError`]; the engine may have interrupted.
    pub fn finish(&self) -> Result<(), MoveError> {
        self.word.advance(Status::Done, Status::worker_may).map(drop)
    }

    /// Everything that was under way has stopped: Interrupt -> Idle.
    ///
    /// # Errors
    /// See [`MoveError`].
    pub fn interrupted(&self) -> Result<(), MoveError> {
        self.word.exchange(Status::Interrupt, Status::Idle)
    }

    /// Failed, from wherever the worker may: `code` is there first.
    ///
    /// # Errors
    /// See [`MoveError`].
    pub fn fail(&self, code: u32) -> Result<(), MoveError> {
        // Released by the exchange that follows.
        self.word.header.error_code.store(code, Ordering::Release);
        self.word.advance(Status::Error, Status::worker_may).map(drop)
    }
}
