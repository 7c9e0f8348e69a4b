//! The worker's end of a channel file.

use std::sync::Arc;
use std::time::Duration;

use ucm_core::channel::{
    ByteProducer, InputError, InputReader, Kind, Mode as SleepMode, Parameters, WildIndex,
    WorkerEnd, WorkerStatus, WriteError,
};

use crate::channel::error::ChannelOpenError;
use crate::channel::link::{ENGINE_BYTE, FILE_BYTES, Link, Spins, WORKER_BYTE, open, path};
use crate::error::LockError;
use crate::futex::waiter::SystemWaiter;
use crate::liveness::Mode;
use crate::mapping::Mapping;
use crate::names::SegmentId;
use crate::shm::{ShmDir, stat_fd};

/// How long the engine may hold the byte while it begins an epoch.
const ATTACH_PATIENCE: Duration = Duration::from_millis(500);

/// A channel as its worker sees it: status, and whether there is an engine.
#[derive(Clone)]
pub struct WorkerChannel {
    // Before `link`, which keeps the memory that it borrows.
    status: WorkerStatus<'static, SystemWaiter>,
    link: Arc<Link>,
}

/// Where the worker is asked for something.
pub struct WorkerInput {
    input: InputReader<'static, SystemWaiter>,
    link: Arc<Link>,
}

/// The worker's stream.
pub struct WorkerOutput {
    output: ByteProducer<'static, SystemWaiter>,
    link: Arc<Link>,
}

impl WorkerChannel {
    /// Takes the worker's end of an existing channel.
    ///
    /// # Errors
    /// See [`ChannelOpenError`].
    pub fn attach(
        dir: &ShmDir,
        id: &SegmentId,
        spins: Spins,
    ) -> Result<(Self, WorkerInput, WorkerOutput), ChannelOpenError> {
        let path = path(dir, id);
        let file = open(&path)?;
        let found_bytes = stat_fd(file.anchor(), &path)?.len_bytes;
        if found_bytes != FILE_BYTES {
            return Err(ChannelOpenError::Length { path, found_bytes, needed_bytes: FILE_BYTES });
        }
        let byte = match file.lock(WORKER_BYTE, Mode::Exclusive, ATTACH_PATIENCE) {
            Err(LockError::Busy { .. }) => return Err(ChannelOpenError::WorkerAlive { path }),
            lock => lock?,
        };
        if !file.is_held(ENGINE_BYTE..ENGINE_BYTE + 1)? {
            return Err(ChannelOpenError::EngineGone { path });
        }
        let mapping = Mapping::new(file.anchor(), &path, FILE_BYTES, true)?;
        let refused = |error| ChannelOpenError::Refused { path: path.clone(), error };
        let parts = Link::memory(&mapping).and_then(|memory| memory.attach()).map_err(refused)?;
        let mode = SleepMode::sleeping(&SystemWaiter);
        // SAFETY: the worker's byte is ours as long as the link, and every
        // other worker would need it.
        let end = unsafe { WorkerEnd::attach(parts, SystemWaiter, mode, spins.0) }?;
        let link = Arc::new(Link::new(mapping, file, byte, false));
        let WorkerEnd { status, input, output } = end;
        Ok((
            Self { status, link: Arc::clone(&link) },
            WorkerInput { input, link: Arc::clone(&link) },
            WorkerOutput { output, link },
        ))
    }

    /// Looking at the status, and moving it.
    #[inline]
    pub fn status(&self) -> &WorkerStatus<'_, SystemWaiter> {
        self.link.check();
        &self.status
    }

    /// Whether the engine is there: the kernel's word.
    pub fn is_engine_alive(&self) -> bool {
        self.link.is_held(ENGINE_BYTE)
    }
}

impl WorkerInput {
    /// See [`InputReader::read`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn read(&mut self, out: &mut [u8]) -> Result<usize, InputError> {
        self.link.check();
        self.input.read(out)
    }

    /// See [`InputReader::parameters`].
    ///
    /// # Errors
    /// As there.
    pub fn parameters(&self) -> Result<Parameters, InputError> {
        self.link.check();
        self.input.parameters()
    }
}

impl WorkerOutput {
    /// See [`ByteProducer::try_write`].
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn try_write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.link.check();
        self.output.try_write(bytes)
    }

    /// See [`ByteProducer::write_some`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn write_some(&mut self, bytes: &[u8]) -> Result<usize, WildIndex> {
        self.link.check();
        self.output.write_some(bytes)
    }

    /// See [`ByteProducer::try_write_frame`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn try_write_frame(
        &mut self,
        kind: Kind,
        tag: u64,
        more: bool,
        payload: &[u8],
    ) -> Result<(), WriteError> {
        self.link.check();
        self.output.try_write_frame(kind, tag, more, payload)
    }

    /// See [`ByteProducer::send_frame`].
    ///
    /// # Errors
    /// As there.
    pub fn send_frame(
        &mut self,
        kind: Kind,
        tag: u64,
        more: bool,
        payload: &[u8],
        deadline_ns: u64,
    ) -> Result<(), WriteError> {
        self.link.check();
        self.output.send_frame(kind, tag, more, payload, deadline_ns)
    }

    /// Bytes written and not published.
    #[inline]
    pub fn unpublished_bytes(&self) -> u32 {
        self.output.unpublished_bytes()
    }

    /// See [`ByteProducer::publish`].
    #[inline(always)]
    pub fn publish(&mut self) {
        self.output.publish();
    }

    /// See [`ByteProducer::wait_room`].
    ///
    /// # Errors
    /// As there.
    pub fn wait_room(&mut self, bytes: usize, deadline_ns: u64) -> Result<(), WriteError> {
        self.link.check();
        self.output.wait_room(bytes, deadline_ns)
    }
}
