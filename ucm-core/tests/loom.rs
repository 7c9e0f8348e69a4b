//! Model checks of the real code: every interleaving of a few threads, up to a
//! bound of preemptions, with every value a load may legally return.
//!
//! `RUSTFLAGS="--cfg ucm_loom" cargo test -p ucm-core --test loom --release`
//!
//! The bytes of a slot are a checked cell, so a wrong ordering is a data race
//! that the checker reports; the futex is a mutex and a condition variable
//! with no timeout, so a lost wake-up is a deadlock that it reports.
#![cfg(ucm_loom)]
#![allow(clippy::unwrap_used, reason = "a model that cannot go on fails")]

mod channel_loom;

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use ucm_core::cache::{Audit, Cache, GetError, Got, Pinned, Place, ReapOutcome, WaitError};
use ucm_core::host::{Liveness, Waiter};
use ucm_core::participant::{Introduction, ParticipantId, Role};
use ucm_core::ptr::Region;
use ucm_core::ring::{Ring, Slot};
use ucm_core::sync::AtomicU32;
use ucm_core::{BlockId, CacheShape, ControlPlane, Geometry, SegmentIdentity, ShardKey};

const FAR_NS: u64 = u64::MAX;

#[derive(Clone)]
struct LoomHost(Arc<System>);

/// The futex, and the lock bytes.
struct System {
    sleepers: Mutex<()>,
    woken: Condvar,
    held: [AtomicU32; 3],
}

/// A lock byte; given back when dropped.
struct Byte(Arc<System>, usize);

impl Drop for Byte {
    fn drop(&mut self) {
        self.0.held[self.1].store(0, SeqCst);
    }
}

impl Waiter for LoomHost {
    fn now_ns(&self) -> u64 {
        1
    }
    fn wait(&self, word: &AtomicU32, expected: u32, _timeout_ns: u64) {
        let guard = self.0.sleepers.lock().unwrap();
        if word.load(SeqCst) == expected {
            drop(self.0.woken.wait(guard).unwrap());
        }
    }
    fn wake_all(&self, _word: &AtomicU32) {
        let _guard = self.0.sleepers.lock().unwrap();
        self.0.woken.notify_all();
    }
    fn pause(&self, _ns: u64) {
        thread::yield_now();
    }
}

impl Liveness for LoomHost {
    type Claim = Byte;
    fn is_held(&self, participant: ParticipantId) -> bool {
        self.0.held[participant.index() as usize].load(SeqCst) == 1
    }
    fn try_claim(&self, participant: ParticipantId) -> Option<Byte> {
        let byte = participant.index() as usize;
        let taken = self.0.held[byte].compare_exchange(0, 1, SeqCst, SeqCst).is_ok();
        taken.then(|| Byte(self.0.clone(), byte))
    }
}

/// A tiny segment, its data, and ranks that never leave (so that a model
/// holds nothing but the steps it is about).
struct Model {
    base: NonNull<u8>,
    layout: Layout,
    host: LoomHost,
    data: Vec<UnsafeCell<u64>>,
}

// SAFETY: the memory is reached through regions only; the cells check for
// themselves.
unsafe impl Send for Model {}
// SAFETY: as above.
unsafe impl Sync for Model {}

const BOOT: [u8; 16] = [0; 16];

impl Model {
    fn new(slot_count: u32) -> Arc<Self> {
        let shape = CacheShape {
            slot_count,
            reserved_slots: 0,
            shard_bytes: 64,
            shards_per_block: 1,
            local_rank_size: slot_count.min(2),
            participants: 3,
            content_tag: 0,
        };
        let geometry = Geometry::new(shape).unwrap();
        let layout = Layout::from_size_align(geometry.control_bytes as usize, 4096).unwrap();
        // SAFETY: not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        let host = LoomHost(Arc::new(System {
            sleepers: Mutex::new(()),
            woken: Condvar::new(),
            held: std::array::from_fn(|_| AtomicU32::new(0)),
        }));
        let data = (0..slot_count).map(|_| UnsafeCell::new(0)).collect();
        let model = Self { base, layout, host, data };
        let identity = SegmentIdentity {
            nonce: 0,
            boot_id: BOOT,
            created_unix_s: 0,
            io_quarantine_ns: 0,
            persist: false,
        };
        // SAFETY: fresh, and nobody else's.
        unsafe { ControlPlane::create(model.region(), &geometry, &identity) }.unwrap();
        Arc::new(model)
    }

    fn region<'m>(&self) -> Region<'m> {
        // SAFETY: every user holds an Arc of the model for as long as it runs.
        unsafe { Region::new(self.base, self.layout.size()) }
    }

    fn plane<'m>(&self) -> ControlPlane<'m> {
        ControlPlane::attach(self.region(), None, &BOOT).unwrap()
    }

    fn participant<'m>(&self, place: Place) -> Rank<'m> {
        let who = Introduction { role: Role::Rank, pid: 0, device: 0, start_time: 0 };
        ManuallyDrop::new(Cache::join(self.plane(), self.host.clone(), place, who).unwrap())
    }

    /// The rank is gone: its byte is free, and it does nothing any more.
    fn kill(&self, rank: Rank<'_>) {
        self.host.0.held[rank.me().index() as usize].store(0, SeqCst);
    }

    fn write(&self, slot: u32, id: u64) {
        // SAFETY: the model checker refuses a second accessor.
        self.data[slot as usize].with_mut(|bytes| unsafe { *bytes = id });
    }

    fn check(&self, slot: u32, id: u64) {
        // SAFETY: the model checker refuses a writer beside us.
        let found = self.data[slot as usize].with(|bytes| unsafe { *bytes });
        assert_eq!(found, id, "wrong bytes in slot {slot}");
    }

    /// Loads `id` or uses it; returns whether this rank loaded it.
    fn use_key(&self, cache: &Rank<'_>, id: u64) -> Option<bool> {
        let (pinned, loaded) = match cache.get(&key(id), 0) {
            Ok(Got::Hit(pinned)) => (pinned, false),
            Ok(Got::Owner(loading)) => {
                self.write(loading.slot(), id);
                (cache.publish(loading, 8, 0).unwrap(), true)
            }
            Ok(Got::Wait(pending)) => (cache.wait(pending, FAR_NS).unwrap(), false),
            Err(GetError::NothingEvictable | GetError::Deadline | GetError::BucketsPinned) => {
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        self.check(pinned.slot(), id);
        cache.release(pinned);
        Some(loaded)
    }

    fn assert_sound(&self) {
        let plane = self.plane();
        let audit = Audit::new(&plane);
        audit.check(&self.host, |violation| panic!("{violation:?}"));
        assert_eq!(audit.pins(), 0);
        let census = audit.census();
        assert_eq!(census.claimed + census.inserting + census.loading + census.tagged, 0);
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: from `new`, same layout; the ranks are gone or leaked.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

type Rank<'m> = ManuallyDrop<Cache<'m, LoomHost>>;

fn key(id: u64) -> ShardKey {
    ShardKey::new(BlockId::from_words(id, 0), 0)
}

fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(model);
}

#[test]
fn a_pinned_slot_is_not_evicted_under_its_reader() {
    explore(3, || {
        let model = Model::new(1);
        let reader = model.participant(Place::Rank(0));
        let evictor = model.participant(Place::Any);
        assert_eq!(model.use_key(&reader, 1), Some(true));
        let m = model.clone();
        let evicting = thread::spawn(move || m.use_key(&evictor, 2));
        model.use_key(&reader, 1);
        evicting.join().unwrap();
        model.assert_sound();
    });
}

#[test]
fn a_waiter_sees_the_bytes_and_is_always_woken() {
    explore(3, || {
        let model = Model::new(2);
        let owner = model.participant(Place::Rank(0));
        let waiter = model.participant(Place::Rank(1));
        let Ok(Got::Owner(loading)) = owner.get(&key(1), 0) else { panic!() };
        let m = model.clone();
        let waiting = thread::spawn(move || m.use_key(&waiter, 1));
        model.write(loading.slot(), 1);
        let pinned: Pinned = owner.publish(loading, 8, 0).unwrap();
        owner.release(pinned);
        assert_eq!(waiting.join().unwrap(), Some(false));
        model.assert_sound();
    });
}

#[test]
fn a_waiter_of_a_failed_load_gets_the_code() {
    explore(3, || {
        let model = Model::new(2);
        let owner = model.participant(Place::Rank(0));
        let waiter = model.participant(Place::Rank(1));
        let Ok(Got::Owner(loading)) = owner.get(&key(1), 0) else { panic!() };
        let Ok(Got::Wait(pending)) = waiter.get(&key(1), 0) else { panic!() };
        let waiting = thread::spawn(move || waiter.wait(pending, FAR_NS));
        let code = ucm_core::slot::meta::LoadErrorCode(28);
        owner.fail(loading, code).unwrap();
        let seen = waiting.join().unwrap();
        assert_eq!(seen, Err(WaitError::Failed(code)));
        model.assert_sound();
    });
}

#[test]
fn two_inserters_of_one_key_make_one_owner() {
    explore(2, || {
        let model = Model::new(2);
        let one = model.participant(Place::Rank(0));
        let two = model.participant(Place::Rank(1));
        let m = model.clone();
        let other = thread::spawn(move || m.use_key(&two, 1));
        let mine = model.use_key(&one, 1);
        let theirs = other.join().unwrap();
        let owners = [mine, theirs].into_iter().filter(|loaded| *loaded == Some(true)).count();
        assert!(owners <= 1, "both loaded the key");
        model.assert_sound();
    });
}

#[test]
fn two_inserters_of_one_key_that_publish_in_different_places_make_one_owner() {
    // An entry is there already; whoever evicts it frees a place before the
    // one that the other, who saw it, has taken.
    let first_bucket = |id| key(id).hash().buckets(1).0;
    let neighbour = (2..).find(|&id| first_bucket(id) == first_bucket(1)).unwrap();
    explore(3, move || {
        let model = Model::new(2);
        let one = model.participant(Place::Rank(0));
        let two = model.participant(Place::Rank(1));
        model.use_key(&one, neighbour);
        let m = model.clone();
        let other = thread::spawn(move || m.use_key(&two, 1));
        let mine = model.use_key(&one, 1);
        let theirs = other.join().unwrap();
        let owners = [mine, theirs].into_iter().filter(|loaded| *loaded == Some(true)).count();
        assert!(owners <= 1, "both loaded the key");
        model.assert_sound();
    });
}

#[test]
fn two_inserters_that_take_each_others_victims_stay_consistent() {
    explore(2, || {
        let model = Model::new(2);
        let one = model.participant(Place::Rank(0));
        let two = model.participant(Place::Rank(1));
        model.use_key(&one, 1);
        model.use_key(&one, 2);
        let m = model.clone();
        let other = thread::spawn(move || m.use_key(&two, 1));
        model.use_key(&one, 3);
        other.join().unwrap();
        model.assert_sound();
    });
}

#[test]
fn two_reapers_repair_a_dead_owner_once() {
    explore(3, || {
        let model = Model::new(2);
        let dead = model.participant(Place::Any);
        let one = model.participant(Place::Rank(0));
        let two = model.participant(Place::Rank(1));
        let Ok(Got::Owner(_unfinished)) = dead.get(&key(1), 0) else { panic!() };
        let who = dead.me();
        model.kill(dead);
        let other = thread::spawn(move || two.reap(who));
        let outcomes = [one.reap(who), other.join().unwrap()];
        let reaped = outcomes.iter().filter(|outcome| **outcome == ReapOutcome::Reaped).count();
        assert_eq!(reaped, 1, "{outcomes:?}");
        model.assert_sound();
    });
}

#[test]
fn waiters_of_a_dead_owner_are_woken_by_its_reaper() {
    explore(2, || {
        let model = Model::new(2);
        let dead = model.participant(Place::Any);
        let waiter = model.participant(Place::Rank(0));
        let reaper = model.participant(Place::Rank(1));
        let Ok(Got::Owner(_unfinished)) = dead.get(&key(1), 0) else { panic!() };
        let Ok(Got::Wait(first)) = waiter.get(&key(1), 0) else { panic!() };
        let Ok(Got::Wait(second)) = reaper.get(&key(1), 0) else { panic!() };
        let who = dead.me();
        model.kill(dead);
        let waiting = thread::spawn(move || waiter.wait(first, FAR_NS));
        assert_eq!(reaper.reap(who), ReapOutcome::Reaped);
        assert_eq!(reaper.wait(second, FAR_NS), Err(WaitError::OwnerDied));
        assert_eq!(waiting.join().unwrap(), Err(WaitError::OwnerDied));
        model.assert_sound();
    });
}

#[test]
fn a_publish_and_a_reap_of_the_same_load_end_as_one_or_the_other() {
    explore(3, || {
        let model = Model::new(2);
        let owner = model.participant(Place::Rank(0));
        let waiter = model.participant(Place::Rank(1));
        let Ok(Got::Owner(loading)) = owner.get(&key(1), 0) else { panic!() };
        let Ok(Got::Wait(pending)) = waiter.get(&key(1), 0) else { panic!() };
        model.write(loading.slot(), 1);
        // Taken for dead although it is about to publish.
        model.host.0.held[owner.me().index() as usize].store(0, SeqCst);
        let who = owner.me();
        // It never touches its pins again: they are the reaper's to clear.
        let publishing = thread::spawn(move || owner.publish(loading, 8, 0).is_ok());
        waiter.reap(who);
        let published = publishing.join().unwrap();
        match waiter.wait(pending, FAR_NS) {
            Ok(pinned) => {
                assert!(published);
                model.check(pinned.slot(), 1);
                waiter.release(pinned);
            }
            // Published or not: it was unlisted before anybody looked.
            Err(error) => assert_eq!(error, WaitError::OwnerDied),
        }
        model.assert_sound();
    });
}

#[test]
fn a_ring_publishes_each_item_before_its_index() {
    explore(3, || {
        let slots: Box<[Slot<u64>]> = (0..2).map(|_| Slot::new()).collect();
        let ring = Arc::new(Ring::new(slots).map_err(drop).unwrap());
        let mut producer = Ring::producer(ring.clone()).unwrap();
        let mut consumer = Ring::consumer(ring).unwrap();
        let sending = thread::spawn(move || {
            for item in 1..=3 {
                while producer.push(item).is_err() {
                    thread::yield_now();
                }
            }
        });
        for expected in 1..=3 {
            let item = loop {
                match consumer.pop() {
                    Some(item) => break item,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(item, expected);
        }
        sending.join().unwrap();
    });
}
