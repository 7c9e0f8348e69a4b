//! A segment that turns out wrong while it is in use: noticed, known to everybody, served by nobody.
#![cfg(not(ucm_loom))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::{FAR_NS, HeapPlane, access, key, load, shape, who};
use ucm_core::cache::{GetError, JoinError, Presence, WaitError};
use ucm_core::{Cache, Got, Place};

/// Soon enough that a look that does not come is a failure and no hang.
const SOON_NS: u64 = 1 << 34;

/// Writes `value` over the four bytes at `at`, as a stray write of any process does.
fn scribble(heap: &HeapPlane, at: u64, value: u32) {
    let word: &ucm_core::sync::AtomicU32 = heap.region().at(at).unwrap();
    word.store(value, ucm_core::sync::Ordering::Relaxed);
}

/// Where the header has its magic, version, nonce, slot count and high-water mark.
const HEADER_WORDS: [u64; 5] = [0, 8, 48, 64, 192];

#[test]
fn a_header_that_changes_while_in_use_is_noticed_by_the_next_janitor() {
    for at in HEADER_WORDS {
        let heap = HeapPlane::new(shape(8, 2));
        let rank = heap.rank(0);
        access(&rank, &key(1));
        let plane = *rank.plane();
        scribble(&heap, at, 0xdead_beef);
        assert!(!plane.is_poisoned());
        rank.reap_dead();
        assert!(plane.is_poisoned(), "byte {at}");
        assert_eq!(rank.get(&key(1), FAR_NS).unwrap_err(), GetError::Poisoned);
        assert_eq!(rank.get(&key(2), FAR_NS).unwrap_err(), GetError::Poisoned);
        assert_eq!(plane.probe(&key(1)), Presence::Absent);
        let host = common::ThreadHost(heap.world.clone());
        let joined = Cache::join(plane, host, Place::Rank(1), who(1));
        assert!(matches!(joined, Err(JoinError::Poisoned)));
    }
}

#[test]
fn what_no_move_leads_to_is_found_by_an_inspection_wherever_it_is() {
    let geometry = HeapPlane::new(shape(64, 2)).geometry;
    let last_slot = geometry.slots_offset + 63 * 64;
    let last_bucket = geometry.buckets_offset + u64::from(geometry.bucket_count - 1) * 64;
    // FREE with an owner, LOADING of nobody, READY by somebody beyond the
    // table, CLAIMED with a waiter; an entry that names no slot.
    for (at, value) in [
        (last_slot, 1 << 4),
        (last_slot, 3),
        (last_slot, 4 | 200 << 4),
        (last_slot, 1 | 1 << 3 | 1 << 4),
        (last_bucket + 56, 65),
    ] {
        let heap = HeapPlane::new(shape(64, 2));
        let plane = heap.plane();
        let all = 0..geometry.bucket_count.max(64);
        assert!(plane.inspect(all.clone()) && plane.inspect(1000..2000));
        assert!(plane.inspect(std::ops::Range { start: 9, end: 3 }), "nothing");
        scribble(&heap, at, value);
        assert!(plane.inspect(0..8), "another part");
        assert!(!plane.inspect(all) && plane.is_poisoned(), "{value:#x} at {at}");
    }
}

#[test]
fn whoever_is_looking_for_room_or_waiting_learns_of_it() {
    let heap = HeapPlane::new(shape(2, 2));
    let (owner, waiter) = (heap.rank(0), heap.rank(1));
    let Ok(Got::Owner(loading)) = owner.get(&key(1), FAR_NS) else { panic!() };
    let Ok(Got::Wait(pending)) = waiter.get(&key(1), FAR_NS) else { panic!() };
    let pinned = load(&owner, &key(2));
    scribble(&heap, 24, 1);
    // Every slot is in use, so it looks around; and the waiter's slice ends.
    assert_eq!(owner.get(&key(3), SOON_NS).unwrap_err(), GetError::Poisoned);
    assert_eq!(waiter.wait(pending, SOON_NS).unwrap_err(), WaitError::Poisoned);
    owner.release(pinned);
    owner.release(owner.publish(loading, 64, 0).unwrap());
}

#[test]
fn a_pin_that_is_given_back_and_was_not_there_is_noticed_and_not_counted_below_zero() {
    let heap = HeapPlane::new(shape(4, 2));
    let rank = heap.rank(0);
    let pinned = load(&rank, &key(1));
    let at = heap.geometry.pins_offset + u64::from(pinned.slot()) * 2;
    scribble(&heap, at & !3, 0);
    rank.release(pinned);
    assert!(rank.plane().is_poisoned());
    assert_eq!(ucm_core::cache::Audit::new(rank.plane()).pins(), 0);
}

#[test]
fn a_mark_that_would_hide_a_participants_pins_from_evictors_is_noticed() {
    for mark in [0, 1, 33, u32::MAX] {
        let heap = HeapPlane::new(shape(4, 2));
        let rank = heap.rank(1);
        rank.reap_dead();
        assert!(!rank.plane().is_poisoned());
        scribble(&heap, 192, mark);
        rank.reap_dead();
        assert!(rank.plane().is_poisoned(), "{mark}");
    }
}

#[test]
fn reaping_a_dead_rank_finds_impossible_slots_on_its_way() {
    let heap = HeapPlane::new(shape(64, 2));
    let (living, dying) = (heap.rank(0), heap.rank(1));
    heap.kill(dying);
    scribble(&heap, heap.geometry.slots_offset + 40 * 64, 7 | 9 << 4);
    living.reap_dead();
    assert!(living.plane().is_poisoned());
}

#[test]
fn a_healthy_segment_passes_every_look() {
    let heap = HeapPlane::new(shape(16, 2));
    let (one, two) = (heap.rank(0), heap.rank(1));
    for id in 0..200 {
        access(&one, &key(id % 40));
        access(&two, &key(id * 7 % 40));
        assert!(one.plane().inspect(0..64));
    }
    heap.kill(two);
    one.reap_dead();
    assert!(one.plane().inspect(0..64) && !one.plane().is_poisoned());
}
