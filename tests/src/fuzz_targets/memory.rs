//! A piece of heap that plays shared memory, and a host in which time passes by being asked for.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use ucm_core::channel::sleep::Barrier;
use ucm_core::host::{Liveness, Waiter};
use ucm_core::participant::ParticipantId;
use ucm_core::ptr::Region;
use ucm_core::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// Zeroed, page aligned, touched through atomics only.
pub struct Heap {
    base: NonNull<u8>,
    layout: Layout,
}

impl Heap {
    /// `bytes` of it, at least one.
    ///
    /// # Panics
    /// When there is no memory.
    pub fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes.max(1), 4096).expect("a small size");
        // SAFETY: not empty.
        let base = unsafe { alloc_zeroed(layout) };
        Self { base: NonNull::new(base).expect("out of memory"), layout }
    }

    /// Its beginning.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Its length.
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// As the core's region.
    pub fn region(&self) -> Region<'_> {
        // SAFETY: lives as long as `self`, page aligned, atomics only.
        unsafe { Region::new(self.base, self.layout.size()) }
    }

    /// Writes a byte, as a stray write of anybody does.
    pub fn write(&self, at: usize, byte: u8) {
        if let Ok(place) = self.region().at::<AtomicU8>(at as u64) {
            place.store(byte, Ordering::Relaxed);
        }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: from `new`, same layout; nothing borrows it any more.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

#[derive(Default)]
struct World {
    clock_ns: AtomicU64,
    /// A bit for whatever a slot's owner field can name, also beyond the table.
    held: [AtomicU32; 8],
}

/// Nobody lives but who has claimed a byte; nobody sleeps, time passes.
#[derive(Clone, Default)]
pub struct FuzzHost(Arc<World>);

/// A held byte.
pub struct Byte(Arc<World>, u32);

fn place(participant: u32) -> (usize, u32) {
    (participant as usize / 32, 1 << (participant % 32))
}

impl Drop for Byte {
    fn drop(&mut self) {
        let (word, bit) = place(self.1);
        self.0.held[word].fetch_and(!bit, Ordering::SeqCst);
    }
}

impl FuzzHost {
    /// The participant dies: its byte is free.
    pub fn kill(&self, participant: ParticipantId) {
        let (word, bit) = place(participant.index());
        self.0.held[word].fetch_and(!bit, Ordering::SeqCst);
    }
}

impl Waiter for FuzzHost {
    fn now_ns(&self) -> u64 {
        self.0.clock_ns.fetch_add(1000, Ordering::SeqCst)
    }

    fn wait(&self, _word: &AtomicU32, _expected: u32, timeout_ns: u64) {
        self.pause(timeout_ns);
    }

    fn wake_all(&self, _word: &AtomicU32) {}

    fn pause(&self, ns: u64) {
        self.0.clock_ns.fetch_add(ns.min(1 << 40), Ordering::SeqCst);
    }
}

impl Liveness for FuzzHost {
    type Claim = Byte;

    fn is_held(&self, participant: ParticipantId) -> bool {
        let (word, bit) = place(participant.index());
        self.0.held[word].load(Ordering::SeqCst) & bit != 0
    }

    fn try_claim(&self, participant: ParticipantId) -> Option<Byte> {
        let (word, bit) = place(participant.index());
        let before = self.0.held[word].fetch_or(bit, Ordering::SeqCst);
        (before & bit == 0).then(|| Byte(Arc::clone(&self.0), participant.index()))
    }
}

impl Barrier for FuzzHost {
    fn register(&self) -> bool {
        false
    }

    fn heavy_fence(&self) {
        fence(Ordering::SeqCst);
    }
}
