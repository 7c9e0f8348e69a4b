//! The input buffer: one length-prefixed message at a time, from the engine to the worker.
//!
//! Whose the bytes are is the status's word: the engine writes them while it
//! may move the status on (Idle, ReqData), the worker reads them once the
//! engine has moved it (LoadWeights, ExecInfer).

use core::fmt;

use crate::channel::control::{ControlBlock, ControlError, Parameters};
use crate::channel::ring::Parts;
use crate::channel::status::{IllegalStatus, MoveError, Status, StatusWord};
use crate::host::Waiter;
use crate::sync::Ordering;

/// Where the message begins, behind its length.
const MESSAGE_AT: u32 = 4;

/// Why a message was not sent or not taken.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum InputError {
    /// Longer than the buffer; send it in pieces.
    TooLong {
        /// Its length.
        length_bytes: usize,
        /// The most.
        max_bytes: u32,
    },
    /// The length in the buffer is impossible, or more than the reader takes.
    BadLength {
        /// The length.
        found: u32,
        /// The most.
        max_bytes: u32,
    },
    /// The status is not one in which the buffer is this side's.
    NotMine(Status),
    /// There is no such status.
    Illegal(IllegalStatus),
    /// The status moved under the message; nothing was sent.
    Move(MoveError),
    /// The control block is wrong.
    Control(ControlError),
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { length_bytes, max_bytes } => {
                write!(f, "a message of {length_bytes} bytes exceeds the input's {max_bytes}")
            }
            Self::BadLength { found, max_bytes } => {
                write!(f, "the input says it holds {found} bytes, of at most {max_bytes}")
            }
            Self::NotMine(status) => {
                write!(f, "the input is the other side's while the status is {status:?}")
            }
            Self::Illegal(error) => error.fmt(f),
            Self::Move(error) => error.fmt(f),
            Self::Control(error) => error.fmt(f),
        }
    }
}
impl core::error::Error for InputError {}

impl From<MoveError> for InputError {
    fn from(error: MoveError) -> Self {
        Self::Move(error)
    }
}

/// The engine's end of the input.
pub struct InputWriter<'m, H> {
    parts: Parts<'m>,
    word: StatusWord<'m, H>,
}

impl<'m, H: Waiter> InputWriter<'m, H> {
    pub(crate) fn new(parts: Parts<'m>, word: StatusWord<'m, H>) -> Self {
        Self { parts, word }
    }

    /// Writes what is asked for besides the message. It counts with the next
    /// message.
    ///
    /// # Errors
    /// [`InputError::Control`] when it is out of range, and as for
    /// [`execute`](Self::execute).
    pub fn set_parameters(&mut self, parameters: &Parameters) -> Result<(), InputError> {
        parameters.check().map_err(InputError::Control)?;
        self.mine()?;
        let control: &ControlBlock = self.parts.control;
        control.store(parameters);
        Ok(())
    }

    /// Asks for weights: Idle -> LoadWeights, with a message.
    ///
    /// # Errors
    /// See [`InputError`]; nothing is sent then.
    pub fn load_weights(&mut self, message: &[u8]) -> Result<(), InputError> {
        self.send(message, Status::LoadWeights)
    }

    /// Asks for work: Idle or ReqData -> ExecInfer, with a message.
    ///
    /// # Errors
    /// See [`InputError`]; nothing is sent then.
    pub fn execute(&mut self, message: &[u8]) -> Result<(), InputError> {
        self.send(message, Status::ExecInfer)
    }

    /// The status, if the buffer is the engine's in it.
    fn mine(&self) -> Result<Status, InputError> {
        match self.word.load().map_err(InputError::Illegal)? {
            status @ (Status::Idle | Status::ReqData) => Ok(status),
            other => Err(InputError::NotMine(other)),
        }
    }

    fn send(&mut self, message: &[u8], to: Status) -> Result<(), InputError> {
        let max_bytes = self.parts.max_input_bytes;
        if message.len() > max_bytes as usize {
            return Err(InputError::TooLong { length_bytes: message.len(), max_bytes });
        }
        let from = self.mine()?;
        if !from.engine_may(to) {
            return Err(MoveError::NotFrom { found: from, to }.into());
        }
        // SAFETY: Idle and ReqData are for the engine to leave, so the worker
        // does not look at the input before the exchange below (an interrupt,
        // which another thread of the engine may ask for, does not make it
        // look either); `&mut self` is the only writer; the length is checked.
        unsafe { self.parts.input.copy_in(MESSAGE_AT, message) };
        self.parts.input_length_bytes.store(message.len() as u32, Ordering::Relaxed);
        // SYNC(channel.status): releases the message to the worker's Acquire.
        self.word.exchange(from, to)?;
        Ok(())
    }
}

/// The worker's end of the input.
pub struct InputReader<'m, H> {
    parts: Parts<'m>,
    word: StatusWord<'m, H>,
}

impl<'m, H: Waiter> InputReader<'m, H> {
    pub(crate) fn new(parts: Parts<'m>, word: StatusWord<'m, H>) -> Self {
        Self { parts, word }
    }

    fn mine(&self) -> Result<(), InputError> {
        // SYNC(channel.status): the Acquire load that the engine's exchange
        // releases message and parameters to.
        match self.word.load().map_err(InputError::Illegal)? {
            Status::LoadWeights | Status::ExecInfer => Ok(()),
            other => Err(InputError::NotMine(other)),
        }
    }

    /// How long the message is.
    ///
    /// # Errors
    /// See [`InputError`].
    pub fn length_bytes(&self) -> Result<u32, InputError> {
        self.mine()?;
        let found = self.parts.input_length_bytes.load(Ordering::Relaxed);
        let max_bytes = self.parts.max_input_bytes;
        if found > max_bytes {
            return Err(InputError::BadLength { found, max_bytes });
        }
        Ok(found)
    }

    /// Copies the message into `out`; says how long it is.
    ///
    /// # Errors
    /// See [`InputError`]; a message longer than `out` is [`InputError::BadLength`].
    pub fn read(&mut self, out: &mut [u8]) -> Result<usize, InputError> {
        let length = self.length_bytes()?;
        let Some(out) = out.get_mut(..length as usize) else {
            return Err(InputError::BadLength { found: length, max_bytes: out.len() as u32 });
        };
        // SAFETY: the status was the worker's a moment ago, and only this side
        // (or the engine's interrupt, after which it does not write before the
        // worker has moved on) takes it from there; the length is checked.
        unsafe { self.parts.input.copy_out(MESSAGE_AT, out) };
        Ok(out.len())
    }

    /// What is asked for besides the message.
    ///
    /// # Errors
    /// See [`InputError`].
    pub fn parameters(&self) -> Result<Parameters, InputError> {
        self.mine()?;
        let control: &ControlBlock = self.parts.control;
        control.load().map_err(InputError::Control)
    }
}
