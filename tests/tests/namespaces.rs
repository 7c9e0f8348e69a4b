//! Two participants with equal process ids, each the first process of a pid namespace of its own.

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use ucm_core::segment::counters::Counter;
use ucm_tests::audit::violations;
use ucm_tests::process::{Heard, Process};
use ucm_tests::setup::Setup;
use ucm_tests::stage::Stage;

const ACTOR: &str = env!("CARGO_BIN_EXE_actor");

/// The rank's first process in a namespace of its own.
fn rank(stage: &Stage, rank: u32) -> Option<Process> {
    let mut process = stage.start_in_namespace()?;
    process.expect(&format!("join {rank}"), "joined");
    Some(process)
}

/// SIGKILL to the rank itself, not to the process that made its namespace:
/// that one's death would also end its input, and it might leave in time.
fn kill(process: &mut Process) {
    let maker = process.pid();
    let children = std::fs::read_to_string(format!("/proc/{maker}/task/{maker}/children"));
    let children = children.expect("the maker lives until its child is dead");
    for child in children.split_whitespace().filter_map(|pid| pid.parse().ok()) {
        // Its maker has not waited for it yet, or waits now: either way the
        // number is nobody else's.
        let _gone = nix::sys::signal::kill(Pid::from_raw(child), Signal::SIGKILL);
    }
    // Ends with its child.
    while !matches!(process.hear_any(), Heard::Died(_)) {}
}

fn pids(stage: &Stage) -> Vec<u32> {
    let segment = stage.segment();
    let plane = segment.plane();
    plane.participants().filter(|(_, view)| view.live).map(|(_, view)| view.pid).collect()
}

#[test]
fn of_two_with_the_same_pid_the_dead_one_is_reaped_and_the_living_one_is_not() {
    let stage = Stage::new(Setup { ranks: 4, quarantine_ms: 20, ..Setup::default() }, ACTOR);
    let Some(mut owner) = rank(&stage, 0) else { return };
    let Some(mut twin) = rank(&stage, 1) else { return };
    let mut outside = stage.rank(2);
    assert_eq!(pids(&stage)[..2], [1, 1], "both are the first of their namespace");
    for round in 0..3 {
        let (lost, kept) = (10 + 10 * round, 11 + 10 * round);
        owner.expect(&format!("get {lost}"), "owner");
        twin.expect(&format!("get {kept}"), "owner");
        outside.say(&format!("load {lost}"));
        kill(&mut owner);
        // Seen dead from outside its namespace, by its lock and not by its pid.
        assert!(outside.hear().starts_with("owner"));
        twin.expect("reap", "reaped 0");
        outside.expect("reap", "reaped 0");
        assert_eq!(stage.segment().plane().count(Counter::Reaps), round + 1);
        // Its twin lives, and its load is its own.
        outside.expect(&format!("get {kept}"), "wait");
        twin.expect(&format!("fill {kept}"), "filled");
        twin.expect(&format!("publish {kept}"), "published");
        outside.expect(&format!("wait {kept} 600000"), "ready");
        outside.expect(&format!("release {kept}"), "released");
        twin.expect(&format!("release {kept}"), "released");
        // The dead one comes back, with that pid again, and takes part.
        let Some(again) = rank(&stage, 0) else { return };
        owner = again;
        assert_eq!(pids(&stage)[..2], [1, 1]);
        owner.expect(&format!("load {kept}"), "hit");
        assert_eq!(violations(&stage.segment()), []);
    }
    for mut actor in [owner, twin, outside] {
        actor.expect("leave", "left");
        actor.finish();
    }
    stage.finish();
}

#[test]
fn a_waiter_that_dies_beside_an_owner_of_the_same_pid_takes_nothing_from_it() {
    let stage = Stage::new(Setup { ranks: 4, ..Setup::default() }, ACTOR);
    let Some(mut owner) = rank(&stage, 0) else { return };
    let Some(mut waiter) = rank(&stage, 1) else { return };
    let mut outside = stage.rank(2);
    owner.expect("get 1", "owner");
    waiter.expect("get 1", "wait");
    kill(&mut waiter);
    stage.until("the waiter reaped", || {
        outside.ask("reap");
        stage.segment().plane().count(Counter::Reaps) == 1
    });
    // The place of the living is not to be had.
    owner.expect("fill 1", "filled");
    owner.expect("publish 1", "published");
    outside.expect("load 1", "hit");
    owner.expect("release 1", "released");
    for mut actor in [owner, outside] {
        actor.expect("leave", "left");
        actor.finish();
    }
    stage.finish();
}
