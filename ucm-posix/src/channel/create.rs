//! The engine's end of a channel file.

use std::path::Path;
use std::sync::Arc;

use ucm_core::channel::engine::{begin_epoch, learn_peer};
use ucm_core::channel::{
    ByteConsumer, EngineEnd, EngineStatus, Frame, FrameError, InputError, InputWriter,
    Mode as SleepMode, Parameters, WildIndex,
};

use crate::channel::error::ChannelOpenError;
use crate::channel::link::{ENGINE_BYTE, FILE_BYTES, Link, Spins, WORKER_BYTE, path};
use crate::futex::waiter::SystemWaiter;
use crate::liveness::{LIFECYCLE_WAIT, LockFile, Mode};
use crate::mapping::Mapping;
use crate::names::SegmentId;
use crate::shm::{Draft, ShmDir};

/// A channel as its engine sees it: status, and who is alive.
///
/// Dropped with its input and output, it removes the file.
#[derive(Clone)]
pub struct EngineChannel {
    // Before `link`, which keeps the memory that it borrows.
    status: EngineStatus<'static, SystemWaiter>,
    link: Arc<Link>,
}

/// Where the engine asks for something.
pub struct EngineInput {
    input: InputWriter<'static, SystemWaiter>,
    link: Arc<Link>,
}

/// Where the engine reads the worker's stream.
pub struct EngineOutput {
    output: ByteConsumer<'static, SystemWaiter>,
    status: EngineStatus<'static, SystemWaiter>,
    link: Arc<Link>,
}

impl EngineChannel {
    /// Makes a channel. The engine's byte is held before the file has a name.
    ///
    /// # Errors
    /// See [`ChannelOpenError`]; a name that is taken is one of the file's.
    pub fn create(
        dir: &ShmDir,
        id: &SegmentId,
        spins: Spins,
    ) -> Result<(Self, EngineInput, EngineOutput), ChannelOpenError> {
        let path = path(dir, id);
        dir.check_room(FILE_BYTES)?;
        let nonce = crate::identity::fresh_nonce()?;
        let mut draft = Draft::create(dir, &id.data_name(nonce), FILE_BYTES)?;
        draft.reserve()?;
        let mapping = Mapping::new(draft.fd(), &path, FILE_BYTES, true)?;
        let refused = |error| ChannelOpenError::Refused { path: path.clone(), error };
        let parts = Link::memory(&mapping).map_err(refused)?.initialise();
        let file = LockFile::new(draft.reopen(&path)?, path.clone());
        let byte = file.lock(ENGINE_BYTE, Mode::Exclusive, LIFECYCLE_WAIT)?;
        let mode = SleepMode::sleeping(&SystemWaiter);
        // SAFETY: nobody else knows the file yet, and the engine's byte, which
        // every other engine would need, is ours as long as the link.
        let end = unsafe { EngineEnd::attach(parts, SystemWaiter, mode, spins.0) }?;
        draft.link(&path)?;
        drop(draft);
        let link = Arc::new(Link::new(mapping, file, byte, true));
        let EngineEnd { status, input, output } = end;
        Ok((
            Self { status: status.clone(), link: Arc::clone(&link) },
            EngineInput { input, link: Arc::clone(&link) },
            EngineOutput { output, status, link },
        ))
    }

    /// Looking at the status, and moving it.
    #[inline]
    pub fn status(&self) -> &EngineStatus<'_, SystemWaiter> {
        self.link.check();
        &self.status
    }

    /// Whether a worker is there: the kernel's word.
    pub fn is_worker_alive(&self) -> bool {
        self.link.is_held(WORKER_BYTE)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.link.file.path()
    }
}

impl EngineInput {
    /// See [`InputWriter::set_parameters`].
    ///
    /// # Errors
    /// As there.
    pub fn set_parameters(&mut self, parameters: &Parameters) -> Result<(), InputError> {
        self.link.check();
        self.input.set_parameters(parameters)
    }

    /// See [`InputWriter::load_weights`].
    ///
    /// # Errors
    /// As there.
    pub fn load_weights(&mut self, message: &[u8]) -> Result<(), InputError> {
        self.link.check();
        self.input.load_weights(message)
    }

    /// See [`InputWriter::execute`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn execute(&mut self, message: &[u8]) -> Result<(), InputError> {
        self.link.check();
        self.input.execute(message)
    }
}

impl EngineOutput {
    /// See [`ByteConsumer::try_read_frame`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn try_read_frame(&mut self, buffer: &mut [u8]) -> Result<Option<Frame>, FrameError> {
        self.link.check();
        self.output.try_read_frame(buffer)
    }

    /// See [`ByteConsumer::wait_readable`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn wait_readable(&mut self, bytes: usize, deadline_ns: u64) -> Result<bool, WildIndex> {
        self.link.check();
        self.output.wait_readable(bytes, deadline_ns)
    }

    /// See [`ByteConsumer::try_read`].
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn try_read(&mut self, out: &mut [u8]) -> Result<bool, WildIndex> {
        self.link.check();
        self.output.try_read(out)
    }

    /// See [`ByteConsumer::read_some`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn read_some(&mut self, out: &mut [u8]) -> Result<usize, WildIndex> {
        self.link.check();
        self.output.read_some(out)
    }

    /// Bytes of dead workers that are still to be read.
    pub fn stale_bytes(&mut self) -> u32 {
        self.link.check();
        self.output.stale_bytes()
    }

    /// Learns how the worker that has attached sleeps; until then it is woken
    /// the slow way.
    pub fn learn_peer(&mut self) {
        self.link.check();
        learn_peer(&self.status, &mut self.output);
    }

    /// Starts a new epoch after the worker's death, so that another may
    /// attach. Returns its number. What the dead one has published stays
    /// readable.
    ///
    /// # Errors
    /// [`ChannelOpenError::WorkerAlive`], as the kernel has it; and a ring that
    /// the dead one has left in a state that no ring is in.
    pub fn begin_epoch(&mut self) -> Result<u32, ChannelOpenError> {
        self.link.check();
        let file = &self.link.file;
        // Its byte proves that it is dead, and keeps the next one out.
        let Some(_worker) = file.try_lock(WORKER_BYTE, Mode::Exclusive)? else {
            return Err(ChannelOpenError::WorkerAlive { path: file.path().to_owned() });
        };
        Ok(begin_epoch(&self.status, &mut self.output)?)
    }
}
