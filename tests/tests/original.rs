//! Every kill that the cache this one replaces does not survive, by name.
//!
//! `UCM_TEST_KILLS` (60 by default; 600 is the long form) says how often.

use std::time::Duration;

use nix::sys::signal::Signal;
use ucm_core::cache::Audit;
use ucm_posix::{Segment, SegmentError, gc};
use ucm_tests::process::{Heard, Process, number_in};
use ucm_tests::rng::Rng;
use ucm_tests::setup::Setup;
use ucm_tests::stage::{Stage, number_from_env};

const ACTOR: &str = env!("CARGO_BIN_EXE_actor");

fn kills() -> u64 {
    number_from_env("UCM_TEST_KILLS", 60)
}

/// A kill takes well below this; the watchdog counts on it.
const SECONDS_A_KILL: u64 = 1;

fn stage(setup: Setup) -> Stage {
    Stage::lasting(setup, ACTOR, kills() * SECONDS_A_KILL)
}

fn leave_all(actors: Vec<Process>) {
    for mut actor in actors {
        actor.expect("leave", "left");
        actor.finish();
    }
}

#[test]
fn the_owner_of_loading_shards_is_killed_and_its_waiters_finish_by_loading_themselves() {
    let stage = stage(Setup { quarantine_ms: 20, ..Setup::default() });
    let mut actors: Vec<Process> = (0..6).map(|rank| stage.rank(rank)).collect();
    for round in 0..5 {
        let first = 10 * round;
        for id in first..first + 4 {
            actors[0].expect(&format!("get {id}"), "owner");
            actors[0].expect(&format!("half {id}"), "filled");
        }
        let errand = format!("loads {first} {}", first + 4);
        actors[1..].iter_mut().for_each(|actor| actor.say(&errand));
        // All five sleep on the first of the four.
        stage.until_pins(4 + 5);
        actors[0].kill();
        let loaded: u32 = actors[1..].iter_mut().map(|actor| number_in(&actor.hear())).sum();
        assert_eq!(loaded, 4, "each of the four shards is loaded once");
        actors[0] = stage.rank(0);
        // The killed one, started again, finds them.
        actors[0].expect(&errand, "loaded 0");
    }
    leave_all(actors);
    stage.finish();
}

#[test]
fn a_killed_owner_that_is_started_again_loads_what_it_was_loading() {
    let stage = stage(Setup::default());
    let mut owner = stage.rank(0);
    owner.expect("get 1", "owner");
    owner.kill();
    let mut again = stage.rank(0);
    again.expect("load 1", "owner");
    leave_all(vec![again]);
    stage.finish();
}

#[test]
fn references_of_the_killed_come_back_and_a_get_of_a_new_key_ends() {
    let stage = stage(Setup::default());
    let mut other = stage.rank(1);
    for round in 0..kills().min(20) {
        // Every slot pinned by one who dies.
        let mut holder = stage.rank(0);
        let first = 100 * round;
        for id in first..first + 16 {
            holder.expect(&format!("keep {id}"), "");
        }
        holder.kill();
        let (from, to) = (first + 50, first + 66);
        other.expect(&format!("loads {from} {to}"), "loaded 16");
        assert_eq!(Audit::new(&stage.segment().plane()).pins(), 0);
    }
    leave_all(vec![other]);
    stage.finish();
}

#[test]
fn a_rank_that_is_killed_while_hammering_get_and_release_hangs_nobody() {
    let stage = stage(Setup { quarantine_ms: 20, ..Setup::default() });
    let mut rng = Rng::new(number_from_env("UCM_TEST_SEED", 1));
    let mut bystanders: Vec<Process> = (1..3).map(|rank| stage.rank(rank)).collect();
    for kill in 0..kills() {
        let mut victim = stage.rank(0);
        victim.say(&format!("hammer {kill} 8 {}", u64::MAX));
        for (seed, bystander) in bystanders.iter_mut().enumerate() {
            bystander.say(&format!("hammer {seed} 8 400"));
        }
        std::thread::sleep(Duration::from_micros(rng.below(4000)));
        victim.kill();
        for bystander in &mut bystanders {
            assert_eq!(bystander.hear(), "hammered", "kill {kill}");
            // Every key, so also whatever the dead one was in the middle of.
            bystander.expect("loads 0 8", "loaded");
        }
    }
    eprintln!("{} kills while hammering, nobody hung", kills());
    leave_all(bystanders);
    stage.finish();
}

#[test]
fn two_hundred_joiners_race_the_creator_of_their_segment() {
    let stage = stage(Setup::default());
    stage.let_go();
    let mut actors: Vec<Process> = (0..2).map(|_| stage.start()).collect();
    for _ in 0..200 {
        for (rank, actor) in actors.iter_mut().enumerate() {
            actor.say(&format!("join {rank}"));
        }
        actors.iter_mut().for_each(|actor| assert_eq!(actor.hear(), "joined"));
        actors[0].expect("load 1", "owner");
        actors[1].expect("load 1", "hit");
        actors.iter_mut().for_each(|actor| actor.say("leave"));
        actors.iter_mut().for_each(|actor| assert_eq!(actor.hear(), "left"));
        assert_eq!(stage.segment_files(), [""; 0]);
    }
    actors.into_iter().for_each(Process::finish);
    stage.assert_nothing_wrong();
}

#[test]
fn a_creator_that_is_killed_on_the_way_wedges_nobody() {
    let stage = stage(Setup::default());
    stage.let_go();
    let mut rng = Rng::new(number_from_env("UCM_TEST_SEED", 1));
    let mut halves = 0;
    for kill in 0..kills() {
        let mut creator = stage.start();
        creator.say("join 0");
        std::thread::sleep(Duration::from_micros(rng.below(3000)));
        creator.kill();
        halves += u64::from(stage.segment_files().len() == 1);
        let mut next = stage.rank(0);
        next.expect("loads 0 8", "loaded");
        next.expect("leave", "left");
        next.finish();
        let collected = gc::collect(&stage.place().options().expect("options").dir, false);
        let failed = collected.expect("a collection").failed;
        assert!(failed.is_empty(), "kill {kill}: {failed:?}");
        assert_eq!(stage.segment_files(), [""; 0], "kill {kill}");
    }
    eprintln!("{} creators killed, {halves} of them half way", kills());
    stage.assert_nothing_wrong();
}

#[test]
fn another_shard_size_on_the_same_id_is_refused_with_both_values() {
    let stage = stage(Setup::default());
    let mut rank = stage.rank(0);
    rank.expect("loads 0 8", "loaded 8");
    let mut options = stage.place().options().expect("options");
    let ours = options.shape.shard_bytes;
    options.shape.shard_bytes = 2 * ours;
    match Segment::open_or_create(&options) {
        Err(error @ SegmentError::Refused { in_use: true, .. }) => {
            let text = error.to_string();
            let both = text.contains(&ours.to_string()) && text.contains(&(2 * ours).to_string());
            assert!(both && text.contains("shard_bytes"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    rank.expect("loads 0 8", "loaded 0");
    leave_all(vec![rank]);
    stage.finish();
}

#[test]
fn whoever_is_killed_or_leaves_takes_nothing_from_those_who_stay() {
    let stage = stage(Setup::default());
    stage.let_go();
    let mut stays = stage.rank(0);
    stays.expect("loads 0 8", "loaded 8");
    for round in 0..10 {
        let mut goes = stage.rank(1);
        goes.expect("loads 0 8", "loaded 0");
        if round % 2 == 0 {
            goes.expect("leave", "left");
            goes.finish();
        } else {
            goes.signal(Signal::SIGKILL);
            assert_eq!(goes.hear_any(), Heard::Died(Some(Signal::SIGKILL as i32)));
        }
        stays.expect("loads 0 8", "loaded 0");
        assert_eq!(stage.segment_files().len(), 2);
    }
    stays.expect("leave", "left");
    stays.finish();
    assert_eq!(stage.segment_files(), [""; 0]);
    stage.assert_nothing_wrong();
}
