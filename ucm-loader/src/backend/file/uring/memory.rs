//! Memory that is registered with a ring: its pages are pinned once, not with every read.

use io_uring::IoUring;

use crate::backend::traits::SharedMemory;

/// The kernel's limit on one registered buffer.
const MAX_BUFFER_BYTES: usize = 1 << 30;
/// And on their number, with a margin below the oldest kernels' 1024.
const MAX_BUFFERS: usize = 1000;

/// The registered range.
#[derive(Default)]
pub(super) struct Registered {
    start: usize,
    len_bytes: usize,
    /// Keeps it mapped as long as the ring knows of it.
    memory: Option<SharedMemory>,
}

impl Registered {
    /// Registers `memory`, once. Where the limits do not allow it, one warning
    /// says so and reads go on without.
    pub(super) fn register(&mut self, ring: &IoUring, memory: SharedMemory) {
        if self.memory.is_some() {
            tracing::debug!("a ring's memory was given twice; the first stays registered");
            return;
        }
        let (start, len_bytes) = (memory.start as usize, memory.len_bytes);
        let pieces = len_bytes.div_ceil(MAX_BUFFER_BYTES);
        let piece = |number: usize| {
            let offset = number * MAX_BUFFER_BYTES;
            let iov_base = memory.start.wrapping_add(offset).cast();
            libc::iovec { iov_base, iov_len: MAX_BUFFER_BYTES.min(len_bytes - offset) }
        };
        let buffers: Vec<_> = (0..pieces.min(MAX_BUFFERS)).map(piece).collect();
        if buffers.is_empty() {
            return;
        }
        // SAFETY: the range is mapped as long as `memory` lives, which from
        // here on is until the ring is dropped (the driver's field order).
        match unsafe { ring.submitter().register_buffers(&buffers) } {
            Ok(()) => {
                let len_bytes = len_bytes.min(MAX_BUFFERS * MAX_BUFFER_BYTES);
                *self = Self { start, len_bytes, memory: Some(memory) };
            }
            Err(error) => {
                let errno = error.raw_os_error();
                tracing::warn!(
                    errno,
                    len_bytes,
                    "the cache's memory cannot be registered (ulimit -l); each read pins its pages"
                );
            }
        }
    }

    /// The number of the buffer that has all of these bytes.
    pub(super) fn buffer_of(&self, address: usize, len_bytes: usize) -> Option<u16> {
        let offset = address.checked_sub(self.start)?;
        let end = offset.checked_add(len_bytes)?;
        if end > self.len_bytes || len_bytes == 0 {
            return None;
        }
        let (first, last) = (offset / MAX_BUFFER_BYTES, (end - 1) / MAX_BUFFER_BYTES);
        if first == last { u16::try_from(first).ok() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bytes_that_lie_in_one_registered_buffer_have_a_number() {
        let none = Registered::default();
        assert_eq!(none.buffer_of(4096, 4096), None);
        let (start, len_bytes) = (1 << 40, MAX_BUFFER_BYTES + 8192);
        let some = Registered { start, len_bytes, memory: None };
        assert_eq!(some.buffer_of(start, 4096), Some(0));
        assert_eq!(some.buffer_of(start + MAX_BUFFER_BYTES - 4096, 4096), Some(0));
        assert_eq!(some.buffer_of(start + MAX_BUFFER_BYTES, 8192), Some(1));
        assert_eq!(some.buffer_of(start + MAX_BUFFER_BYTES - 4096, 8192), None);
        assert_eq!(some.buffer_of(start + MAX_BUFFER_BYTES, 8193), None);
        assert_eq!(some.buffer_of(start - 4096, 4096), None);
        assert_eq!(some.buffer_of(usize::MAX, 4096), None);
        assert_eq!(some.buffer_of(start, 0), None);
    }
}
