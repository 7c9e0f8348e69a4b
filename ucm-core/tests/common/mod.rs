//! A control plane on the heap, and a host that lives in one process.
//!
//! For what threads can show, under Miri too. Death is a byte given up
//! without any repair; real death is tested across processes elsewhere.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use ucm_core::cache::{Audit, Violation};
use ucm_core::host::{Liveness, Waiter};
use ucm_core::participant::{Introduction, ParticipantId, Role};
use ucm_core::ptr::Region;
use ucm_core::sync::AtomicU32;
use ucm_core::{
    BlockId, Cache, CacheShape, ControlPlane, Geometry, Got, Pinned, Place, SegmentIdentity,
    ShardKey,
};

/// Zeroed, page-aligned, freed on drop.
pub struct HeapPlane {
    base: NonNull<u8>,
    layout: Layout,
    pub geometry: Geometry,
    pub world: Arc<World>,
}

// SAFETY: the memory is reached through regions only, which are for any thread.
unsafe impl Sync for HeapPlane {}

/// What all participants of one process share beside the plane.
pub struct World {
    held: [AtomicBool; 32],
    /// A clock that tests move by hand; it also ticks by itself.
    clock_ns: AtomicU64,
    sleepers: Mutex<()>,
    woken: Condvar,
}

#[derive(Clone)]
pub struct ThreadHost(pub Arc<World>);

pub struct Byte(Arc<World>, u32);

impl Drop for Byte {
    fn drop(&mut self) {
        self.0.held[self.1 as usize].store(false, Ordering::SeqCst);
    }
}

impl World {
    pub fn advance_ns(&self, ns: u64) {
        self.clock_ns.fetch_add(ns, Ordering::SeqCst);
    }
}

impl Waiter for ThreadHost {
    fn now_ns(&self) -> u64 {
        self.0.clock_ns.fetch_add(100, Ordering::SeqCst)
    }

    fn wait(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) {
        let guard = self.0.sleepers.lock().unwrap();
        if word.load(Ordering::SeqCst) == expected {
            let timeout = std::time::Duration::from_nanos(timeout_ns.min(1_000_000));
            let (_guard, result) = self.0.woken.wait_timeout(guard, timeout).unwrap();
            if result.timed_out() {
                self.0.advance_ns(timeout_ns);
            }
        }
    }

    fn wake_all(&self, _word: &AtomicU32) {
        let _guard = self.0.sleepers.lock().unwrap();
        self.0.woken.notify_all();
    }

    fn pause(&self, ns: u64) {
        self.0.advance_ns(ns);
        std::thread::yield_now();
    }
}

impl Liveness for ThreadHost {
    type Claim = Byte;

    fn is_held(&self, participant: ParticipantId) -> bool {
        self.0.held[participant.index() as usize].load(Ordering::SeqCst)
    }

    fn try_claim(&self, participant: ParticipantId) -> Option<Byte> {
        let byte = &self.0.held[participant.index() as usize];
        (!byte.swap(true, Ordering::SeqCst)).then(|| Byte(self.0.clone(), participant.index()))
    }
}

pub fn shape(slot_count: u32, ranks: u32) -> CacheShape {
    CacheShape {
        slot_count,
        reserved_slots: 0,
        shard_bytes: 64,
        shards_per_block: 4,
        local_rank_size: ranks,
        participants: 32,
        content_tag: 0,
    }
}

pub const QUARANTINE_NS: u64 = 1_000_000_000;
pub const FAR_NS: u64 = 1 << 50;

impl HeapPlane {
    pub fn new(shape: CacheShape) -> Self {
        let geometry = Geometry::new(shape).unwrap();
        let layout = Layout::from_size_align(geometry.control_bytes as usize, 4096).unwrap();
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).expect("out of memory");
        let world = World {
            held: [const { AtomicBool::new(false) }; 32],
            clock_ns: AtomicU64::new(1),
            sleepers: Mutex::new(()),
            woken: Condvar::new(),
        };
        let this = Self { base, layout, geometry, world: Arc::new(world) };
        let identity = SegmentIdentity {
            nonce: 1,
            boot_id: [7; 16],
            created_unix_s: 0,
            io_quarantine_ns: QUARANTINE_NS,
            persist: false,
        };
        // SAFETY: zeroed just now and known to nobody.
        unsafe { ControlPlane::create(this.region(), &this.geometry, &identity) }.unwrap();
        this
    }

    pub fn region(&self) -> Region<'_> {
        // SAFETY: the memory lives as long as self and is touched through
        // regions only.
        unsafe { Region::new(self.base, self.layout.size()) }
    }

    pub fn plane(&self) -> ControlPlane<'_> {
        ControlPlane::attach(self.region(), Some(&self.geometry), &[7; 16]).unwrap()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: ours, and nobody borrows it now (`&mut self`).
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.layout.size()) }
    }

    pub fn rank(&self, rank: u32) -> Cache<'_, ThreadHost> {
        Cache::join(self.plane(), ThreadHost(self.world.clone()), Place::Rank(rank), who(rank))
            .unwrap()
    }

    pub fn scout(&self) -> Cache<'_, ThreadHost> {
        Cache::join(self.plane(), ThreadHost(self.world.clone()), Place::Any, who(0)).unwrap()
    }

    /// Frees the byte of `cache`, which goes on all the same.
    pub fn give_up_byte(&self, cache: &Cache<'_, ThreadHost>) {
        self.world.held[cache.me().index() as usize].store(false, Ordering::SeqCst);
    }

    /// `cache` dies on the spot: its byte is free, everything else stays.
    pub fn kill(&self, cache: Cache<'_, ThreadHost>) {
        let me = cache.me().index();
        let _never_dropped = ManuallyDrop::new(cache);
        self.world.held[me as usize].store(false, Ordering::SeqCst);
    }

    pub fn violations(&self) -> Vec<Violation> {
        let plane = self.plane();
        let mut found = Vec::new();
        Audit::new(&plane)
            .check(&ThreadHost(self.world.clone()), |violation| found.push(violation));
        found
    }

    /// No violation, no pin, and every slot accounted for.
    pub fn assert_sound(&self) {
        assert_eq!(self.violations(), []);
        let plane = self.plane();
        let audit = Audit::new(&plane);
        assert_eq!(audit.pins(), 0, "pins leaked");
        let census = audit.census();
        assert_eq!(census.total(), self.geometry.shape.slot_count);
        assert_eq!(census.claimed + census.inserting + census.loading + census.tagged, 0);
    }
}

impl Drop for HeapPlane {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; nothing borrows it any more.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

pub fn who(device: u32) -> Introduction {
    Introduction { role: Role::Rank, pid: std::process::id(), device, start_time: 0 }
}

pub fn key(id: u64) -> ShardKey {
    ShardKey::new(BlockId::from_words(id.wrapping_mul(0x9E37_79B9_7F4A_7C15), id), 0)
}

/// Loads `key` if it is not there; either way the result is pinned.
pub fn load(cache: &Cache<'_, ThreadHost>, key: &ShardKey) -> Pinned {
    match cache.get(key, FAR_NS).unwrap() {
        Got::Hit(pinned) => pinned,
        Got::Owner(loading) => cache.publish(loading, 64, 0).unwrap(),
        Got::Wait(pending) => cache.wait(pending, FAR_NS).unwrap(),
    }
}

/// As [`load`], and lets go of it. Says whether it was a hit.
pub fn access(cache: &Cache<'_, ThreadHost>, key: &ShardKey) -> bool {
    match cache.get(key, FAR_NS).unwrap() {
        Got::Hit(pinned) => {
            cache.release(pinned);
            true
        }
        Got::Owner(loading) => {
            cache.release(cache.publish(loading, 64, 0).unwrap());
            false
        }
        Got::Wait(pending) => {
            cache.release(cache.wait(pending, FAR_NS).unwrap());
            true
        }
    }
}
