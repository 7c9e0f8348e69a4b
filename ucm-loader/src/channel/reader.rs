//! The thread that reads a worker's stream, and tells those who wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ucm_core::channel::frame::{HEADER_BYTES, MAX_PAYLOAD_BYTES};
use ucm_core::channel::message::tokens;
use ucm_core::channel::{Frame, FrameError, Kind, TokenRecord};
use ucm_posix::channel::EngineOutput;
use ucm_posix::{EngineChannel, monotonic_ns};

use crate::rank::protocol::Outcome;
use crate::rank::wire::decode_outcome;

/// How long it sleeps before it asks the kernel whether the worker lives.
const SLICE: Duration = Duration::from_millis(20);
/// The longest answer, in all its pieces.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// What a request hears of.
#[derive(Clone, Debug)]
pub enum Heard {
    /// Tokens of a stream; `stale` when the worker had died by the time they
    /// were read.
    Tokens {
        /// In order.
        tokens: Vec<TokenRecord>,
        /// Whether their worker is dead.
        stale: bool,
    },
    /// The end.
    Outcome(Outcome),
}

/// Who waits for which tag.
#[derive(Default)]
pub(crate) struct Waiting {
    tags: Mutex<HashMap<u64, Sender<Heard>>>,
}

impl Waiting {
    pub(crate) fn lock(&self) -> MutexGuard<'_, HashMap<u64, Sender<Heard>>> {
        self.tags.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the reader's thread works with, and gives back when it ends.
pub(crate) struct Reader {
    pub(crate) output: EngineOutput,
    pub(crate) channel: EngineChannel,
    pub(crate) waiting: Arc<Waiting>,
    pub(crate) stop: Arc<AtomicBool>,
    buffer: Vec<u8>,
    /// The pieces of answers that have come so far.
    pieces: HashMap<u64, Vec<u8>>,
}

impl Reader {
    pub(crate) fn new(
        output: EngineOutput,
        channel: EngineChannel,
        waiting: Arc<Waiting>,
        stop: Arc<AtomicBool>,
    ) -> Self {
        let buffer = vec![0; MAX_PAYLOAD_BYTES];
        Self { output, channel, waiting, stop, buffer, pieces: HashMap::new() }
    }

    /// Reads until the worker is dead and its stream is at its end, or until it
    /// is told to stop.
    pub(crate) fn run(mut self) -> Self {
        while !self.stop.load(Ordering::Acquire) {
            let deadline_ns = monotonic_ns() + SLICE.as_nanos() as u64;
            let there = match self.output.wait_readable(HEADER_BYTES, deadline_ns) {
                Ok(there) => there,
                Err(error) => {
                    tracing::error!(%error, "a worker's stream cannot be read any more");
                    break;
                }
            };
            if there {
                if !self.drain() {
                    break;
                }
            } else if !self.channel.is_worker_alive() {
                // All that it published was published before it died.
                self.drain();
                break;
            }
        }
        // Everybody who still waits learns that nothing will come.
        self.waiting.lock().clear();
        self.pieces.clear();
        self
    }

    /// Everything that is there; `false` when the stream cannot be trusted.
    pub(crate) fn drain(&mut self) -> bool {
        loop {
            match self.output.try_read_frame(&mut self.buffer) {
                Ok(None) => return true,
                Ok(Some(frame)) => {
                    if let Err(error) = self.dispatch(frame) {
                        tracing::error!(error, "a worker's frame was not understood");
                        return false;
                    }
                }
                Err(error @ FrameError::CutOff { .. }) => {
                    tracing::warn!(%error, "what a dead worker left behind");
                }
                Err(error) => {
                    tracing::error!(%error, "a worker's stream cannot be read any more");
                    return false;
                }
            }
        }
    }

    fn dispatch(&mut self, frame: Frame) -> Result<(), String> {
        let payload = &self.buffer[..frame.payload_bytes];
        if frame.kind == Kind::Tokens {
            let tokens: Vec<_> = tokens(payload).map_err(|e| e.to_string())?.collect();
            let stale = frame.stale || !self.channel.status().is_attached();
            if let Some(tell) = self.waiting.lock().get(&frame.tag) {
                // Whoever asked may have given up.
                let _given_up = tell.send(Heard::Tokens { tokens, stale });
            }
            return Ok(());
        }
        let whole = if frame.more || self.pieces.contains_key(&frame.tag) {
            let pieces = self.pieces.entry(frame.tag).or_default();
            if pieces.len() + payload.len() > MAX_ANSWER_BYTES {
                return Err("an answer without an end".to_owned());
            }
            pieces.extend_from_slice(payload);
            if frame.more {
                return Ok(());
            }
            self.pieces.remove(&frame.tag).unwrap_or_default()
        } else {
            payload.to_vec()
        };
        let outcome = decode_outcome(frame.kind, &whole).map_err(|e| e.to_string())?;
        if let Some(tell) = self.waiting.lock().remove(&frame.tag) {
            let _given_up = tell.send(Heard::Outcome(outcome));
        }
        Ok(())
    }
}
