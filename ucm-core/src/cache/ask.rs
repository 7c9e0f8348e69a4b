//! How a shard is asked for, and what may be answered instead of it.

use core::fmt;

use crate::evict::clock::Pool;
use crate::slot::meta::LoadErrorCode;

/// How a READY shard is treated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// It is a hit.
    #[default]
    Cached,
    /// While nobody else holds it, it is loaded again (backend-only mode).
    Reload,
}

/// How a shard is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ask {
    /// How a READY shard is treated.
    pub mode: Mode,
    /// Which slots may give way if it is not there.
    pub pool: Pool,
}

impl Ask {
    /// A hit is a hit, and the reserve stays alone.
    pub const PLAIN: Self = Self { mode: Mode::Cached, pool: Pool::Ordinary };
}

/// Why a get returned nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum GetError {
    /// The key's last load failed, and others are still looking at that.
    Failed(LoadErrorCode),
    /// Every slot stayed pinned or in use until the deadline.
    NothingEvictable,
    /// Both of the key's buckets are full of slots in use.
    BucketsPinned,
    /// The segment was found wrong while it was in use.
    Poisoned,
    /// This participant holds too many pins on the shard's slot.
    TooManyPins,
    /// The deadline passed while others kept changing the slot.
    Deadline,
}

impl fmt::Display for GetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(code) => write!(f, "the shard's load failed: {code}"),
            Self::NothingEvictable => f.write_str(
                "every slot is pinned or being loaded; raise the capacity or lower concurrency",
            ),
            Self::BucketsPinned => {
                f.write_str("every slot that the key's index entry could use is pinned")
            }
            Self::Poisoned => f.write_str(super::POISONED),
            Self::TooManyPins => write!(
                f,
                "more than {} pins of one participant on one slot",
                crate::limits::MAX_PINS_PER_SLOT
            ),
            Self::Deadline => f.write_str("the deadline passed"),
        }
    }
}

impl core::error::Error for GetError {}

/// Why a wait ended without the shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum WaitError {
    /// The load failed.
    Failed(LoadErrorCode),
    /// The owner died; ask again, and be the next owner.
    OwnerDied,
    /// The segment was found wrong while it was in use.
    Poisoned,
    /// The deadline passed.
    Deadline,
}

impl fmt::Display for WaitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(code) => write!(f, "the shard's load failed: {code}"),
            Self::OwnerDied => f.write_str("the rank that was loading the shard died"),
            Self::Poisoned => f.write_str(super::POISONED),
            Self::Deadline => f.write_str("the deadline passed before the shard was loaded"),
        }
    }
}

impl core::error::Error for WaitError {}
