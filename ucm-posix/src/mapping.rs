//! A mapped file: unmapped when dropped, never inherited by a forked child.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::thread;

use memmap2::{Advice, MmapOptions, MmapRaw};
use ucm_core::sync::{AtomicU64, Ordering};

use crate::error::{LockError, OsError};
use crate::fork::{ForkStamp, PrivateFd};

/// Pages are populated, and files reserved, in pieces of this size: a signal
/// then costs one piece and not the whole.
pub(crate) const RANGE_BYTES: u64 = 256 << 20;
/// More threads than this only wait for memory bandwidth.
const MAX_POPULATE_THREADS: usize = 8;
/// NUMA nodes `mbind` can name here: 1024, more than any kernel is built with.
const NODE_MASK_WORDS: usize = 16;

/// A shared mapping of a whole file.
///
/// In a forked child the range is not mapped (`MADV_DONTFORK`): a child would
/// otherwise share, or copy, pages that devices write to. There the handle is
/// inert.
#[derive(Debug)]
pub struct Mapping {
    raw: ManuallyDrop<MmapRaw>,
    base: NonNull<u8>,
    stamp: ForkStamp,
}

// SAFETY: the handle only owns an address range; what may be done with the
// bytes is said by whoever makes references into it.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method changes the handle.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len_bytes` of the file, readable and writable or readable only.
    pub(crate) fn new(
        fd: &PrivateFd,
        path: &Path,
        len_bytes: u64,
        writable: bool,
    ) -> Result<Self, LockError> {
        let failed = |source: io::Error| OsError::new("mmap", path, source);
        let len = usize::try_from(len_bytes)
            .map_err(|_| failed(io::Error::from_raw_os_error(libc::EOVERFLOW)))?;
        let mut options = MmapOptions::new();
        options.len(len);
        let stamp = ForkStamp::now();
        let number = fd.get()?.as_raw_fd();
        let raw =
            if writable { options.map_raw(number) } else { options.map_raw_read_only(number) }
                .map_err(failed)?;
        let base = NonNull::new(raw.as_mut_ptr())
            .ok_or_else(|| failed(io::Error::from_raw_os_error(libc::ENOMEM)))?;
        raw.advise(Advice::DontFork)
            .map_err(|source| OsError::new("madvise(MADV_DONTFORK)", path, source))?;
        Ok(Self { raw: ManuallyDrop::new(raw), base, stamp })
    }

    /// Where it begins: on a page boundary, valid for [`len_bytes`](Self::len_bytes)
    /// for as long as this handle lives, in the process that made it.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// How long it is.
    pub fn len_bytes(&self) -> usize {
        self.raw.len()
    }

    /// Which process may use it.
    pub fn stamp(&self) -> ForkStamp {
        self.stamp
    }

    /// Asks for huge pages. Only a hint: where the system has none for shared
    /// memory, that is said once and small pages are used.
    pub(crate) fn advise_huge_pages(&self) {
        if let Err(error) = self.raw.advise(Advice::HugePage) {
            warn_once!(%error, "huge pages were asked for and refused; small pages are used");
            return;
        }
        let setting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
        if let Ok(text) = std::fs::read_to_string(setting)
            && (text.contains("[never]") || text.contains("[deny]"))
        {
            warn_once!(
                setting,
                value = text.trim(),
                "huge pages were asked for, but this system gives none to shared memory; set it \
                 to advise, or use a tmpfs mounted with huge=always"
            );
        }
    }

    /// Asks for pages of one NUMA node; before any page is there, because
    /// those that are stay where they are. Preferred and not bound: when the
    /// node is full, a bound allocation brings the OOM killer.
    pub(crate) fn prefer_node(&self, node: u32) {
        let mut mask = [0_u64; NODE_MASK_WORDS];
        match mask.get_mut(node as usize / 64) {
            Some(word) => *word = 1 << (node % 64),
            None => {
                warn_once!(node, "there can be no such NUMA node; memory is not placed");
                return;
            }
        }
        // SAFETY: the range is this mapping's and the mask is only read;
        // placement changes no byte.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.len_bytes(),
                libc::MPOL_PREFERRED,
                mask.as_ptr(),
                (NODE_MASK_WORDS * 64) as libc::c_ulong,
                0_u32,
            )
        };
        if result != 0 {
            let error = io::Error::last_os_error();
            warn_once!(%error, node, "mbind was refused; memory is not placed on the NUMA node");
        }
    }

    /// Brings all pages in, on several threads: within one file `fallocate`
    /// holds a lock, so this is what makes a large segment quick to create.
    /// Best effort, and safe on a full file system (an error, not SIGBUS):
    /// whether every page is there is for `fallocate` to say afterwards.
    pub(crate) fn populate(&self) {
        let len_bytes = self.len_bytes() as u64;
        let ranges = len_bytes.div_ceil(RANGE_BYTES);
        let next = AtomicU64::new(0);
        let work = || {
            loop {
                // Relaxed: hands out numbers and publishes nothing.
                let range = next.fetch_add(1, Ordering::Relaxed);
                if range >= ranges {
                    return;
                }
                let start = range * RANGE_BYTES;
                let len = RANGE_BYTES.min(len_bytes - start);
                let advice = Advice::PopulateWrite;
                while let Err(error) = self.raw.advise_range(advice, start as usize, len as usize) {
                    if error.raw_os_error() != Some(libc::EINTR) {
                        tracing::debug!(%error, start, len, "cannot populate a range");
                        next.store(ranges, Ordering::Relaxed);
                        return;
                    }
                }
            }
        };
        let threads = thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MAX_POPULATE_THREADS)
            .min(ranges as usize);
        thread::scope(|scope| {
            for _ in 1..threads {
                // A thread that cannot be had leaves its share to the others.
                if thread::Builder::new().spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            work();
        });
    }

    /// The address of the byte at `offset_bytes`, if `len_bytes` from there lie
    /// inside and this is the process that mapped them.
    pub(crate) fn place(&self, offset_bytes: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        let end = offset_bytes.checked_add(len_bytes)?;
        if end > self.len_bytes() as u64 || !self.stamp.is_current() {
            return None;
        }
        // SAFETY: the offset was just found inside the mapping.
        Some(unsafe { self.base.add(offset_bytes as usize) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.stamp.is_current() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.raw) }
        }
        // In a forked child the range was never mapped, and may be something
        // else's by now: nothing to undo.
    }
}
