//! Threads as ranks on one heap segment: real concurrency, and what Miri runs
//! with many seeds.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use common::*;
use ucm_core::cache::GetError;
use ucm_core::ring::{Ring, Slot};
use ucm_core::slot::meta::LoadErrorCode;
use ucm_core::{Got, ShardKey};

const RANKS: u32 = if cfg!(miri) { 3 } else { 8 };
const ROUNDS: u64 = if cfg!(miri) { 25 } else { 20_000 };
const KEYS: u64 = if cfg!(miri) { 6 } else { 64 };
const SLOTS: u32 = if cfg!(miri) { 4 } else { 16 };

/// Plain memory, written and read without any atomics, so that a wrong
/// ordering is a data race: wrong bytes here, an error in Miri.
struct Plain(std::cell::UnsafeCell<[u64; 4]>);
// SAFETY: the cache under test decides who may touch it; that it decides
// rightly is what the test is about.
unsafe impl Sync for Plain {}

impl Plain {
    fn write(&self, key: &ShardKey) {
        let (low, high) = key.block.words();
        // SAFETY: the caller owns the slot (it is LOADING).
        unsafe { *self.0.get() = [low, high, low ^ high, !low] }
    }

    fn check(&self, key: &ShardKey) {
        let (low, high) = key.block.words();
        // SAFETY: the caller holds a pin on the READY slot.
        let words = unsafe { *self.0.get() };
        assert_eq!(words, [low, high, low ^ high, !low], "wrong bytes for {key:?}");
    }
}

#[test]
fn ranks_hammering_few_slots_see_right_bytes_and_never_load_a_key_twice_at_once() {
    let heap = HeapPlane::new(shape(SLOTS, RANKS));
    let data: Vec<_> = (0..SLOTS).map(|_| Plain([0; 4].into())).collect();
    let loading_now: Vec<_> = (0..KEYS).map(|_| AtomicU32::new(0)).collect();
    let loads = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let (heap, data, loading_now, loads) = (&heap, &data, &loading_now, &loads);
            scope.spawn(move || {
                let cache = heap.rank(rank);
                let mut random = u64::from(rank) * 7919 + 1;
                for _ in 0..ROUNDS {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let id = (random >> 33) % KEYS;
                    let wanted = key(id);
                    if random >> 60 == 0 {
                        cache.prepare_next(&wanted);
                    }
                    let pinned = match cache.get(&wanted, FAR_NS) {
                        Ok(Got::Hit(pinned)) => pinned,
                        Ok(Got::Owner(loading)) => {
                            assert_eq!(loading_now[id as usize].swap(1, Ordering::SeqCst), 0);
                            loads.fetch_add(1, Ordering::Relaxed);
                            data[loading.slot() as usize].write(&wanted);
                            loading_now[id as usize].store(0, Ordering::SeqCst);
                            if random >> 59 == 1 {
                                cache.fail(loading, LoadErrorCode(id as i32)).unwrap();
                                continue;
                            }
                            cache.publish(loading, 32, id).unwrap()
                        }
                        Ok(Got::Wait(pending)) => match cache.wait(pending, FAR_NS) {
                            Ok(pinned) => pinned,
                            Err(error) => {
                                let code = LoadErrorCode(id as i32);
                                assert_eq!(error, ucm_core::cache::WaitError::Failed(code));
                                continue;
                            }
                        },
                        Err(GetError::Failed(code)) => {
                            assert_eq!(code, LoadErrorCode(id as i32));
                            continue;
                        }
                        Err(error) => panic!("{error}"),
                    };
                    data[pinned.slot() as usize].check(&wanted);
                    assert_eq!(cache.payload(&pinned), (32, id));
                    cache.release(pinned);
                }
            });
        }
    });
    assert!(loads.load(Ordering::Relaxed) > 0);
    heap.assert_sound();
}

#[test]
fn ranks_that_die_in_the_middle_leave_nothing_behind() {
    let heap = HeapPlane::new(shape(SLOTS, RANKS));
    let data: Vec<_> = (0..SLOTS).map(|_| Plain([0; 4].into())).collect();
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let (heap, data) = (&heap, &data);
            scope.spawn(move || {
                let mut cache = heap.rank(rank);
                let mut random = u64::from(rank) * 104_729 + 3;
                for _ in 0..ROUNDS / 8 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let wanted = key((random >> 33) % KEYS);
                    match cache.get(&wanted, FAR_NS) {
                        Ok(Got::Hit(pinned)) => {
                            data[pinned.slot() as usize].check(&wanted);
                            if random >> 58 == 5 {
                                heap.kill(cache); // with the pin
                                cache = heap.rank(rank);
                            } else {
                                cache.release(pinned);
                            }
                        }
                        Ok(Got::Owner(loading)) => {
                            if random >> 60 == 7 {
                                heap.kill(cache); // as owner; nothing writes any more
                                heap.world.advance_ns(2 * QUARANTINE_NS);
                                cache = heap.rank(rank);
                                continue;
                            }
                            data[loading.slot() as usize].write(&wanted);
                            cache.release(cache.publish(loading, 32, 0).unwrap());
                        }
                        Ok(Got::Wait(pending)) => {
                            if let Ok(pinned) = cache.wait(pending, FAR_NS) {
                                data[pinned.slot() as usize].check(&wanted);
                                cache.release(pinned);
                            }
                        }
                        Err(GetError::NothingEvictable) => heap.world.advance_ns(QUARANTINE_NS),
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    heap.assert_sound();
}

#[test]
fn a_ring_hands_every_item_over_once_and_in_order() {
    let ring = Ring::new([const { Slot::<Box<u64>>::new() }; 8]).map_err(drop).unwrap();
    let mut producer = Ring::producer(&ring).unwrap();
    let mut consumer = Ring::consumer(&ring).unwrap();
    assert!(Ring::producer(&ring).is_none(), "there is one producer");
    let count = if cfg!(miri) { 60 } else { 100_000 };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for item in 0..count {
                let mut item = Box::new(item);
                while let Err(full) = producer.push(item) {
                    item = full.0;
                    std::thread::yield_now();
                }
            }
        });
        for expected in 0..count {
            let item = loop {
                match consumer.pop() {
                    Some(item) => break item,
                    None => std::thread::yield_now(),
                }
            };
            assert_eq!(*item, expected);
        }
    });
}

#[test]
fn a_full_ring_gives_the_item_back_and_drops_what_was_never_taken() {
    let item = std::sync::Arc::new(());
    let ring = Ring::new([const { Slot::new() }; 2]).map_err(drop).unwrap();
    {
        let mut producer = Ring::producer(&ring).unwrap();
        assert!(producer.push(item.clone()).is_ok());
        assert!(producer.push(item.clone()).is_ok());
        assert!(producer.push(item.clone()).is_err());
    }
    assert!(Ring::producer(&ring).is_some(), "the next producer goes on");
    drop(ring);
    assert_eq!(std::sync::Arc::strong_count(&item), 1);
    assert!(Ring::new([const { Slot::<u8>::new() }; 3]).is_err(), "not a power of two");
}
