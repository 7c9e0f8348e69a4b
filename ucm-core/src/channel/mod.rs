//! The worker channel: one engine and one worker talk through a shared segment.
//!
//! ```text
//! 0x000000  StateHeader    64 B      status, epoch, heartbeat, identity
//! 0x000040  ControlBlock   1 KiB     model, lengths, LoRA, sampling
//! 0x000440  InputBuffer    1 MiB     a length, then a message of the engine
//! 0x100440  OutputRing     1 MiB + 576 B   indices on lines of their own, bytes
//! ```
//!
//! [`layout`] is that table, asserted at compile time; [`status`] says who may
//! move the status from where to where; [`control`] is the typed view of the
//! block; [`bytes`], [`ring`], [`producer`] and [`consumer`] are the byte ring;
//! [`sleep`] is how an idle side sleeps without slowing the other one down;
//! [`frame`] and [`message`] are what travels. [`engine`] and [`worker`] are the
//! two ends: two types, so that what one side may not do does not compile.
//!
//! ```compile_fail
//! # use ucm_core::channel::{Bell, EngineEnd, WorkerEnd};
//! fn the_worker_does_not_read_its_own_stream<H: Bell>(end: &mut WorkerEnd<'_, H>) {
//!     let _ = end.output.read_some(&mut [0; 8]);
//! }
//! ```
//! ```compile_fail
//! # use ucm_core::channel::{Bell, EngineEnd, WorkerEnd};
//! fn the_worker_does_not_interrupt<H: Bell>(end: &WorkerEnd<'_, H>) {
//!     let _ = end.status.interrupt();
//! }
//! ```
//! ```compile_fail
//! # use ucm_core::channel::{Bell, EngineEnd, WorkerEnd};
//! fn the_engine_does_not_finish<H: Bell>(end: &EngineEnd<'_, H>) {
//!     let _ = end.status.finish();
//! }
//! ```
//!
//! Everything that is read here was written by another process and is a claim:
//! positions, lengths, kinds, statuses are checked, bytes are copied out before
//! they are looked at, and what is wrong is a typed error.

pub mod bytes;
pub mod consumer;
pub mod control;
pub mod engine;
pub mod frame;
pub mod input;
pub mod layout;
#[cfg(not(ucm_loom))]
pub mod memory;
pub mod message;
pub mod producer;
pub mod ring;
pub mod sleep;
pub mod status;
pub mod worker;

pub use bytes::ByteArea;
pub use consumer::ByteConsumer;
pub use control::{ControlBlock, ControlError, Parameters};
pub use engine::{EngineEnd, EngineStatus};
pub use frame::{Frame, FrameError, FrameHeader, Kind};
pub use input::{InputError, InputReader, InputWriter};
#[cfg(not(ucm_loom))]
pub use memory::{ChannelError, ChannelMemory};
pub use message::{Completion, Submission, SubmissionKind, TokenRecord};
pub use producer::{ByteProducer, WriteError};
pub use ring::{ByteRing, Parts, WildIndex};
pub use sleep::{Barrier, Bell, Mode};
pub use status::{IllegalStatus, MoveError, Status, WaitError};
pub use worker::{WorkerAttachError, WorkerEnd, WorkerStatus};
