//! Rank processes for the tool's own runs: real processes, one engine each.
//!
//! A parent ([`fleet`]) starts them and drives them by JSON lines over their
//! standard streams ([`protocol`]); a child ([`worker`]) ends when its standard
//! input does, so none outlives its parent.

pub mod fleet;
pub mod protocol;
pub mod worker;
