//! A piece of shared memory that holds plain bytes, copied in and out whole.
//!
//! The bytes are not atomics: who may touch which of them when is decided by
//! the words beside them (a position, a status), and said at every copy. They
//! are never lent out as slices, because another process, broken or hostile,
//! could change them under the borrower; what was copied is then garbage, but
//! it is garbage that stands still while it is checked.
//!
//! Under the model checker each byte is a checked cell, so a copy that the
//! words do not allow is a data race that it reports.

use core::marker::PhantomData;
#[cfg(not(ucm_loom))]
use core::ptr::NonNull;

#[cfg(ucm_loom)]
use crate::sync::Cell;

/// A power of two of bytes, addressed by positions that wrap.
#[cfg(not(ucm_loom))]
#[derive(Clone, Copy)]
pub struct ByteArea<'m> {
    base: NonNull<u8>,
    mask: u32,
    _memory: PhantomData<&'m [u8]>,
}

// SAFETY: the area is touched by copies alone, each of which says why nobody
// else touches those bytes.
#[cfg(not(ucm_loom))]
unsafe impl Send for ByteArea<'_> {}
// SAFETY: as above.
#[cfg(not(ucm_loom))]
unsafe impl Sync for ByteArea<'_> {}

#[cfg(not(ucm_loom))]
impl<'m> ByteArea<'m> {
    /// Describes `capacity_bytes` of memory, a power of two.
    ///
    /// # Safety
    /// `base` must be valid for reads and writes of that many bytes for all of
    /// `'m`, and reached by nobody but through areas.
    ///
    /// # Panics
    /// When the capacity is not a power of two below 2^31.
    pub unsafe fn new(base: NonNull<u8>, capacity_bytes: u32) -> Self {
        assert!(capacity_bytes.is_power_of_two() && capacity_bytes <= 1 << 30);
        Self { base, mask: capacity_bytes - 1, _memory: PhantomData }
    }

    /// How long it is.
    #[inline(always)]
    pub fn capacity_bytes(&self) -> u32 {
        self.mask + 1
    }

    /// Copies `bytes` to `position` and on, around the end.
    ///
    /// # Safety
    /// Nobody else accesses those places during the call, and `bytes` are no
    /// more than the capacity.
    #[inline(always)]
    pub(crate) unsafe fn copy_in(&self, position: u32, bytes: &[u8]) {
        let at = (position & self.mask) as usize;
        let first = bytes.len().min(self.capacity_bytes() as usize - at);
        // SAFETY: `at` is masked below the capacity.
        let to = unsafe { self.base.as_ptr().add(at) };
        if first == bytes.len() {
            // SAFETY: `bytes` end before the area does, and are private memory
            // that cannot overlap it; the places are ours (caller).
            unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            return;
        }
        let (front, back) = bytes.split_at(first);
        // SAFETY: `front` fills the area exactly to its end.
        unsafe { core::ptr::copy_nonoverlapping(front.as_ptr(), to, front.len()) };
        // SAFETY: `back` begins at the area's start and, since all of `bytes`
        // fit into it, ends before `at`.
        unsafe { core::ptr::copy_nonoverlapping(back.as_ptr(), self.base.as_ptr(), back.len()) };
    }

    /// Copies what is at `position` and on, around the end, into `out`.
    ///
    /// # Safety
    /// As for [`copy_in`](Self::copy_in), with writers in place of accessors.
    #[inline(always)]
    pub(crate) unsafe fn copy_out(&self, position: u32, out: &mut [u8]) {
        let at = (position & self.mask) as usize;
        let first = out.len().min(self.capacity_bytes() as usize - at);
        // SAFETY: `at` is masked below the capacity.
        let from = unsafe { self.base.as_ptr().add(at) };
        if first == out.len() {
            // SAFETY: ends before the area does; `out` is private memory.
            unsafe { core::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
            return;
        }
        let (front, back) = out.split_at_mut(first);
        // SAFETY: `front` is what is left to the area's end.
        unsafe { core::ptr::copy_nonoverlapping(from, front.as_mut_ptr(), front.len()) };
        let start = self.base.as_ptr();
        // SAFETY: `back` is shorter than the area.
        unsafe { core::ptr::copy_nonoverlapping(start, back.as_mut_ptr(), back.len()) };
    }
}

/// A power of two of bytes, addressed by positions that wrap.
#[cfg(ucm_loom)]
#[derive(Clone, Copy)]
pub struct ByteArea<'m> {
    cells: &'m [Cell<u8>],
    _memory: PhantomData<&'m [u8]>,
}

// SAFETY: the model checker reports every access that another races with.
#[cfg(ucm_loom)]
unsafe impl Send for ByteArea<'_> {}
// SAFETY: as above.
#[cfg(ucm_loom)]
unsafe impl Sync for ByteArea<'_> {}

#[cfg(ucm_loom)]
impl<'m> ByteArea<'m> {
    /// Over checked cells.
    pub fn of_cells(cells: &'m [Cell<u8>]) -> Self {
        assert!(cells.len().is_power_of_two());
        Self { cells, _memory: PhantomData }
    }

    /// How long it is.
    pub fn capacity_bytes(&self) -> u32 {
        self.cells.len() as u32
    }

    pub(crate) unsafe fn copy_in(&self, position: u32, bytes: &[u8]) {
        for (i, byte) in bytes.iter().enumerate() {
            let at = position.wrapping_add(i as u32) as usize % self.cells.len();
            // SAFETY: the model checker refuses a second accessor.
            self.cells[at].with_mut(|place| unsafe { *place = *byte });
        }
    }

    pub(crate) unsafe fn copy_out(&self, position: u32, out: &mut [u8]) {
        for (i, byte) in out.iter_mut().enumerate() {
            let at = position.wrapping_add(i as u32) as usize % self.cells.len();
            // SAFETY: the model checker refuses a second accessor.
            self.cells[at].with_mut(|place| *byte = unsafe { *place });
        }
    }
}
