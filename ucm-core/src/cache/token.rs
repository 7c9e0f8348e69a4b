//! What a get returns: tokens, each of which is one pin of this participant.

use crate::key::ShardKey;
use crate::participant::ParticipantId;
use crate::slot::meta::LoadErrorCode;
use crate::slot::word::Generation;

/// The outcome of a get.
#[must_use = "each token is a pin that must be given back"]
#[derive(Debug, PartialEq, Eq)]
pub enum Got {
    /// The shard is here.
    Hit(Pinned),
    /// Nobody has it: this participant loads it now.
    Owner(Loading),
    /// Somebody else is loading it.
    Wait(Pending),
}

/// A READY slot that cannot go away. Give it back with `Cache::release`.
#[must_use = "a pin that is not released keeps its slot for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct Pinned {
    pub(crate) slot: u32,
}

/// The right and the duty to fill a slot. Ends with `Cache::publish` or `Cache::fail`.
#[must_use = "waiters sleep until the load is published or failed"]
#[derive(Debug, PartialEq, Eq)]
pub struct Loading {
    pub(crate) slot: u32,
    pub(crate) generation: Generation,
}

/// A place in the audience of somebody else's load. Ends with `Cache::wait`,
/// `Cache::settle` or `Cache::cancel`.
#[must_use = "a pin that is not given back keeps its slot for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct Pending {
    pub(crate) slot: u32,
    pub(crate) generation: Generation,
}

/// How somebody else's load stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Still under way.
    Loading,
    /// Done: the shard is here.
    Ready,
    /// It failed.
    Failed(LoadErrorCode),
    /// Its owner died; ask again.
    OwnerDied,
}

impl Pinned {
    /// The slot, for addressing its bytes.
    #[inline]
    pub fn slot(&self) -> u32 {
        self.slot
    }
}

impl Loading {
    /// The slot, for addressing its bytes.
    #[inline]
    pub fn slot(&self) -> u32 {
        self.slot
    }
}

impl Pending {
    /// The slot that is being filled.
    #[inline]
    pub fn slot(&self) -> u32 {
        self.slot
    }
}

/// A key that lost its slot, for whoever records such things.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Eviction {
    /// What was there, READY.
    pub key: ShardKey,
    /// A time just before it went, on the host's clock.
    pub before_ns: u64,
    /// Who took it.
    pub by: ParticipantId,
}
