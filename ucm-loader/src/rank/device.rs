//! Memory that plays a device in a rank process.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use ucm_core::DevicePtr;

/// Page-aligned memory, never touched by two commands at a time (the parent
/// gives each its own range).
pub(crate) struct DeviceMemory {
    base: NonNull<u8>,
    layout: Layout,
    shard_bytes: usize,
}

// SAFETY: plain memory; who may touch which range is the parent's word, as it
// is an engine's user's word on a real device.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    pub(crate) fn new(shards: u64, shard_bytes: u64) -> Result<Self, String> {
        let too_large = || format!("a device of {shards} shards of {shard_bytes} bytes");
        let len = shards.checked_mul(shard_bytes).ok_or_else(too_large)?;
        let len = usize::try_from(len).map_err(|_| too_large())?.max(1);
        let layout = Layout::from_size_align(len, 4096).map_err(|_| too_large())?;
        // SAFETY: at least one byte.
        let base = unsafe { alloc_zeroed(layout) };
        let base =
            NonNull::new(base).ok_or_else(|| format!("out of memory for {}", too_large()))?;
        Ok(Self { base, layout, shard_bytes: shard_bytes as usize })
    }

    pub(crate) fn shards(&self) -> u64 {
        (self.layout.size() / self.shard_bytes) as u64
    }

    /// The bytes of shard `at`, which the current command alone uses.
    #[allow(clippy::mut_from_ref, reason = "device memory: ranges are handed out by the parent")]
    pub(crate) fn shard(&self, at: u64) -> &mut [u8] {
        assert!(at < self.shards(), "checked when the command came");
        // SAFETY: inside the allocation, by the line above.
        let first = unsafe { self.base.as_ptr().add(at as usize * self.shard_bytes) };
        // SAFETY: initialised (zeroed) memory; the range is this command's
        // alone, and no copy is under way in it between tasks.
        unsafe { std::slice::from_raw_parts_mut(first, self.shard_bytes) }
    }

    pub(crate) fn address(&self, at: u64) -> DevicePtr {
        DevicePtr(self.base.as_ptr() as u64 + at * self.shard_bytes as u64)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}
