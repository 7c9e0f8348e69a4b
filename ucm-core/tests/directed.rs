//! Interleavings set up by hand: threads are stopped at named points and let go on.
//!
//! `RUSTFLAGS="--cfg ucm_crash" cargo test -p ucm-core --test directed`
#![cfg(ucm_crash)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use common::*;
use ucm_core::Got;
use ucm_core::cache::{GetError, Presence};
use ucm_core::crash::{Point, install};

thread_local! {
    /// Where this thread stops next, and how it says so and is let go on.
    static STOPS: RefCell<VecDeque<(Point, SyncSender<()>, Receiver<()>)>> = const {
        RefCell::new(VecDeque::new())
    };
}

fn hook(point: Point) {
    let stop = STOPS.with_borrow_mut(|stops| {
        if stops.front().is_some_and(|(at, ..)| *at == point) { stops.pop_front() } else { None }
    });
    if let Some((_, arrived, go_on)) = stop {
        // The test may have stopped listening: then nobody is stopped any more.
        if arrived.send(()).is_ok() {
            let _let_go = go_on.recv();
        }
    }
}

/// The test's end of a stop.
struct Stop {
    arrived: Receiver<()>,
    go_on: SyncSender<()>,
}

impl Stop {
    /// Waits until the thread is there; `false` if it never came by and ended.
    fn reached(&self) -> bool {
        self.arrived.recv().is_ok()
    }

    fn let_go(self) {
        let _ended = self.go_on.send(());
    }
}

/// What a thread is told before it starts.
struct Script(Vec<(Point, SyncSender<()>, Receiver<()>)>);

impl Script {
    fn new<const N: usize>(points: [Point; N]) -> (Self, [Stop; N]) {
        install(hook);
        let mut script = Vec::new();
        let stops = points.map(|point| {
            let ((arrive, arrived), (go_on, wait)) = (sync_channel(1), sync_channel(1));
            script.push((point, arrive, wait));
            Stop { arrived, go_on }
        });
        (Self(script), stops)
    }

    fn follow(self) {
        STOPS.set(self.0.into());
    }
}

#[test]
fn a_tag_that_was_taken_off_is_not_mistaken_for_a_new_one_of_the_same_rank() {
    let heap = HeapPlane::new(shape(1, 1));
    let (reader, evictor) = (heap.rank(0), heap.scout());
    access(&reader, &key(1));
    let (first, [committing]) = Script::new([Point::EvictCommitting]);
    let (second, [chosen, tagged]) = Script::new([Point::EvictChosen, Point::EvictTagged]);
    std::thread::scope(|scope| {
        let evictor = &evictor;
        // The second thread has seen the slot untagged and unpinned.
        let other = scope.spawn(move || {
            second.follow();
            let result = evictor.get(&key(3), 0);
            STOPS.take();
            result
        });
        assert!(chosen.reached());
        // The first one tags it and is about to commit.
        let one = scope.spawn(move || {
            first.follow();
            evictor.get(&key(2), 0)
        });
        assert!(committing.reached());
        // A reader takes the tag off.
        let Ok(Got::Hit(pinned)) = reader.get(&key(1), FAR_NS) else { panic!("a hit") };
        // The second thread must not be able to put the same tag back.
        chosen.let_go();
        assert!(!tagged.reached(), "the word it had seen was tagged again");
        committing.let_go();
        assert_eq!(one.join().unwrap(), Err(GetError::NothingEvictable));
        assert_eq!(other.join().unwrap(), Err(GetError::NothingEvictable));
        assert_eq!(heap.plane().probe(&key(1)), Presence::Ready);
        reader.release(pinned);
    });
    drop((reader, evictor));
    heap.assert_sound();
}

#[test]
fn a_stopped_inserter_holds_nobody_up_and_withdraws_when_it_goes_on() {
    for point in [Point::InsertAnnounced, Point::InsertPublished, Point::InsertScanned] {
        let heap = HeapPlane::new(shape(8, 2));
        let (slow, quick) = (heap.rank(0), heap.rank(1));
        let (script, [stop]) = Script::new([point]);
        std::thread::scope(|scope| {
            let slow = &slow;
            let inserting = scope.spawn(move || {
                script.follow();
                slow.get(&key(1), FAR_NS).unwrap()
            });
            assert!(stop.reached());
            let Ok(Got::Owner(loading)) = quick.get(&key(1), FAR_NS) else { panic!("owner") };
            quick.release(quick.publish(loading, 64, 0).unwrap());
            stop.let_go();
            match inserting.join().unwrap() {
                Got::Hit(pinned) => slow.release(pinned),
                other => panic!("{point:?}: expected to find the other's, got {other:?}"),
            }
        });
        drop((slow, quick));
        heap.assert_sound();
    }
}

#[test]
fn a_load_published_after_its_owner_was_reaped_is_refused_and_takes_nothing_back() {
    let heap = HeapPlane::new(shape(4, 2));
    let (owner, other) = (heap.rank(0), heap.rank(1));
    let Ok(Got::Owner(loading)) = owner.get(&key(1), FAR_NS) else { panic!("owner") };
    // As a forked copy would be: taken for dead although it runs.
    heap.give_up_byte(&owner);
    other.reap(owner.me());
    assert!(owner.publish(loading, 64, 0).is_err());
    assert_eq!(heap.plane().probe(&key(1)), Presence::Absent);
    heap.kill(owner);
    drop(other);
    heap.assert_sound();
}

#[test]
fn a_prepared_slot_is_not_visible_before_its_entry() {
    let heap = HeapPlane::new(shape(2, 2));
    let (preparer, other) = (heap.rank(0), heap.rank(1));
    let next = ucm_core::ShardKey::new(key(1).block, 1);
    let (script, [stop]) = Script::new([Point::InsertAnnounced]);
    std::thread::scope(|scope| {
        let preparer = &preparer;
        let preparing = scope.spawn(move || {
            script.follow();
            preparer.prepare_next(&key(1))
        });
        assert!(stop.reached());
        assert_eq!(heap.plane().probe(&next), Presence::Absent);
        // Everything else of the cache goes to others meanwhile.
        for id in 10..20 {
            access(&other, &key(id));
        }
        stop.let_go();
        assert!(preparing.join().unwrap());
        assert_eq!(heap.plane().probe(&next), Presence::Prepared);
    });
    drop((preparer, other));
    heap.assert_sound();
}
