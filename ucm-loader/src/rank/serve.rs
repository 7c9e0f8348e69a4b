//! A rank process driven through its channel.
//!
//! One thread takes what the engine asks for and beats; loads, dumps and
//! lookups run beside it and are answered when they are done, so any number
//! may be under way. A stream of tokens is sent by that one thread itself,
//! which is then busy, as a model is.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ucm_core::channel::frame::MAX_PAYLOAD_BYTES;
use ucm_core::channel::layout::MAX_INPUT_BYTES;
use ucm_core::channel::message::{TOKEN_LAST, TOKEN_LIMIT, token_bytes};
use ucm_core::channel::{FrameHeader, Kind, MoveError, Status, TokenRecord, WaitError, WriteError};
use ucm_posix::channel::{Spins, WorkerChannel, WorkerInput, WorkerOutput};
use ucm_posix::{ChannelOpenError, SegmentId, ShmDir, monotonic_ns};

use crate::rank::protocol::{Done, Outcome, Setup};
use crate::rank::wire::{Asked, decode_command, encode_outcome};
use crate::rank::work::{Rank, Work};

/// How often the worker beats, and looks whether its engine lives.
pub const BEAT: Duration = Duration::from_millis(250);
/// The longest message, in all its pieces.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// `Error` codes of the channel's status.
pub mod code {
    /// The weights could not be loaded; a reply says why.
    pub const LOAD: u32 = 1;
    /// What was asked for was not understood.
    pub const MESSAGE: u32 = 2;
}

/// Why a rank left its channel other than by being told to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// It never had it.
    #[error(transparent)]
    Open(#[from] ChannelOpenError),
    /// The engine has written what no engine writes.
    #[error("the channel's engine is broken: {0}")]
    Broken(String),
    /// The engine has gone.
    #[error("the channel's engine has gone")]
    EngineGone,
}

fn broken(error: impl std::fmt::Display) -> ServeError {
    ServeError::Broken(error.to_string())
}

/// Where answers go, from any thread.
struct Replier {
    output: Mutex<WorkerOutput>,
    channel: WorkerChannel,
}

impl Replier {
    /// Sends one frame; waits for room as long as there is an engine that may
    /// make some.
    fn frame(&self, kind: Kind, tag: u64, more: bool, payload: &[u8]) -> Result<(), ServeError> {
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let deadline_ns = monotonic_ns() + BEAT.as_nanos() as u64;
            match output.send_frame(kind, tag, more, payload, deadline_ns) {
                Ok(()) => return Ok(()),
                Err(WriteError::Deadline | WriteError::Full) if self.channel.is_engine_alive() => {}
                Err(WriteError::Deadline | WriteError::Full) => return Err(ServeError::EngineGone),
                Err(error) => return Err(broken(error)),
            }
        }
    }

    fn outcome(&self, tag: u64, outcome: &Outcome) -> Result<(), ServeError> {
        let (kind, payload) = encode_outcome(outcome).map_err(broken)?;
        let mut pieces = payload.chunks(MAX_PAYLOAD_BYTES).peekable();
        if pieces.peek().is_none() {
            return self.frame(kind, tag, false, &[]);
        }
        while let Some(piece) = pieces.next() {
            self.frame(kind, tag, pieces.peek().is_some(), piece)?;
        }
        Ok(())
    }
}

/// Serves a channel until the engine says stop, or is gone.
///
/// # Errors
/// See [`ServeError`].
pub fn run(dir: &ShmDir, id: &SegmentId) -> Result<(), ServeError> {
    let (channel, input, output) = WorkerChannel::attach(dir, id, Spins::default())?;
    let replier = Arc::new(Replier { output: Mutex::new(output), channel: channel.clone() });
    let mut server = Server {
        channel,
        input,
        replier,
        rank: None,
        under_way: Arc::default(),
        message: Vec::new(),
        buffer: vec![0; MAX_INPUT_BYTES],
    };
    let result = server.serve();
    server.unload();
    match result {
        // Nobody is left to tell.
        Err(ServeError::EngineGone) => Ok(()),
        other => other,
    }
}

struct Server {
    channel: WorkerChannel,
    input: WorkerInput,
    replier: Arc<Replier>,
    /// The weights, as it were: the engine and its device's memory.
    rank: Option<Arc<Rank>>,
    /// Work that runs beside this thread.
    under_way: Arc<AtomicU32>,
    /// The pieces of a message that have come so far.
    message: Vec<u8>,
    buffer: Vec<u8>,
}

impl Server {
    fn serve(&mut self) -> Result<(), ServeError> {
        loop {
            self.channel.status().beat();
            let status = self.channel.status().get().map_err(broken)?;
            match status {
                Status::LoadWeights => self.load_weights()?,
                Status::UnloadWeights => {
                    self.unload();
                    moved(self.channel.status().unloaded())?;
                }
                Status::ExecInfer => {
                    if self.execute()? {
                        return Ok(());
                    }
                }
                Status::Interrupt => {
                    self.cancel();
                    moved(self.channel.status().interrupted())?;
                }
                Status::Idle | Status::ReqData | Status::Done | Status::Error => {
                    self.rest(status)?;
                }
                // Only this thread moves to it, and it does not come back with it.
                Status::Streaming => return Err(broken("nobody is streaming")),
            }
        }
    }

    /// Sleeps until there is something to do, a beat at the most.
    fn rest(&self, status: Status) -> Result<(), ServeError> {
        let deadline_ns = monotonic_ns() + BEAT.as_nanos() as u64;
        match self.channel.status().wait_while(status, deadline_ns) {
            Ok(_) => Ok(()),
            Err(WaitError::Deadline) if self.channel.is_engine_alive() => Ok(()),
            Err(WaitError::Deadline) => Err(ServeError::EngineGone),
            Err(WaitError::Illegal(error)) => Err(broken(error)),
        }
    }

    /// The message in the input: its kind, its tag, and whether it is whole.
    fn take(&mut self) -> Result<Option<(Kind, u64)>, ServeError> {
        let length = self.input.read(&mut self.buffer).map_err(broken)?;
        let (frame, payload) = FrameHeader::parse(&self.buffer[..length]).map_err(broken)?;
        if self.message.len() + payload.len() > MAX_MESSAGE_BYTES {
            return Err(broken("a message without an end"));
        }
        self.message.extend_from_slice(payload);
        Ok((!frame.more).then_some((frame.kind, frame.tag)))
    }

    fn load_weights(&mut self) -> Result<(), ServeError> {
        let taken = self.take()?;
        let message = std::mem::take(&mut self.message);
        let Some((kind, tag)) = taken else { return Err(broken("a setup in pieces")) };
        if kind != Kind::Setup {
            return Err(broken("a setup of another kind"));
        }
        // What was loaded before goes first: both would not fit.
        self.unload();
        let setup = serde_json::from_slice::<Setup>(&message).map_err(|e| e.to_string());
        match setup.and_then(Rank::start) {
            Ok(rank) => {
                self.rank = Some(Arc::new(rank));
                self.replier.outcome(tag, &Outcome::Ready)?;
                moved(self.channel.status().loaded())
            }
            Err(reason) => {
                self.replier.outcome(tag, &Outcome::Error(reason))?;
                moved(self.channel.status().fail(code::LOAD))
            }
        }
    }

    /// Takes a message, and begins what it asks for. `true` when that is to leave.
    fn execute(&mut self) -> Result<bool, ServeError> {
        let Some((kind, tag)) = self.take()? else {
            moved(self.channel.status().request_data())?;
            return Ok(false);
        };
        let message = std::mem::take(&mut self.message);
        let asked = match decode_command(kind, &message) {
            Ok(asked) => asked,
            Err(error) => {
                self.replier.outcome(tag, &Outcome::Error(error.to_string()))?;
                moved(self.channel.status().fail(code::MESSAGE))?;
                return Ok(false);
            }
        };
        match asked {
            Asked::Stop => {
                self.finish_under_way();
                let drained = self.unload();
                self.replier.outcome(tag, &Outcome::Stopped { drained })?;
                moved(self.channel.status().finish())?;
                return Ok(true);
            }
            Asked::Generate { tokens, pause_us } => {
                let done = self.generate(tag, tokens, pause_us)?;
                self.replier.outcome(tag, &done)?;
                moved(self.channel.status().request_data())?;
            }
            Asked::Work(work) => {
                self.begin(tag, work)?;
                moved(self.channel.status().request_data())?;
            }
        }
        Ok(false)
    }

    /// Runs `work` on a thread of its own.
    fn begin(&mut self, tag: u64, work: Work) -> Result<(), ServeError> {
        let Some(rank) = self.rank.clone() else {
            let reason = "no weights are loaded".to_owned();
            return self.replier.outcome(tag, &Outcome::Error(reason));
        };
        self.under_way.fetch_add(1, Ordering::AcqRel);
        let (replier, under_way) = (Arc::clone(&self.replier), Arc::clone(&self.under_way));
        let spawned =
            std::thread::Builder::new().name("ucm_rank_work".to_owned()).spawn(move || {
                let outcome = rank.run(&work);
                drop(rank);
                if let Err(error) = replier.outcome(tag, &outcome) {
                    tracing::warn!(%error, "nobody hears of a completion");
                }
                under_way.fetch_sub(1, Ordering::AcqRel);
            });
        if let Err(error) = spawned {
            self.under_way.fetch_sub(1, Ordering::AcqRel);
            let reason = format!("no thread for it: {error}");
            self.replier.outcome(tag, &Outcome::Error(reason))?;
        }
        Ok(())
    }

    /// Streams tokens until there are enough, or the engine interrupts.
    fn generate(&mut self, tag: u64, tokens: u32, pause_us: u64) -> Result<Outcome, ServeError> {
        let began_ns = monotonic_ns();
        let limit = self.input.parameters().map_err(broken)?.token_limit;
        let count = if limit > 0 { tokens.min(limit) } else { tokens };
        let status = self.channel.status();
        let interrupted = || Outcome::Error("interrupted".to_owned());
        if let Err(error) = status.stream() {
            moved(Err(error))?;
            return Ok(interrupted());
        }
        for index in 0..count {
            if pause_us > 0 {
                let deadline_ns = monotonic_ns() + pause_us * 1000;
                // Not a plain sleep, so that an interrupt is heard at once.
                match status.wait_while(Status::Streaming, deadline_ns) {
                    Err(WaitError::Deadline) => {}
                    Err(WaitError::Illegal(error)) => return Err(broken(error)),
                    Ok(_) => return Ok(interrupted()),
                }
            } else if status.get().map_err(broken)? != Status::Streaming {
                return Ok(interrupted());
            }
            let last = index + 1 == count;
            let flags = if last && count < tokens {
                TOKEN_LAST | TOKEN_LIMIT
            } else if last {
                TOKEN_LAST
            } else {
                0
            };
            // What a model would have drawn.
            let id = index.wrapping_mul(2_654_435_761) % 32_000;
            let record = TokenRecord { id, logprob: -0.5, flags, index };
            self.replier.frame(Kind::Tokens, tag, true, token_bytes(&[record]))?;
            status.beat();
        }
        Ok(Outcome::Done(Done { began_ns, ended_ns: monotonic_ns(), ..Done::default() }))
    }

    /// Stops what is under way, and waits until it has stopped: the engine may
    /// use the device's memory for something else as soon as it is told so.
    fn cancel(&mut self) {
        self.message.clear();
        while self.under_way.load(Ordering::Acquire) > 0 {
            if let Some(rank) = &self.rank {
                rank.cancel_all();
            }
            self.channel.status().beat();
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Waits for what is under way. Each has a deadline of its own.
    fn finish_under_way(&self) {
        while self.under_way.load(Ordering::Acquire) > 0 {
            self.channel.status().beat();
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Gives everything back; whether the backend had ended its work.
    fn unload(&mut self) -> bool {
        self.cancel();
        // Nobody else has it: every thread has dropped its own before it was
        // counted out.
        match self.rank.take().map(Arc::try_unwrap) {
            Some(Ok(rank)) => rank.shutdown(),
            Some(Err(_)) | None => true,
        }
    }
}

/// An interrupt may always come first; the loop sees to it. Anything else in
/// the way of the worker's own move is the engine's doing.
fn moved(result: Result<(), MoveError>) -> Result<(), ServeError> {
    match result {
        Ok(()) | Err(MoveError::NotFrom { found: Status::Interrupt, .. }) => Ok(()),
        Err(error) => Err(broken(error)),
    }
}
