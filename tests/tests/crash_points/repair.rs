//! Reaping: killed in the middle, finished by the next; and whoever is reaped alive.

use ucm_core::cache::{Audit, Census};
use ucm_core::crash::Point;
use ucm_core::participant::ParticipantId;
use ucm_tests::audit::violations;
use ucm_tests::setup::Setup;
use ucm_tests::stage::Stage;

use crate::play::{ACTOR, leave_a_mess};

fn stage() -> Stage {
    Stage::new(Setup { slots: 64, ranks: 6, quarantine_ms: 20, ..Setup::default() }, ACTOR)
}

fn census(stage: &Stage) -> Census {
    Audit::new(&stage.segment().plane()).census()
}

fn pins_of(stage: &Stage, rank: u32) -> u64 {
    let participant = ParticipantId::new(rank).expect("a rank");
    Audit::new(&stage.segment().plane()).pins_of(participant)
}

fn is_listed(stage: &Stage, rank: u32) -> bool {
    let participant = ParticipantId::new(rank).expect("a rank");
    stage.segment().plane().participant(participant).is_some_and(|view| view.live)
}

#[test]
fn what_a_reaper_that_dies_leaves_undone_the_next_one_does() {
    let points = [
        (Point::ReapStart, 1),
        (Point::ReapUnlisted, 1),
        (Point::ReapUnlisted, 2),
        (Point::ReapSlot, 1),
        (Point::ReapSlot, 3),
        (Point::ReapPins, 1),
        (Point::ReapPins, 2),
        (Point::ReapRepaired, 1),
        (Point::ReapVacated, 1),
    ];
    for (point, nth) in points {
        let stage = stage();
        let (mut first, mut second) = (stage.rank(0), stage.rank(1));
        leave_a_mess(&stage, 5, 10);
        assert!(pins_of(&stage, 5) >= 4);
        first.expect(&format!("crash-at {} {nth} kill", point.name()), "armed");
        first.say("reap");
        first.expect_death();
        // The dead reaper, and the dead one unless that was finished.
        let left = if point == Point::ReapVacated { 1 } else { 2 };
        second.expect("reap", &format!("reaped {left}"));
        assert_eq!(violations(&stage.segment()), [], "{point:?}, passing {nth}");
        assert_eq!(pins_of(&stage, 5), 0);
        assert!(!is_listed(&stage, 5) && !is_listed(&stage, 0));
        // What the dead one had loaded is still here, the rest can be loaded.
        second.expect("loads 10 12", "loaded 0");
        second.expect("loads 12 20", "loaded 8");
        second.expect("leave", "left");
        second.finish();
        stage.finish();
    }
}

#[test]
fn slots_are_repaired_before_pins_and_pins_before_the_entry_goes() {
    let stage = stage();
    let mut reaper = stage.rank(0);
    leave_a_mess(&stage, 5, 10);
    let before = census(&stage);
    assert_eq!((before.loading, before.inserting, before.quarantined), (2, 1, 0));
    let pins = pins_of(&stage, 5);
    reaper.expect("crash-at ReapPins 1 stop", "armed");
    reaper.expect("crash-at ReapRepaired 1 stop", "armed");
    reaper.say("reap");
    reaper.expect_stop();
    // At the first of its pins: no slot is the dead one's any more.
    let between = census(&stage);
    assert_eq!((between.loading, between.inserting, between.quarantined), (0, 0, 2));
    assert!(pins_of(&stage, 5) >= pins - 1 && is_listed(&stage, 5));
    reaper.resume();
    reaper.expect_stop();
    assert!(pins_of(&stage, 5) == 0 && is_listed(&stage, 5));
    reaper.resume();
    assert_eq!(reaper.hear(), "reaped 1");
    assert!(!is_listed(&stage, 5));
    reaper.expect("leave", "left");
    reaper.finish();
    stage.finish();
}

#[test]
fn while_a_reaper_stands_still_nobody_reaps_twice_and_all_other_work_goes_on() {
    let stage = stage();
    let (mut reaper, mut other) = (stage.rank(0), stage.rank(1));
    leave_a_mess(&stage, 5, 10);
    reaper.expect("crash-at ReapSlot 1 stop", "armed");
    reaper.say("reap");
    reaper.expect_stop();
    other.expect("reap", "reaped 0");
    other.expect("loads 100 200", "loaded 100");
    other.expect("loads 10 12", "loaded");
    reaper.resume();
    assert_eq!(reaper.hear(), "reaped 1");
    assert_eq!(violations(&stage.segment()), []);
    other.expect("loads 12 20", "loaded 8");
    for mut actor in [reaper, other] {
        actor.expect("leave", "left");
        actor.finish();
    }
    stage.finish();
}

#[test]
fn whoever_is_reaped_alive_has_its_publications_refused_and_unpins_nothing_of_its_successor() {
    let stage = stage();
    let (mut zombie, mut other) = (stage.rank(0), stage.rank(1));
    let slots = ["get 1", "get 2"].map(|get| zombie.number(get, "owner"));
    zombie.expect("fill 1", "filled");
    assert_eq!(zombie.ask("forsake"), "forsaken 1");
    other.expect("reap", "reaped 1");
    assert_eq!(census(&stage).quarantined, 2);
    let mut successor = stage.rank(0);
    // Its quarantine over, the zombie's slots get new keys, pinned by the
    // successor in the very counters that were the zombie's.
    let mut kept = Vec::new();
    for id in 100.. {
        if kept.len() == 2 {
            break;
        }
        let slot = successor.number(&format!("keep {id}"), "owner");
        if slots.contains(&slot) {
            kept.push(id);
        } else {
            successor.expect(&format!("release {id}"), "released");
        }
    }
    assert_eq!(pins_of(&stage, 0), 2);
    assert_eq!(zombie.ask("publish 1"), "error Late");
    assert_eq!(zombie.ask("fail 2"), "error Late");
    assert_eq!(pins_of(&stage, 0), 2, "the successor's pins are its own");
    zombie.kill();
    for id in kept {
        successor.expect(&format!("check {id}"), "right");
        successor.expect(&format!("release {id}"), "released");
    }
    for mut actor in [successor, other] {
        actor.expect("leave", "left");
        actor.finish();
    }
    stage.finish();
}

#[test]
fn somebody_who_asks_for_the_keys_of_the_dead_does_not_wait_for_a_janitor() {
    let stage = stage();
    let mut other = stage.rank(1);
    leave_a_mess(&stage, 5, 10);
    // Nobody is told to reap: waiting for a dead owner is what finds it dead.
    other.expect("loads 10 20", "loaded 8");
    assert_eq!(violations(&stage.segment()), []);
    other.expect("leave", "left");
    other.finish();
    stage.finish();
}
