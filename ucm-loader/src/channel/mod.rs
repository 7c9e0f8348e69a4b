//! Worker channels as the tool uses them: a worker process behind a channel.
//!
//! [`client`] starts a worker, asks it for several things at a time, hears its
//! answers and its tokens, interrupts it, and puts another in its place when it
//! has died; `reader` is the thread that reads its stream; [`watchdog`] tells
//! alive, busy, hung and dead apart.

pub mod client;
pub(crate) mod reader;
pub mod watchdog;

pub use client::{ClientError, Restarted, Worker};
pub use reader::Heard;
pub use watchdog::{Health, Limits, Watch, Watchdog};
