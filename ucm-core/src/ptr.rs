//! Region: checked offset to reference, the crate's only pointer arithmetic.

use core::marker::PhantomData;
use core::mem::{align_of, size_of};
use core::ptr::NonNull;

/// A piece of memory shared with other threads and processes.
///
/// Invariants, set by [`Region::new`]'s caller: `base` is valid for `len_bytes`
/// for `'m`, aligned to 64 bytes, and touched by everybody through atomics only.
#[derive(Clone, Copy)]
pub struct Region<'m> {
    base: NonNull<u8>,
    len_bytes: usize,
    _memory: PhantomData<&'m [u8]>,
}

// SAFETY: a Region hands out only shared references to types that are made of
// atomics (`Shared`), which any thread may use.
unsafe impl Send for Region<'_> {}
// SAFETY: as above.
unsafe impl Sync for Region<'_> {}

/// Types that may live in shared memory: every bit pattern is valid, and every
/// access goes through an atomic.
///
/// # Safety
/// The type consists of atomics, or arrays and `repr(C)` structures of them,
/// without padding that is ever read.
pub unsafe trait Shared {}

macro_rules! shared { ($($atomic:ty),*) => {$(
    // SAFETY: an atomic integer: every bit pattern is valid.
    unsafe impl Shared for $atomic {}
)*}; }
shared!(
    crate::sync::AtomicU8,
    crate::sync::AtomicU16,
    crate::sync::AtomicU32,
    crate::sync::AtomicU64
);
// SAFETY: an array of such types is one itself.
unsafe impl<T: Shared, const N: usize> Shared for [T; N] {}

/// What was asked for does not lie inside the region, or is misaligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRegion {
    /// Where it would begin.
    pub offset_bytes: u64,
    /// How long it would be.
    pub len_bytes: u64,
    /// How long the region is.
    pub region_bytes: u64,
}

impl<'m> Region<'m> {
    /// Describes memory that is shared.
    ///
    /// # Safety
    /// `base` must be valid for reads (and for writes, unless only read through)
    /// of `len_bytes` for all of `'m`, and nobody may access it other than
    /// through atomics while the region or anything borrowed from it lives.
    ///
    /// # Panics
    /// When `base` is not aligned to 64 bytes: a mapping always is.
    pub unsafe fn new(base: NonNull<u8>, len_bytes: usize) -> Self {
        assert!((base.as_ptr() as usize).is_multiple_of(64), "a region begins on a cache line");
        Self { base, len_bytes, _memory: PhantomData }
    }

    /// Its length.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// `count` consecutive `T`s that begin at `offset_bytes`.
    pub fn slice<T: Shared>(&self, offset_bytes: u64, count: u64) -> Result<&'m [T], OutOfRegion> {
        let pointer = self.place::<T>(offset_bytes, count)?;
        // SAFETY: `place` checked range and alignment; the region is valid for
        // `'m` and shared through atomics only (its invariants).
        Ok(unsafe { core::slice::from_raw_parts(pointer, count as usize) })
    }

    /// The `T` at `offset_bytes`.
    pub fn at<T: Shared>(&self, offset_bytes: u64) -> Result<&'m T, OutOfRegion> {
        Ok(&self.slice::<T>(offset_bytes, 1)?[0])
    }

    /// The checked address of `count` `T`s, for construction in place.
    pub(crate) fn place<T>(&self, offset_bytes: u64, count: u64) -> Result<*mut T, OutOfRegion> {
        let outside = OutOfRegion {
            offset_bytes,
            len_bytes: count.saturating_mul(size_of::<T>() as u64),
            region_bytes: self.len_bytes as u64,
        };
        let len_bytes = count.checked_mul(size_of::<T>() as u64).ok_or(outside)?;
        let end = offset_bytes.checked_add(len_bytes).ok_or(outside)?;
        if end > self.len_bytes as u64 || !offset_bytes.is_multiple_of(align_of::<T>() as u64) {
            return Err(outside);
        }
        // SAFETY: the offset was just found inside the region.
        let pointer = unsafe { self.base.as_ptr().add(offset_bytes as usize) };
        Ok(pointer.cast())
    }
}

#[cfg(all(test, not(ucm_loom)))]
mod tests {
    use super::*;
    use crate::sync::AtomicU32;

    #[repr(align(64))]
    struct Memory([AtomicU32; 32]);

    #[test]
    fn what_lies_outside_is_refused_and_so_is_what_would_wrap() {
        let memory = Memory([const { AtomicU32::new(0) }; 32]);
        // SAFETY: `memory` outlives the region and is made of atomics.
        let region = unsafe { Region::new(NonNull::from(&memory.0).cast(), 128) };
        assert!(region.slice::<AtomicU32>(0, 32).is_ok());
        assert!(region.slice::<AtomicU32>(0, 33).is_err());
        assert!(region.slice::<AtomicU32>(124, 2).is_err());
        assert!(region.slice::<AtomicU32>(2, 1).is_err(), "misaligned");
        assert!(region.slice::<AtomicU32>(u64::MAX - 3, 1).is_err());
        assert!(region.slice::<AtomicU32>(0, u64::MAX / 2).is_err());
    }
}
