//! A backend that holds loads back, and a device that fails where it is told to.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use ucm_core::DevicePtr;
use ucm_core::device::{CopyOp, Device, DeviceError, Fence, HostDevice, QueueId};
use ucm_core::key::BlockId;
use ucm_loader::LoaderConfig;
use ucm_loader::backend::open::open;
use ucm_loader::backend::traits::{Backend, BackendError, LoadRequest, StoreRequest};

/// Holds every load until it is opened.
pub struct Gate {
    inner: Arc<dyn Backend>,
    /// `None` once it is open.
    held: Mutex<Option<Vec<LoadRequest>>>,
    opened: Condvar,
}

/// Holds the stores of all but the first shard of each block until it is opened.
pub struct StoreGate {
    inner: Arc<dyn Backend>,
    held: Mutex<Option<Vec<StoreRequest>>>,
}

impl StoreGate {
    /// A closed gate before the backend of `config`.
    pub fn closed(config: &LoaderConfig) -> Arc<Self> {
        let inner = open(&config.clone().check().unwrap(), None).unwrap();
        Arc::new(Self { inner, held: Mutex::new(Some(Vec::new())) })
    }

    /// Lets everything through, now and from now on.
    pub fn open(&self) {
        let held = self.held.lock().unwrap().take();
        held.into_iter().flatten().for_each(|request| self.inner.put(request));
    }

    /// Stores it holds.
    pub fn holds(&self) -> usize {
        self.held.lock().unwrap().as_ref().map_or(0, Vec::len)
    }
}

impl Backend for StoreGate {
    fn submit(&self, batch: Vec<LoadRequest>) {
        self.inner.submit(batch);
    }

    fn put(&self, request: StoreRequest) {
        match &mut *self.held.lock().unwrap() {
            Some(held) if request.key().shard > 0 => held.push(request),
            _ => self.inner.put(request),
        }
    }

    fn discard(&self, block: BlockId) {
        self.inner.discard(block);
    }

    fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError> {
        self.inner.exists(blocks)
    }

    fn flush(&self, deadline: Instant) -> Result<(), BackendError> {
        self.inner.flush(deadline)
    }

    fn shutdown(&self, deadline: Instant) -> Result<(), BackendError> {
        self.inner.shutdown(deadline)
    }
}

impl Gate {
    /// A closed gate before the backend of `config`.
    pub fn closed(config: &LoaderConfig) -> Arc<Self> {
        let inner = open(&config.clone().check().unwrap(), None).unwrap();
        Arc::new(Self { inner, held: Mutex::new(Some(Vec::new())), opened: Condvar::new() })
    }

    /// Lets everything through, now and from now on.
    pub fn open(&self) {
        let held = self.held.lock().unwrap().take();
        self.inner.submit(held.unwrap_or_default());
        self.opened.notify_all();
    }

    /// Loads it holds.
    pub fn holds(&self) -> usize {
        self.held.lock().unwrap().as_ref().map_or(0, Vec::len)
    }
}

impl Backend for Gate {
    fn submit(&self, batch: Vec<LoadRequest>) {
        match &mut *self.held.lock().unwrap() {
            Some(held) => held.extend(batch),
            None => self.inner.submit(batch),
        }
    }

    fn put(&self, request: StoreRequest) {
        self.inner.put(request);
    }

    fn discard(&self, block: BlockId) {
        self.inner.discard(block);
    }

    fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError> {
        self.inner.exists(blocks)
    }

    fn flush(&self, deadline: Instant) -> Result<(), BackendError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let held = self.held.lock().unwrap();
        let busy = |held: &mut Option<Vec<LoadRequest>>| {
            held.as_ref().is_some_and(|loads| !loads.is_empty())
        };
        let (held, waited) = self.opened.wait_timeout_while(held, left, busy).unwrap();
        if waited.timed_out() {
            return Err(BackendError::TimedOut);
        }
        drop(held);
        self.inner.flush(deadline)
    }

    fn shutdown(&self, deadline: Instant) -> Result<(), BackendError> {
        self.inner.shutdown(deadline)
    }
}

/// The host as a device, except that copies to or from some addresses fail.
#[derive(Default)]
pub struct BadDevice {
    bad: Mutex<Vec<DevicePtr>>,
}

impl BadDevice {
    pub const ERROR: DeviceError = DeviceError::Driver { call: "copy", code: 719 };

    /// From now on copies at exactly these addresses fail.
    pub fn fail_at(&self, addresses: &[DevicePtr]) {
        *self.bad.lock().unwrap() = addresses.to_vec();
    }
}

impl Device for BadDevice {
    fn name(&self) -> &str {
        "bad"
    }

    fn bind(&self) -> Result<(), DeviceError> {
        HostDevice.bind()
    }

    fn queue(&self) -> Result<QueueId, DeviceError> {
        HostDevice.queue()
    }

    unsafe fn copy_batch(&self, queue: QueueId, ops: &[CopyOp]) -> Result<(), DeviceError> {
        let bad = self.bad.lock().unwrap();
        if ops.iter().any(|op| bad.contains(&op.device)) {
            return Err(Self::ERROR);
        }
        // SAFETY: the caller's word, passed on.
        unsafe { HostDevice.copy_batch(queue, ops) }
    }

    fn record(&self, queue: QueueId) -> Result<Fence, DeviceError> {
        HostDevice.record(queue)
    }

    fn is_done(&self, fence: Fence) -> Result<bool, DeviceError> {
        HostDevice.is_done(fence)
    }

    fn wait(&self, fence: Fence) -> Result<(), DeviceError> {
        HostDevice.wait(fence)
    }

    fn queue_wait_raw(&self, queue: QueueId, event: u64) -> Result<(), DeviceError> {
        HostDevice.queue_wait_raw(queue, event)
    }

    fn alloc(&self, len_bytes: u64) -> Result<DevicePtr, DeviceError> {
        HostDevice.alloc(len_bytes)
    }

    unsafe fn free(&self, ptr: DevicePtr, len_bytes: u64) -> Result<(), DeviceError> {
        // SAFETY: the caller's word, passed on.
        unsafe { HostDevice.free(ptr, len_bytes) }
    }

    unsafe fn pin(&self, base: *mut u8, len_bytes: u64) -> Result<(), DeviceError> {
        // SAFETY: the caller's word, passed on.
        unsafe { HostDevice.pin(base, len_bytes) }
    }

    unsafe fn unpin(&self, base: *mut u8, len_bytes: u64) -> Result<(), DeviceError> {
        // SAFETY: the caller's word, passed on.
        unsafe { HostDevice.unpin(base, len_bytes) }
    }
}
