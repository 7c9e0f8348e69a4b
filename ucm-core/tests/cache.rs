//! What one or a few participants see of the cache, step by step.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::*;
use ucm_core::cache::{
    Ask, Audit, GetError, JoinError, Mode, Pool, Presence, Progress, ReapOutcome, WaitError,
};
use ucm_core::segment::counters::Counter;
use ucm_core::slot::meta::LoadErrorCode;
use ucm_core::{AttachError, BlockId, Cache, Got, Loading, Pending, Place, ShardKey, Watcher};

fn owner(cache: &Cache<'_, ThreadHost>, key: &ShardKey) -> Loading {
    match cache.get(key, FAR_NS).unwrap() {
        Got::Owner(loading) => loading,
        other => panic!("expected to own {key:?}, got {other:?}"),
    }
}

fn waiter(cache: &Cache<'_, ThreadHost>, key: &ShardKey) -> Pending {
    match cache.get(key, FAR_NS).unwrap() {
        Got::Wait(pending) => pending,
        other => panic!("expected to wait for {key:?}, got {other:?}"),
    }
}

#[test]
fn the_first_rank_owns_a_shard_and_the_others_wait_for_it() {
    let heap = HeapPlane::new(shape(8, 4));
    let ranks: Vec<_> = (0..4).map(|rank| heap.rank(rank)).collect();
    let loading = owner(&ranks[0], &key(1));
    let pending: Vec<_> = ranks[1..].iter().map(|rank| (rank, waiter(rank, &key(1)))).collect();
    for (rank, pending) in &pending {
        assert_eq!(rank.poll(pending), Progress::Loading);
    }
    let slot = loading.slot();
    ranks[0].release(ranks[0].publish(loading, 48, 99).unwrap());
    for (rank, pending) in pending {
        assert_eq!(rank.poll(&pending), Progress::Ready);
        let pinned = rank.wait(pending, FAR_NS).unwrap();
        assert_eq!((pinned.slot(), rank.payload(&pinned)), (slot, (48, 99)));
        rank.release(pinned);
    }
    drop(ranks);
    heap.assert_sound();
}

#[test]
fn every_waiter_of_a_failed_load_gets_its_code_and_then_the_load_may_be_tried_again() {
    let heap = HeapPlane::new(shape(8, 4));
    let ranks: Vec<_> = (0..4).map(|rank| heap.rank(rank)).collect();
    let loading = owner(&ranks[0], &key(1));
    let pending: Vec<_> = ranks[1..].iter().map(|rank| (rank, waiter(rank, &key(1)))).collect();
    ranks[0].fail(loading, LoadErrorCode(5)).unwrap();
    // While the audience has not looked, the failure stays what it is.
    assert_eq!(ranks[0].get(&key(1), FAR_NS), Err(GetError::Failed(LoadErrorCode(5))));
    for (rank, pending) in pending {
        let failed = Err(WaitError::Failed(LoadErrorCode(5)));
        assert_eq!(rank.wait(pending, FAR_NS), failed);
    }
    let retry = owner(&ranks[3], &key(1));
    ranks[3].release(ranks[3].publish(retry, 64, 0).unwrap());
    assert!(access(&ranks[1], &key(1)));
    drop(ranks);
    heap.assert_sound();
}

#[test]
fn clock_walks_as_the_specification_says() {
    let heap = HeapPlane::new(shape(4, 1));
    let rank = heap.rank(0);
    let [a, b, c, d, e, f] = [1, 2, 3, 4, 5, 6].map(key);
    for key in [&a, &b, &c, &d] {
        assert!(!access(&rank, key)); // all bits set, hand at 0 again
    }
    let slot_of = |key: &ShardKey| {
        let pinned = load(&rank, key);
        let slot = pinned.slot();
        rank.release(pinned);
        slot
    };
    assert_eq!(slot_of(&e), 0, "four bits cleared, then slot 0 goes");
    assert_eq!(heap.plane().probe(&a), Presence::Absent);
    assert!(access(&rank, &b), "a hit sets b's bit");
    assert_eq!(slot_of(&f), 2, "b is passed, c goes");
    for (key, there) in [(&a, false), (&b, true), (&c, false), (&d, true), (&e, true), (&f, true)] {
        assert_eq!(heap.plane().probe(key) == Presence::Ready, there, "{key:?}");
    }
    drop(rank);
    heap.assert_sound();
}

#[test]
fn a_pinned_slot_is_never_a_victim_and_a_fully_pinned_cache_is_an_error() {
    let heap = HeapPlane::new(shape(3, 1));
    let rank = heap.rank(0);
    let held: Vec<_> = (0..3).map(|id| load(&rank, &key(id))).collect();
    assert_eq!(rank.get(&key(9), 0), Err(GetError::NothingEvictable));
    let mut held = held.into_iter();
    let (kept, freed) = (held.next().unwrap(), held.next().unwrap());
    let freed_slot = freed.slot();
    rank.release(freed);
    let pinned = load(&rank, &key(9));
    assert_eq!(pinned.slot(), freed_slot);
    for pinned in [kept, pinned].into_iter().chain(held) {
        rank.release(pinned);
    }
    drop(rank);
    heap.assert_sound();
}

#[test]
fn ordinary_loads_leave_the_reserve_alone_and_prealloc_may_use_it() {
    let heap = HeapPlane::new(ucm_core::CacheShape { reserved_slots: 2, ..shape(6, 1) });
    let rank = heap.rank(0);
    for id in 0..40 {
        let pinned = load(&rank, &key(id));
        assert!(pinned.slot() < 4);
        rank.release(pinned);
    }
    for id in 100..140 {
        rank.prepare_next(&key(id));
    }
    let plane = heap.plane();
    let audit = Audit::new(&plane);
    assert!((4..6).any(|slot| audit.slot(slot).is_some()), "the reserve was never used");
    drop(rank);
    heap.assert_sound();
}

#[test]
fn a_prepared_slot_is_taken_over_without_eviction() {
    let heap = HeapPlane::new(shape(4, 1));
    let rank = heap.rank(0);
    assert!(rank.prepare_next(&key(1)));
    let next = ShardKey::new(key(1).block, 1);
    assert_eq!(heap.plane().probe(&next), Presence::Prepared);
    let before = heap.plane().count(Counter::Evictions);
    let loading = owner(&rank, &next);
    rank.release(rank.publish(loading, 64, 0).unwrap());
    assert_eq!(heap.plane().count(Counter::PreparedUsed), 1);
    assert_eq!(heap.plane().count(Counter::Evictions), before);
    let last = ShardKey::new(key(1).block, 3);
    assert!(!rank.prepare_next(&last), "never past the block's end");
    assert!(!rank.prepare_next(&key(1)), "nor what is there already");
    drop(rank);
    heap.assert_sound();
}

const RELOAD: Ask = Ask { mode: Mode::Reload, pool: Pool::Ordinary };

#[test]
fn a_prefetch_may_use_the_reserve() {
    let heap = HeapPlane::new(ucm_core::CacheShape { reserved_slots: 3, ..shape(4, 1) });
    let rank = heap.rank(0);
    let ahead = Ask { mode: Mode::Cached, pool: Pool::WithReserve };
    for id in 0..4 {
        match rank.get_with(&key(id), ahead, FAR_NS).unwrap() {
            Got::Owner(loading) => rank.release(rank.publish(loading, 64, 0).unwrap()),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(Audit::new(&heap.plane()).census().ready, 4);
    drop(rank);
    heap.assert_sound();
}

#[test]
fn backend_only_mode_reloads_while_nobody_else_is_copying() {
    let heap = HeapPlane::new(shape(4, 2));
    let (a, b) = (heap.rank(0), heap.rank(1));
    access(&a, &key(1));
    let reload = |rank: &Cache<'_, ThreadHost>| rank.get_with(&key(1), RELOAD, FAR_NS).unwrap();
    let held = load(&b, &key(1));
    match reload(&a) {
        Got::Hit(pinned) => a.release(pinned), // b may be copying from it
        other => panic!("{other:?}"),
    }
    b.release(held);
    match reload(&a) {
        Got::Owner(loading) => {
            b.cancel(waiter(&b, &key(1)));
            a.release(a.publish(loading, 64, 0).unwrap());
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(heap.plane().count(Counter::ForcedReloads), 1);
    drop((a, b));
    heap.assert_sound();
}

#[test]
fn touch_saves_a_block_from_the_next_sweep() {
    let heap = HeapPlane::new(shape(8, 1));
    let rank = heap.rank(0);
    let shards =
        |id: u64| (0..4).map(move |shard| ShardKey::new(BlockId::from_words(id, 1), shard));
    shards(1).chain(shards(2)).for_each(|key| assert!(!access(&rank, &key)));
    access(&rank, &key(77)); // one sweep: all bits clear, the first of block 1 gone
    assert_eq!(rank.touch(&[BlockId::from_words(1, 1), BlockId::from_words(3, 1)]), 3);
    for id in 100..104 {
        access(&rank, &key(id));
    }
    let ready = |id| shards(id).filter(|key| heap.plane().probe(key) == Presence::Ready).count();
    assert_eq!((ready(1), ready(2)), (3, 0));
    drop(rank);
    heap.assert_sound();
}

#[test]
fn present_means_ready_and_nothing_else() {
    let heap = HeapPlane::new(shape(8, 1));
    let rank = heap.rank(0);
    let watcher = Watcher::new(heap.plane());
    assert_eq!(watcher.probe(&key(1)), Presence::Absent);
    let loading = owner(&rank, &key(1));
    assert_eq!(watcher.probe(&key(1)), Presence::Loading);
    rank.fail(loading, LoadErrorCode::NOT_FOUND).unwrap();
    assert_eq!(watcher.probe(&key(1)), Presence::Failed);
    let loading = owner(&rank, &key(1));
    rank.release(rank.publish(loading, 64, 0).unwrap());
    assert_eq!(watcher.probe(&key(1)), Presence::Ready);
    assert_eq!(watcher.ready_prefix(&[key(1).block]), 0, "three of its shards are missing");
    drop(rank);
    heap.assert_sound();
}

#[test]
fn get_many_answers_every_key_in_order() {
    let heap = HeapPlane::new(shape(64, 1));
    let rank = heap.rank(0);
    for id in (0..40).step_by(2) {
        access(&rank, &key(id));
    }
    let keys: Vec<_> = (0..40).map(key).collect();
    let mut hits = Vec::new();
    rank.get_many(&keys, FAR_NS, |asked, got| match got.unwrap() {
        Got::Hit(pinned) => {
            hits.push(*asked);
            rank.release(pinned);
        }
        Got::Owner(loading) => rank.fail(loading, LoadErrorCode::ABANDONED).unwrap(),
        Got::Wait(_) => panic!("nobody else is here"),
    });
    assert_eq!(hits, (0..40).step_by(2).map(key).collect::<Vec<_>>());
    drop(rank);
    heap.assert_sound();
}

#[test]
#[cfg(not(miri))] // 32,768 gets take Miri half an hour
fn a_participant_may_not_pin_a_slot_without_end() {
    let heap = HeapPlane::new(shape(2, 1));
    let rank = heap.rank(0);
    let mut held = vec![load(&rank, &key(1))];
    let refused = loop {
        match rank.get(&key(1), FAR_NS) {
            Ok(Got::Hit(pinned)) if held.len() < 1 << 17 => held.push(pinned),
            other => break other,
        }
    };
    assert_eq!(refused, Err(GetError::TooManyPins));
    assert_eq!(held.len(), usize::from(ucm_core::limits::MAX_PINS_PER_SLOT));
    held.into_iter().for_each(|pinned| rank.release(pinned));
    drop(rank);
    heap.assert_sound();
}

#[test]
fn full_buckets_give_way_and_pinned_ones_are_an_error() {
    let heap = HeapPlane::new(shape(64, 1));
    let rank = heap.rank(0);
    let mask = heap.geometry.bucket_count - 1;
    // Keys that share both buckets: sixteen entries for as many as we like.
    let mut crowd =
        (0..).map(key).filter(|key| matches!(key.hash().buckets(mask), (0, 1) | (1, 0)));
    let held: Vec<_> = crowd.by_ref().take(16).map(|key| load(&rank, &key)).collect();
    let next = crowd.next().unwrap();
    assert_eq!(rank.get(&next, FAR_NS), Err(GetError::BucketsPinned));
    held.into_iter().for_each(|pinned| rank.release(pinned));
    assert!(!access(&rank, &next));
    assert!(access(&rank, &next));
    assert_eq!(heap.plane().count(Counter::BucketsFull), 2);
    assert_eq!(Audit::new(&heap.plane()).census().ready, 16);
    drop(rank);
    heap.assert_sound();
}

#[test]
fn waiters_of_a_dead_owner_load_it_themselves_and_its_slot_rests() {
    let heap = HeapPlane::new(shape(4, 3));
    let (a, b, c) = (heap.rank(0), heap.rank(1), heap.rank(2));
    let loading = owner(&a, &key(1));
    let dead_slot = loading.slot();
    let pending = [waiter(&b, &key(1)), waiter(&c, &key(1))];
    heap.kill(a);
    let [of_b, of_c] = pending;
    assert_eq!(b.wait(of_b, FAR_NS), Err(WaitError::OwnerDied));
    let again = owner(&b, &key(1));
    assert_ne!(again.slot(), dead_slot, "IO of the dead may still write there");
    assert_eq!(c.wait(of_c, FAR_NS), Err(WaitError::OwnerDied));
    let of_c = waiter(&c, &key(1));
    b.release(b.publish(again, 64, 0).unwrap());
    c.release(c.wait(of_c, FAR_NS).unwrap());
    // In quarantine it is nobody's; afterwards anybody's.
    let used = |heap: &HeapPlane| Audit::new(&heap.plane()).census().quarantined;
    for id in 10..20 {
        access(&b, &key(id));
    }
    assert_eq!(used(&heap), 1);
    heap.world.advance_ns(QUARANTINE_NS);
    for id in 20..30 {
        access(&b, &key(id));
    }
    assert_eq!(used(&heap), 0);
    drop((b, c));
    heap.assert_sound();
}

#[test]
fn the_pins_of_the_dead_come_back_and_so_does_the_rank() {
    let heap = HeapPlane::new(shape(2, 2));
    let (a, b) = (heap.rank(0), heap.rank(1));
    let _leaked = [load(&a, &key(1)), load(&a, &key(2))];
    assert_eq!(b.get(&key(3), 0), Err(GetError::NothingEvictable));
    heap.kill(a);
    access(&b, &key(3)); // the allocation that finds nothing reaps
    assert_eq!(heap.plane().count(Counter::ReapedPins), 2);
    let epoch = |heap: &HeapPlane| heap.plane().participants().next().unwrap().1.epoch;
    assert_eq!(epoch(&heap), 1);
    let a = heap.rank(0);
    assert!(access(&a, &key(3)));
    drop((a, b));
    heap.assert_sound();
}

#[test]
fn a_live_rank_is_never_reaped_and_its_place_never_given_away() {
    let heap = HeapPlane::new(shape(4, 2));
    let (a, b) = (heap.rank(0), heap.rank(1));
    let held = load(&a, &key(1));
    assert_eq!(b.reap(a.me()), ReapOutcome::Held);
    assert_eq!(b.reap_dead(), 0);
    let host = ThreadHost(heap.world.clone());
    let taken = Cache::join(heap.plane(), host.clone(), Place::Rank(0), who(0));
    assert!(
        matches!(taken, Err(JoinError::RankTaken { rank: 0, pid }) if pid == std::process::id())
    );
    let outside = Cache::join(heap.plane(), host, Place::Rank(2), who(0));
    assert!(matches!(outside, Err(JoinError::RankOutOfRange { rank: 2, local_rank_size: 2 })));
    a.release(held);
    drop((a, b));
    heap.assert_sound();
}

#[test]
fn a_table_full_of_the_living_is_an_error() {
    let heap = HeapPlane::new(shape(4, 2));
    let host = || ThreadHost(heap.world.clone());
    let scouts: Vec<_> =
        (2..32).map(|_| Cache::join(heap.plane(), host(), Place::Any, who(0)).unwrap()).collect();
    let refused = Cache::join(heap.plane(), host(), Place::Any, who(0));
    assert!(matches!(refused, Err(JoinError::TableFull { participants: 32 })));
    drop(scouts);
    heap.assert_sound();
}

#[test]
fn leaving_gives_back_what_was_never_released() {
    let heap = HeapPlane::new(shape(4, 2));
    let (a, b) = (heap.rank(0), heap.rank(1));
    let _leaked = load(&a, &key(1));
    let _unfinished = owner(&a, &key(2));
    let pending = waiter(&b, &key(2));
    a.leave();
    assert_eq!(b.wait(pending, FAR_NS), Err(WaitError::OwnerDied));
    drop(b);
    heap.assert_sound();
}

#[test]
fn a_wait_ends_at_its_deadline_and_gives_its_pin_back() {
    let heap = HeapPlane::new(shape(2, 2));
    let (a, b) = (heap.rank(0), heap.rank(1));
    let loading = owner(&a, &key(1));
    let pending = waiter(&b, &key(1));
    assert_eq!(b.wait(pending, 0), Err(WaitError::Deadline));
    a.release(a.publish(loading, 64, 0).unwrap());
    drop((a, b));
    heap.assert_sound();
}

#[test]
fn a_segment_that_differs_is_refused_and_the_difference_named() {
    let mut heap = HeapPlane::new(shape(8, 2));
    let attach = |heap: &HeapPlane, expected| {
        ucm_core::ControlPlane::attach(heap.region(), expected, &[7; 16]).map(|_| ())
    };
    let other = ucm_core::Geometry::new(shape(9, 2)).unwrap();
    assert_eq!(
        attach(&heap, Some(&other)),
        Err(AttachError::Configuration { key: "slot_count", found: 8, ours: 9 })
    );
    let foreign = ucm_core::ControlPlane::attach(heap.region(), None, &[8; 16]).map(|_| ());
    assert_eq!(foreign, Err(AttachError::ForeignBoot { found: [7; 16], ours: [8; 16] }));
    heap.bytes_mut()[8] = 9; // abi_version
    assert!(matches!(attach(&heap, None), Err(AttachError::Version { found: 9, .. })));
    heap.bytes_mut()[8] = ucm_core::segment::header::ABI_VERSION as u8;
    heap.bytes_mut()[16] ^= 1; // layout fingerprint
    assert!(matches!(attach(&heap, None), Err(AttachError::Layout { .. })));
    heap.bytes_mut()[16] ^= 1;
    heap.bytes_mut()[64..68].copy_from_slice(&u32::MAX.to_le_bytes()); // slot_count
    assert!(matches!(attach(&heap, None), Err(AttachError::BadShape(_))));
    heap.bytes_mut()[64..68].copy_from_slice(&100_000_u32.to_le_bytes());
    assert!(attach(&heap, None).is_err(), "a longer table than the memory");
    heap.bytes_mut()[0] = 0;
    assert!(matches!(attach(&heap, None), Err(AttachError::NotASegment { .. })));
}
