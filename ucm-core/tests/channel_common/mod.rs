//! A channel on the heap, and a host that lives in one process.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ucm_core::channel::layout::{CHANNEL_BYTES, RingLines};
use ucm_core::channel::sleep::Barrier;
use ucm_core::channel::{
    ByteArea, ByteConsumer, ByteProducer, ByteRing, ChannelMemory, EngineEnd, Mode, Parts,
    WorkerEnd,
};
use ucm_core::host::Waiter;
use ucm_core::sync::{AtomicU32, Ordering, fence};

pub const FAR_NS: u64 = u64::MAX;

/// Sleeps on a condition variable; one for all words.
#[derive(Clone)]
pub struct ThreadHost(Arc<(Mutex<()>, Condvar, Instant)>);

impl ThreadHost {
    pub fn new() -> Self {
        Self(Arc::new((Mutex::new(()), Condvar::new(), Instant::now())))
    }
}

impl Waiter for ThreadHost {
    fn now_ns(&self) -> u64 {
        self.0.2.elapsed().as_nanos() as u64
    }
    fn wait(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) {
        let guard = self.0.0.lock().unwrap();
        if word.load(Ordering::SeqCst) == expected {
            // So long that a wake-up that was lost shows as a hang.
            let timeout = Duration::from_nanos(timeout_ns.min(60_000_000_000));
            drop(self.0.1.wait_timeout(guard, timeout).unwrap());
        }
    }
    fn wake_all(&self, _word: &AtomicU32) {
        let _guard = self.0.0.lock().unwrap();
        self.0.1.notify_all();
    }
    fn pause(&self, _ns: u64) {
        std::thread::yield_now();
    }
}

impl Barrier for ThreadHost {
    fn register(&self) -> bool {
        false
    }
    fn heavy_fence(&self) {
        fence(Ordering::SeqCst);
    }
}

pub type Engine<'m> = EngineEnd<'m, ThreadHost>;
pub type Worker<'m> = WorkerEnd<'m, ThreadHost>;

/// Zeroed, page-aligned, freed on drop.
pub struct Heap {
    base: NonNull<u8>,
    layout: Layout,
    pub host: ThreadHost,
}

// SAFETY: plain memory, reached through a channel's ends and, by hostile tests,
// through atomics.
unsafe impl Sync for Heap {}

impl Heap {
    pub fn of(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 4096).unwrap();
        // SAFETY: not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Self { base, layout, host: ThreadHost::new() }
    }

    /// A fresh channel.
    pub fn channel() -> Self {
        let heap = Self::of(CHANNEL_BYTES as usize);
        heap.memory().initialise();
        heap
    }

    pub fn memory(&self) -> ChannelMemory<'_> {
        // SAFETY: valid as long as `self`; tests keep to the ends, or to atomics.
        unsafe { ChannelMemory::new(self.base, self.layout.size() as u64) }.unwrap()
    }

    pub fn parts(&self) -> Parts<'_> {
        self.memory().attach().unwrap()
    }

    pub fn engine(&self) -> Engine<'_> {
        // SAFETY: each test takes it once at a time.
        unsafe { EngineEnd::attach(self.parts(), self.host.clone(), Mode::SLEEPS, 10) }.unwrap()
    }

    pub fn worker(&self) -> Worker<'_> {
        // SAFETY: each test takes it once at a time.
        unsafe { WorkerEnd::attach(self.parts(), self.host.clone(), Mode::SLEEPS, 10) }.unwrap()
    }

    /// A shared word, as a peer of whatever kind may write it.
    pub fn word(&self, offset_bytes: usize) -> &AtomicU32 {
        assert!(offset_bytes + 4 <= self.layout.size() && offset_bytes.is_multiple_of(4));
        // SAFETY: inside the memory, by the line above.
        let place = unsafe { self.base.as_ptr().add(offset_bytes) };
        // SAFETY: aligned and alive as long as `self`; tests use it for words
        // that the channel reaches through atomics too, and for the ring's
        // bytes only while no other thread does.
        unsafe { &*place.cast::<AtomicU32>() }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: from `of`, same layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// A small ring by itself, whose positions begin where a test wants.
pub struct SmallRing {
    heap: Heap,
    lines: RingLines,
    capacity_bytes: u32,
}

impl SmallRing {
    pub fn new(capacity_bytes: u32, position: u32) -> Self {
        let lines = RingLines::new(capacity_bytes, position);
        Self { heap: Heap::of(capacity_bytes as usize), lines, capacity_bytes }
    }

    pub fn ends(&self) -> (ByteProducer<'_, ThreadHost>, ByteConsumer<'_, ThreadHost>) {
        // SAFETY: the heap has that many bytes, and only the ring's ends reach them.
        let bytes = unsafe { ByteArea::new(self.heap.base, self.capacity_bytes) };
        let ring = ByteRing::new(&self.lines, bytes);
        let host = self.heap.host.clone();
        let mode = Mode::SLEEPS;
        // SAFETY: a test takes the ends once at a time.
        let producer = unsafe { ByteProducer::new(ring, host.clone(), mode, 2, 10) };
        // SAFETY: as above.
        let consumer = unsafe { ByteConsumer::new(ring, host, mode, 2, 10) };
        (producer.unwrap(), consumer.unwrap())
    }
}
