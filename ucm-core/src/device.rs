//! The device that KV is copied to and from, and the host's own memory as one.

use core::fmt;

/// An address in a device's memory (for the host device, a plain address).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` further on, or `None` past the end of the address space.
    #[inline]
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dev:{:#x}", self.0)
    }
}

/// One stream of copies, in the order in which they were submitted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct QueueId(pub u64);

/// A point in a queue: done when everything submitted before it is done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fence(pub u64);

/// Which way a copy goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyKind {
    /// Host memory to device memory: a load.
    HostToDevice,
    /// Device memory to host memory: a dump.
    DeviceToHost,
}

/// One copy of `len_bytes` between host memory and the device.
#[derive(Clone, Copy, Debug)]
pub struct CopyOp {
    /// Which way.
    pub kind: CopyKind,
    /// The host side.
    pub host: *mut u8,
    /// The device side.
    pub device: DevicePtr,
    /// How much, in bytes.
    pub len_bytes: u64,
}

// SAFETY: a CopyOp is an instruction; whoever submits it vouches for both
// addresses (`Device::copy_batch`), on whatever thread that is.
unsafe impl Send for CopyOp {}

/// Why a device call did not do what was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no such device, or its driver is not here.
    Unavailable,
    /// Out of device memory: `requested_bytes` could not be had.
    OutOfMemory {
        /// How much was asked for.
        requested_bytes: u64,
    },
    /// The queue, fence or allocation is not one of this device's.
    UnknownHandle(u64),
    /// The driver refused `call` with `code`.
    Driver {
        /// The driver's function.
        call: &'static str,
        /// Its error code.
        code: i32,
    },
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable => f.write_str("no such device, or its driver is not installed"),
            Self::OutOfMemory { requested_bytes } => {
                write!(f, "out of device memory: {requested_bytes} bytes were asked for")
            }
            Self::UnknownHandle(handle) => write!(f, "handle {handle} is not one of this device's"),
            Self::Driver { call, code } => write!(f, "{call} failed with driver code {code}"),
        }
    }
}

impl core::error::Error for DeviceError {}

/// A device: memory, queues of copies, fences.
///
/// Object safe; handles are plain numbers so that an event that a framework
/// made can stand in for a [`Fence`].
pub trait Device: Send + Sync {
    /// What to call it in a message.
    fn name(&self) -> &str;

    /// Makes this device the calling thread's. Each thread that uses the
    /// device calls it once, first.
    fn bind(&self) -> Result<(), DeviceError>;

    /// A new queue of copies.
    fn queue(&self) -> Result<QueueId, DeviceError>;

    /// Submits copies to `queue`. They run in no particular order among
    /// themselves, after what was submitted before them.
    ///
    /// # Safety
    /// Both sides of every op must be valid for `len_bytes`, and stay so and
    /// unwritten by others until a [`Fence`] recorded after this call is done.
    unsafe fn copy_batch(&self, queue: QueueId, ops: &[CopyOp]) -> Result<(), DeviceError>;

    /// A fence behind everything submitted to `queue` so far.
    fn record(&self, queue: QueueId) -> Result<Fence, DeviceError>;

    /// Whether the fence has been reached. Never blocks.
    fn is_done(&self, fence: Fence) -> Result<bool, DeviceError>;

    /// Blocks until the fence has been reached.
    fn wait(&self, fence: Fence) -> Result<(), DeviceError>;

    /// Makes `queue` wait for an event of the caller's own framework.
    fn queue_wait_raw(&self, queue: QueueId, event: u64) -> Result<(), DeviceError>;

    /// Allocates device memory.
    fn alloc(&self, len_bytes: u64) -> Result<DevicePtr, DeviceError>;

    /// Gives device memory back.
    ///
    /// # Safety
    /// `ptr` must come from [`alloc`](Self::alloc) with the same length, and
    /// no copy may still touch it.
    unsafe fn free(&self, ptr: DevicePtr, len_bytes: u64) -> Result<(), DeviceError>;

    /// Registers host memory for direct copies. A device that needs none says yes.
    ///
    /// # Safety
    /// The range must stay mapped until [`unpin`](Self::unpin).
    unsafe fn pin(&self, base: *mut u8, len_bytes: u64) -> Result<(), DeviceError>;

    /// Undoes [`pin`](Self::pin); comes before the memory is unmapped.
    ///
    /// # Safety
    /// The range must be one that was pinned, with no copy under way in it.
    unsafe fn unpin(&self, base: *mut u8, len_bytes: u64) -> Result<(), DeviceError>;
}

/// The host's own memory as a device: a copy is a `memcpy` on the spot, so
/// every fence is done when it is made. Memory comes from the caller (the core
/// has no allocator), so `alloc` is [`DeviceError::Unavailable`].
#[derive(Clone, Copy, Debug, Default)]
pub struct HostDevice;

impl Device for HostDevice {
    fn name(&self) -> &str {
        "host"
    }

    fn bind(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn queue(&self) -> Result<QueueId, DeviceError> {
        Ok(QueueId(0))
    }

    unsafe fn copy_batch(&self, _queue: QueueId, ops: &[CopyOp]) -> Result<(), DeviceError> {
        for op in ops {
            let device = op.device.0 as usize as *mut u8;
            let (from, to) = match op.kind {
                CopyKind::HostToDevice => (op.host.cast_const(), device),
                CopyKind::DeviceToHost => (device.cast_const(), op.host),
            };
            // SAFETY: the caller vouches for both sides of every op; `copy`
            // also allows them to overlap.
            unsafe { core::ptr::copy(from, to, op.len_bytes as usize) }
        }
        Ok(())
    }

    fn record(&self, _queue: QueueId) -> Result<Fence, DeviceError> {
        Ok(Fence(0))
    }

    fn is_done(&self, _fence: Fence) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn wait(&self, _fence: Fence) -> Result<(), DeviceError> {
        Ok(())
    }

    fn queue_wait_raw(&self, _queue: QueueId, event: u64) -> Result<(), DeviceError> {
        // The host runs no streams, so no event can be one of its own.
        if event == 0 { Ok(()) } else { Err(DeviceError::UnknownHandle(event)) }
    }

    fn alloc(&self, _len_bytes: u64) -> Result<DevicePtr, DeviceError> {
        Err(DeviceError::Unavailable)
    }

    unsafe fn free(&self, ptr: DevicePtr, _len_bytes: u64) -> Result<(), DeviceError> {
        Err(DeviceError::UnknownHandle(ptr.0))
    }

    unsafe fn pin(&self, _base: *mut u8, _len_bytes: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn unpin(&self, _base: *mut u8, _len_bytes: u64) -> Result<(), DeviceError> {
        Ok(())
    }
}
