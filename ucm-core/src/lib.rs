//! The heart of UCM: one host-memory KV cache, shared by the ranks of a node.
//!
//! This crate is `no_std` and has no allocator. It holds the layouts of the
//! shared segment, the slot state machine, the index, the pins, CLOCK, the
//! rings, and the traits through which it reaches a system ([`Waiter`],
//! [`Liveness`]) and a device ([`Device`]). It can be vendored alone.
//!
//! # The one idea
//!
//! Every shared step is a single atomic store, and every claim names the
//! participant that made it. So there is never anything half done to repair:
//! a survivor reads who was in the middle of what, and finishes or undoes it.
//! Whether somebody is alive is asked of the kernel, never of a clock. There
//! is no lock in the control plane.
//!
//! # Words
//!
//! A *block* is named by a 16-byte id; a *shard* is one equal-sized piece of
//! it; the cache key is both ([`ShardKey`]). A *slot* is one place in the host
//! cache. The *owner* of a slot is the one rank that fills it; *waiters* are
//! the others that want it. A *pin* keeps a slot from being taken.
//!
//! # Guarantees
//!
//! - One load of a key at a time, node-wide; everybody else waits for it.
//! - A pinned READY slot keeps its key and its bytes.
//! - READY is seen only after the last byte; FAILED only with its code.
//! - Whatever a participant was doing when it was killed, the others go on,
//!   and what it held comes back.
//! - Shared bytes are claims: indices and ids are checked, walks are bounded.
#![cfg_attr(not(any(test, ucm_loom)), no_std)]

pub mod cache;
pub mod channel;
pub mod crash;
pub mod describe;
pub mod device;
pub mod evict;
pub mod host;
pub mod index;
pub mod key;
pub mod limits;
pub mod participant;
pub mod pin;
pub mod ptr;
pub mod ring;
pub mod rotation;
pub mod segment;
pub mod slot;
pub mod sync;

pub use cache::{Cache, GetError, Got, JoinError, Loading, Pending, Pinned, Place, Watcher};
pub use device::{Device, DevicePtr, HostDevice};
pub use host::{Host, Liveness, Waiter};
pub use key::{BlockId, ShardKey};
pub use participant::{Introduction, ParticipantId, Role};
pub use rotation::Rotation;
pub use segment::attach::{AttachError, ControlPlane, SegmentIdentity};
pub use segment::geometry::{CacheShape, Geometry, ShapeError};
