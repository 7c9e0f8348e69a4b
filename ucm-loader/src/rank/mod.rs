//! Rank processes for the tool's own runs: real processes, one engine each.
//!
//! A parent ([`fleet`]) starts them and drives each through a worker channel
//! ([`crate::channel`]); a child ([`serve`]) ends when its engine does, which
//! the kernel tells it, so none outlives its parent. [`wire`] is what the
//! frames hold. [`worker`] is the same rank over standard streams.

pub(crate) mod device;
pub mod fleet;
pub mod protocol;
pub mod serve;
pub mod wire;
pub(crate) mod work;
pub mod worker;
