//! The load pipeline: backend to slot to device, in two threads joined by a ring.
//!
//! - [`dispatch`] (`ucm_load_disp`) walks each task's shards in rotated order,
//!   asks the cache for each, and hands what this rank owns to the backend. It
//!   never waits for IO, only for its share of pins and claims ([`budget`]).
//! - [`transfer`] (`ucm_load_xfer`) waits until shards are READY, whoever loads
//!   them, and copies each to the device as it becomes so.

pub(crate) mod budget;
pub(crate) mod dispatch;
pub(crate) mod fetch;
pub(crate) mod transfer;
