//! The engine's end: it asks, interrupts, and reads the stream.

use crate::channel::consumer::ByteConsumer;
use crate::channel::input::InputWriter;
use crate::channel::ring::{Parts, WildIndex};
use crate::channel::sleep::{Bell, Mode};
use crate::channel::status::{IllegalStatus, MoveError, Status, StatusWord, WaitError};
use crate::sync::Ordering;

/// The engine's end of a channel. Its three parts may go to three threads.
pub struct EngineEnd<'m, H> {
    /// Looking at the status, and moving it.
    pub status: EngineStatus<'m, H>,
    /// Asking for something.
    pub input: InputWriter<'m, H>,
    /// The worker's stream.
    pub output: ByteConsumer<'m, H>,
}

/// What the engine may do with the status; any number of copies.
pub struct EngineStatus<'m, H> {
    word: StatusWord<'m, H>,
}

impl<H: Clone> Clone for EngineStatus<'_, H> {
    fn clone(&self) -> Self {
        Self { word: self.word.clone() }
    }
}

impl<'m, H: Bell> EngineEnd<'m, H> {
    /// Takes the engine's end. `spins` is how often it looks before it sleeps.
    ///
    /// # Safety
    /// There is no other engine's end of this channel, in whatever process.
    ///
    /// # Errors
    /// [`WildIndex`] when the ring's indices contradict each other.
    pub unsafe fn attach(
        parts: Parts<'m>,
        host: H,
        mode: Mode,
        spins: u32,
    ) -> Result<Self, WildIndex> {
        let header = parts.header;
        header.engine_mode.store(mode.code(), Ordering::Release);
        let peer = header.worker_mode.load(Ordering::Acquire);
        let word = StatusWord { header, host: host.clone(), spins };
        // SAFETY: the caller's promise.
        let output = unsafe { ByteConsumer::new(parts.output, host, mode, peer, spins) }?;
        Ok(Self {
            status: EngineStatus { word: word.clone() },
            input: InputWriter::new(parts, word),
            output,
        })
    }

    /// Learns how the worker that has attached sleeps. Until then it is woken
    /// the slow way.
    pub fn learn_peer(&mut self) {
        learn_peer(&self.status, &mut self.output);
    }

    /// Starts a new epoch, after the worker has died and before another one
    /// attaches: the caller holds the worker's right to attach meanwhile. What
    /// the dead one has published stays readable
    /// ([`ByteConsumer::stale_bytes`]); what it was asked for is forgotten.
    ///
    /// # Errors
    /// [`WildIndex`]: the dead one left a ring that is no ring; the channel
    /// must be made anew.
    pub fn begin_epoch(&mut self) -> Result<u32, WildIndex> {
        begin_epoch(&self.status, &mut self.output)
    }
}

/// [`EngineEnd::learn_peer`], for an end whose parts have gone to threads.
pub fn learn_peer<H: Bell>(status: &EngineStatus<'_, H>, output: &mut ByteConsumer<'_, H>) {
    output.set_peer(status.word.header.worker_mode.load(Ordering::Acquire));
}

/// [`EngineEnd::begin_epoch`], for an end whose parts have gone to threads.
///
/// # Errors
/// As there.
pub fn begin_epoch<H: Bell>(
    status: &EngineStatus<'_, H>,
    output: &mut ByteConsumer<'_, H>,
) -> Result<u32, WildIndex> {
    output.mark_boundary()?;
    output.set_peer(0);
    let word = &status.word;
    let header = word.header;
    header.worker_mode.store(0, Ordering::Relaxed);
    header.error_code.store(0, Ordering::Relaxed);
    header.attached.store(0, Ordering::Relaxed);
    let epoch = header.epoch.load(Ordering::Relaxed).wrapping_add(1).max(1);
    header.epoch.store(epoch, Ordering::Relaxed);
    // Not one of the two sides' moves: the worker is dead, and nobody else may
    // be one. An interrupt of another thread of ours may come in between, and
    // is what it asked for: nothing is under way any more.
    // SYNC(channel.status): SeqCst, as every move; releases the words above.
    header.status.swap(Status::Idle.code(), Ordering::SeqCst);
    word.wake();
    Ok(epoch)
}

impl<H: Bell> EngineStatus<'_, H> {
    /// What the worker is doing.
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

    /// Stops what is under way: LoadWeights, ExecInfer, Streaming or ReqData
    /// -> Interrupt. Says what it was.
    ///
    /// # Errors
    /// See [`MoveError`]; there is nothing to interrupt, for one.
    pub fn interrupt(&self) -> Result<Status, MoveError> {
        self.word.advance(Status::Interrupt, Status::engine_may)
    }

    /// Takes note of an end: Done or Error -> Idle. Says which.
    ///
    /// # Errors
    /// See [`MoveError`].
    pub fn acknowledge(&self) -> Result<Status, MoveError> {
        self.word.advance(Status::Idle, Status::engine_may)
    }

    /// Has the worker give its device's memory back: Idle -> UnloadWeights.
    ///
    /// # Errors
    /// See [`MoveError`].
    pub fn unload_weights(&self) -> Result<(), MoveError> {
        self.word.exchange(Status::Idle, Status::UnloadWeights)
    }

    /// What the worker said when it moved to Error.
    pub fn error_code(&self) -> u32 {
        self.word.header.error_code.load(Ordering::Acquire)
    }

    /// How often the worker has beaten.
    pub fn heartbeat(&self) -> u64 {
        // Relaxed: whether it has changed is all that matters.
        self.word.header.heartbeat.load(Ordering::Relaxed)
    }

    /// The current epoch.
    pub fn epoch(&self) -> u32 {
        self.word.header.epoch.load(Ordering::Acquire)
    }

    /// Waits until the worker of the current epoch has attached; `false` at
    /// the deadline.
    pub fn wait_attached(&self, deadline_ns: u64) -> bool {
        loop {
            let attached = &self.word.header.attached;
            let seen = attached.load(Ordering::Acquire);
            if self.is_attached() {
                return true;
            }
            let now_ns = self.word.host.now_ns();
            if now_ns >= deadline_ns {
                return false;
            }
            self.word.host.wait(attached, seen, deadline_ns - now_ns);
        }
    }

    /// Whether the worker of the current epoch has attached.
    pub fn is_attached(&self) -> bool {
        // SYNC(channel.attached): Acquire; pairs with the Release store in
        // `WorkerEnd::attach`: the worker's mode is there.
        self.word.header.attached.load(Ordering::Acquire) == self.epoch()
    }
}
