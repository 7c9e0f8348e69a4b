//! A bucket of the index: one cache line of `fingerprint | slot + 1` entries.

use crate::describe::describe;
use crate::key::KeyHash;
use crate::limits::BUCKET_ENTRIES;
use crate::ptr::Shared;
use crate::sync::AtomicU64;

/// Eight entries; zero is an empty one.
#[repr(C, align(64))]
pub struct Bucket {
    pub(crate) entries: [AtomicU64; BUCKET_ENTRIES],
}

// SAFETY: atomics only.
unsafe impl Shared for Bucket {}

describe!(Bucket, size 64, align 64, {
    0: entries: [AtomicU64; BUCKET_ENTRIES],
});

impl Bucket {
    #[cfg(ucm_loom)]
    pub(crate) unsafe fn init(at: *mut Self) {
        // SAFETY: the caller owns `at`.
        unsafe { at.write(Self { entries: core::array::from_fn(|_| AtomicU64::new(0)) }) }
    }
}

/// `fingerprint << 32 | slot + 1`. A claim like all shared bytes: the slot it
/// names may not exist, or carry another key by now.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry(pub(crate) u64);

impl Entry {
    pub(crate) const EMPTY: Self = Self(0);

    #[inline(always)]
    pub(crate) const fn new(hash: KeyHash, slot: u32) -> Self {
        Self((hash.fingerprint() as u64) << 32 | (slot as u64 + 1))
    }

    #[inline(always)]
    pub(crate) const fn fingerprint(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The slot it names, if there is such a slot.
    #[inline(always)]
    pub(crate) const fn slot(self, slot_count: u32) -> Option<u32> {
        let slot = (self.0 as u32).wrapping_sub(1);
        if slot < slot_count { Some(slot) } else { None }
    }
}
