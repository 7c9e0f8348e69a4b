//! The known holes of protocols like this one, each walked into on purpose.

use ucm_core::cache::Audit;
use ucm_core::crash::Point;
use ucm_core::segment::counters::Counter;
use ucm_tests::audit::violations;
use ucm_tests::keys;
use ucm_tests::process::{Process, number_in};
use ucm_tests::setup::Setup;
use ucm_tests::stage::Stage;

use crate::play::{ACTOR, bucket_count};

fn stage(slots: u32) -> Stage {
    Stage::new(Setup { slots, ranks: 4, quarantine_ms: 20, ..Setup::default() }, ACTOR)
}

fn end(stage: Stage, actors: Vec<Process>) {
    for mut actor in actors {
        actor.expect("leave", "left");
        actor.finish();
    }
    stage.finish();
}

/// Keys 10 to 13 fill the four slots, and all but 10 are pinned by `keeper`:
/// the next victim can only be the slot of 10. Returns that slot.
fn only_ten_may_go(keeper: &mut Process) -> u32 {
    keeper.expect("loads 10 14", "loaded 4");
    for id in 11..14 {
        keeper.expect(&format!("keep {id}"), "hit");
    }
    keeper.number("load 10", "hit")
}

fn let_the_others_go(keeper: &mut Process) {
    for id in 11..14 {
        keeper.expect(&format!("release {id}"), "released");
    }
}

/// A get that found no slot until its deadline. Which of the two it says
/// depends on where the deadline finds it.
fn assert_no_slot(answer: &str) {
    assert!(["error NothingEvictable", "error Deadline"].contains(&answer), "{answer}");
}

/// A reader stands still between finding key 10 and pinning its slot, and
/// will stand still once more right after that pin.
fn found_and_not_pinned(stage: &Stage) -> Process {
    let mut reader = stage.rank(0);
    reader.expect("crash-at GetFound 1 stop", "armed");
    reader.expect("crash-at GetPinned 1 stop", "armed");
    reader.say("get 10");
    reader.expect_stop();
    reader
}

#[test]
fn a_slot_that_is_freed_for_a_dead_claimer_under_a_late_pin_is_taken_only_after_the_pin() {
    for point in [Point::EvictCommitted, Point::InsertUnlisted, Point::InsertKeyed] {
        let stage = stage(4);
        let (mut claimer, mut keeper) = (stage.rank(1), stage.rank(2));
        let slot = only_ten_may_go(&mut keeper);
        let mut reader = found_and_not_pinned(&stage);
        claimer.expect(&format!("crash-at {} 1 kill", point.name()), "armed");
        claimer.say("get 20");
        claimer.expect_death();
        reader.resume();
        reader.expect_stop();
        keeper.expect("reap", "reaped 1");
        let segment = stage.segment();
        let plane = segment.plane();
        assert_eq!(Audit::new(&plane).census().free, 1, "FREE, with the reader's pin on it");
        assert_no_slot(&keeper.ask("get 21 20"));
        drop(segment);
        reader.resume();
        assert_eq!(number_in(&reader.hear()), slot, "the pin is gone, the slot is anybody's");
        reader.expect("fill 10", "filled");
        reader.expect("publish 10", "published");
        reader.expect("release 10", "released");
        let_the_others_go(&mut keeper);
        end(stage, vec![reader, keeper]);
    }
}

#[test]
fn a_late_pin_on_a_slot_that_changed_hands_misleads_nobody_and_starves_nobody() {
    let stage = stage(4);
    let (mut taker, mut keeper) = (stage.rank(1), stage.rank(2));
    let slot = only_ten_may_go(&mut keeper);
    let mut reader = found_and_not_pinned(&stage);
    assert_eq!(taker.number("load 20", "owner"), slot);
    reader.resume();
    reader.expect_stop();
    // The reader's pin lies on 20 now. That slot stays; the others turn over.
    let_the_others_go(&mut keeper);
    taker.expect("loads 100 160", "loaded 60");
    assert_eq!(taker.number("load 20", "hit"), slot);
    reader.resume();
    let answer = reader.hear();
    assert!(answer.starts_with("owner"), "{answer}: 10 is nowhere any more");
    reader.expect("release 10", "released");
    taker.expect("loads 200 260", "loaded 60");
    end(stage, vec![reader, taker, keeper]);
}

#[test]
fn a_prepared_slot_cannot_be_seen_before_its_entry() {
    for mode in ["stop", "kill"] {
        let stage = stage(4);
        let (mut preparer, mut other) = (stage.rank(0), stage.rank(1));
        other.expect("loads 100 104", "loaded 4");
        preparer.expect(&format!("crash-at InsertAnnounced 1 {mode}"), "armed");
        preparer.say("prepare 5");
        if mode == "stop" {
            preparer.expect_stop();
        } else {
            preparer.expect_death();
        }
        // Evictors that go round and round find no PREPARED slot to take, and
        // the key itself is to be had.
        other.expect("loads 200 240", "loaded 40");
        assert_eq!(other.ask("load 5").split(' ').next(), Some("owner"));
        if mode == "stop" {
            assert_eq!(violations(&stage.segment()), []);
            preparer.resume();
            assert_eq!(preparer.hear(), "prepared false");
        } else {
            other.expect("reap", "reaped 1");
            preparer = stage.rank(0);
        }
        assert_eq!(violations(&stage.segment()), []);
        other.expect("loads 300 340", "loaded 40");
        end(stage, vec![preparer, other]);
    }
}

#[test]
fn a_slot_that_is_pinned_after_it_was_chosen_keeps_its_key_and_its_bytes() {
    let stage = stage(4);
    let (mut evictor, mut keeper) = (stage.rank(0), stage.rank(1));
    only_ten_may_go(&mut keeper);
    evictor.expect("crash-at EvictChosen 1 stop", "armed");
    evictor.say("get 20 20");
    evictor.expect_stop();
    keeper.expect("keep 10", "hit");
    evictor.resume();
    assert_no_slot(&evictor.hear());
    for id in 10..14 {
        keeper.expect(&format!("check {id}"), "right");
    }
    keeper.expect("release 10", "released");
    let_the_others_go(&mut keeper);
    end(stage, vec![evictor, keeper]);
}

#[test]
fn a_reader_takes_a_tagged_slot_back_from_an_evictor_that_stands_still() {
    for point in [Point::EvictTagged, Point::EvictCommitting] {
        let stage = stage(4);
        let (mut evictor, mut keeper) = (stage.rank(0), stage.rank(1));
        let slot = only_ten_may_go(&mut keeper);
        evictor.expect(&format!("crash-at {} 1 stop", point.name()), "armed");
        evictor.say("load 20");
        evictor.expect_stop();
        assert_eq!(keeper.number("keep 10", "hit"), slot);
        assert_eq!(stage.segment().plane().count(Counter::TagsCancelled), 1);
        evictor.resume();
        // It must look elsewhere now.
        keeper.expect("release 11", "released");
        assert_ne!(number_in(&evictor.hear()), slot);
        keeper.expect("check 10", "right");
        keeper.expect("release 10", "released");
        keeper.expect("release 12", "released");
        keeper.expect("release 13", "released");
        end(stage, vec![evictor, keeper]);
    }
}

#[test]
fn the_page_that_a_dead_evictor_had_tagged_stays_in_the_cache() {
    for point in [Point::EvictTagged, Point::EvictCommitting] {
        for reaped_first in [true, false] {
            let stage = stage(4);
            let (mut evictor, mut keeper) = (stage.rank(0), stage.rank(1));
            let slot = only_ten_may_go(&mut keeper);
            evictor.expect(&format!("crash-at {} 1 kill", point.name()), "armed");
            evictor.say("load 20");
            evictor.expect_death();
            if reaped_first {
                keeper.expect("reap", "reaped 1");
                assert_eq!(violations(&stage.segment()), []);
            }
            assert_eq!(keeper.number("load 10", "hit"), slot);
            let_the_others_go(&mut keeper);
            keeper.expect("loads 100 120", "loaded 20");
            end(stage, vec![keeper]);
        }
    }
}

#[test]
fn two_full_buckets_are_an_error_while_all_is_pinned_and_give_way_to_the_living_after_a_death() {
    for point in [Point::ReplaceCommitted, Point::ReplaceSwapped] {
        let stage = stage(64);
        let crowd: Vec<u64> = keys::crowd(bucket_count(&stage)).take(17).collect();
        let (late, crowd) = (crowd[16], &crowd[..16]);
        let (mut inserter, mut keeper) = (stage.rank(0), stage.rank(1));
        for id in crowd {
            keeper.expect(&format!("keep {id}"), "owner");
        }
        assert_eq!(inserter.ask(&format!("get {late}")), "error BucketsPinned");
        keeper.expect(&format!("release {}", crowd[5]), "released");
        inserter.expect(&format!("crash-at {} 1 kill", point.name()), "armed");
        inserter.say(&format!("get {late}"));
        inserter.expect_death();
        keeper.expect("reap", "reaped 1");
        assert_eq!(violations(&stage.segment()), []);
        keeper.expect(&format!("load {late}"), "owner");
        for id in crowd.iter().filter(|&&id| id != crowd[5]) {
            keeper.expect(&format!("check {id}"), "right");
            keeper.expect(&format!("release {id}"), "released");
        }
        end(stage, vec![keeper]);
    }
}

#[test]
fn the_audience_of_a_failure_reads_its_code_though_somebody_would_load_again() {
    let stage = stage(4);
    let mut actors: Vec<Process> = (0..3).map(|rank| stage.rank(rank)).collect();
    actors[0].expect("get 7", "owner");
    actors[1].expect("get 7", "wait");
    actors[1].expect("crash-at WaitOver 1 stop", "armed");
    actors[1].say("wait 7 600000");
    // Woken, or with its slice over, and not looking.
    actors[1].expect_stop();
    actors[0].expect("fail 7", "failed");
    let code = format!("Failed(LoadErrorCode({}))", keys::failure_code(7));
    assert_eq!(actors[2].ask("get 7"), format!("error {code}"));
    actors[1].resume();
    assert_eq!(actors[1].hear(), format!("error {code}"));
    actors[2].expect("load 7", "owner");
    end(stage, actors);
}

#[test]
fn whoever_inserts_a_key_slower_than_another_waits_for_that_one() {
    for point in [Point::InsertAnnounced, Point::InsertPublished, Point::InsertScanned] {
        let stage = stage(8);
        let (mut slow, mut fast) = (stage.rank(0), stage.rank(1));
        slow.expect(&format!("crash-at {} 1 stop", point.name()), "armed");
        slow.say("get 7");
        slow.expect_stop();
        fast.expect("get 7", "owner");
        slow.resume();
        let answer = slow.hear();
        assert!(answer.starts_with("wait"), "{point:?}: {answer}");
        fast.expect("fill 7", "filled");
        fast.expect("publish 7", "published");
        slow.expect("wait 7 600000", "ready");
        slow.expect("release 7", "released");
        fast.expect("release 7", "released");
        end(stage, vec![slow, fast]);
    }
}
