//! Real processes on a real segment: hammered, killed, stopped, and asked to be right all the same.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use ucm_core::segment::counters::Counter;
use ucm_tests::audit;
use ucm_tests::board::Tally;
use ucm_tests::process::{Process, number_in};
use ucm_tests::rng::Rng;
use ucm_tests::setup::Setup;
use ucm_tests::stage::{Stage, number_from_env};

const ACTOR: &str = env!("CARGO_BIN_EXE_actor");
const RANKS: u32 = 8;
/// Beyond every watchdog: whoever waits that long hangs.
const FOR_EVER_MS: u64 = 3_600_000;

fn stage(setup: Setup) -> Stage {
    Stage::new(setup, ACTOR)
}

fn seconds() -> u64 {
    number_from_env("UCM_TEST_SECONDS", 3)
}

/// 64 keys on 16 slots.
fn hammered() -> Stage {
    let setup = Setup { reserved: 1, quarantine_ms: 250, ..Setup::default() };
    Stage::lasting(setup, ACTOR, seconds())
}

const HAMMER: &str = "hammer-dma";

fn ranks(stage: &Stage, ranks: u32) -> Vec<Process> {
    (0..ranks).map(|rank| stage.rank(rank)).collect()
}

fn leave_all(actors: Vec<Process>) {
    for mut actor in actors {
        actor.expect("leave", "left");
        actor.finish();
    }
}

/// The process that writes into slots for others, and outlives them all.
fn dma(stage: &Stage) -> Process {
    let mut dma = stage.start();
    dma.say("dma");
    dma
}

fn end_dma(stage: &Stage, mut dma: Process) {
    stage.board().stop_transfers();
    assert_eq!(dma.hear(), "done");
    dma.finish();
}

#[test]
fn eight_processes_hammer_64_keys_on_16_slots() {
    let stage = hammered();
    let dma = dma(&stage);
    let mut actors = ranks(&stage, RANKS);
    for (seed, actor) in actors.iter_mut().enumerate() {
        actor.say(&format!("{HAMMER} {seed} 64 {}", u64::MAX));
    }
    let began = Instant::now();
    let board = stage.board();
    stage.until("enough loads", || {
        began.elapsed() >= Duration::from_secs(seconds()) && board.tally(Tally::Loads) >= 1000
    });
    board.stop_hammering();
    actors.iter_mut().for_each(|actor| assert_eq!(actor.hear(), "hammered"));
    leave_all(actors);
    end_dma(&stage, dma);
    eprintln!("undisturbed: {}", stage.tallies());
    assert_eq!(board.tally(Tally::OwnerDeaths), 0, "nobody died");
    assert_eq!(board.tally(Tally::Overtaken), 0, "nobody died");
    assert_eq!(stage.segment().plane().count(Counter::Reaps), 0, "nobody died");
    stage.finish();
}

/// The ranks of the disturbed hammer, of which some are always dying.
struct Mob<'a> {
    stage: &'a Stage,
    actors: Vec<Process>,
    /// Who stands still, and until when.
    stopped: Vec<(usize, Instant)>,
    rng: Rng,
    deaths: u64,
    stops: u64,
}

impl Mob<'_> {
    fn start(&mut self, rank: usize) -> Process {
        let mut actor = self.stage.start();
        actor.say(&format!("join {rank}"));
        actor.say(&format!("{HAMMER} {} 64 {}", self.rng.number() >> 1, u64::MAX));
        actor
    }

    /// One blow.
    fn strike(&mut self) {
        let now = Instant::now();
        let (due, standing) = self.stopped.iter().partition(|(_, until)| *until <= now);
        self.stopped = standing;
        let due: Vec<(usize, Instant)> = due;
        due.iter().for_each(|(rank, _)| self.actors[*rank].resume());
        let rank = self.rng.below(self.actors.len() as u64) as usize;
        let still = self.stopped.iter().any(|(stopped, _)| *stopped == rank);
        if self.rng.one_in(3) {
            if !still && self.stopped.len() < 2 {
                self.actors[rank].signal(Signal::SIGSTOP);
                self.stops += 1;
                let ms = self.rng.below(60);
                self.stopped.push((rank, now + Duration::from_millis(ms)));
            }
        } else {
            // The stopped are killed too.
            self.stopped.retain(|(stopped, _)| *stopped != rank);
            self.actors[rank].kill();
            self.deaths += 1;
            self.actors[rank] = self.start(rank);
        }
    }
}

#[test]
fn eight_processes_hammer_while_ranks_are_killed_and_stopped_at_random() {
    let stage = hammered();
    let dma = dma(&stage);
    let rng = Rng::new(number_from_env("UCM_TEST_SEED", 1));
    let mut mob =
        Mob { stage: &stage, actors: Vec::new(), stopped: Vec::new(), rng, deaths: 0, stops: 0 };
    for rank in 0..RANKS as usize {
        let actor = mob.start(rank);
        mob.actors.push(actor);
    }
    let board = stage.board();
    let began = Instant::now();
    // So many deaths and loads whatever the machine's speed: the clock alone
    // ends nothing.
    while began.elapsed() < Duration::from_secs(seconds())
        || mob.deaths < 40
        || board.tally(Tally::Loads) < 500
    {
        let pause_ms = 5 + mob.rng.below(25);
        std::thread::sleep(Duration::from_millis(pause_ms));
        mob.strike();
    }
    board.stop_hammering();
    let Mob { mut actors, deaths, stops, .. } = mob;
    // All of them first: one may be waiting for another that stands still.
    actors.iter().for_each(Process::resume);
    for actor in &mut actors {
        // It may have been stopped since we last looked: `hear_any` says so.
        let answers: Vec<String> = std::iter::from_fn(|| match actor.hear_any() {
            ucm_tests::process::Heard::Stopped => Some(String::new()),
            ucm_tests::process::Heard::Line(line) => Some(line),
            ucm_tests::process::Heard::Died(signal) => panic!("died of {signal:?}"),
        })
        .filter(|line| !line.is_empty())
        .take(2)
        .collect();
        assert_eq!(answers, ["joined", "hammered"]);
    }
    leave_all(actors);
    end_dma(&stage, dma);
    let plane = stage.segment();
    let reaped = |counter| plane.plane().count(counter);
    eprintln!(
        "disturbed: {deaths} deaths, {stops} stops; reaps {}, claims {}, quarantined {}, pins {}; {}",
        reaped(Counter::Reaps),
        reaped(Counter::ReapedClaims),
        reaped(Counter::Quarantined),
        reaped(Counter::ReapedPins),
        stage.tallies()
    );
    drop(plane);
    assert!(board.tally(Tally::Overtaken) <= deaths, "only the dead are overtaken");
    stage.finish();
}

#[test]
fn of_eight_who_ask_for_a_fresh_key_at_once_exactly_one_owns_it() {
    const ROUNDS: u64 = 300;
    let stage = stage(Setup { slots: 64, ..Setup::default() });
    let mut actors = ranks(&stage, RANKS);
    actors.iter_mut().for_each(|actor| actor.say(&format!("race 100 {ROUNDS} {RANKS}")));
    actors.iter_mut().for_each(|actor| assert_eq!(actor.hear(), "raced"));
    for id in 100..100 + ROUNDS {
        assert_eq!(stage.board().wins(id), 1, "owners of key {id}");
    }
    assert_eq!(stage.board().tally(Tally::Loads), ROUNDS);
    leave_all(actors);
    stage.finish();
}

#[test]
fn the_waiters_of_a_killed_owner_finish_and_exactly_one_of_them_loads_it() {
    let stage = stage(Setup::default());
    let mut actors = ranks(&stage, RANKS);
    for round in 0..3 {
        let id = 10 + round;
        let dead_slot = actors[0].number(&format!("get {id}"), "owner");
        actors[0].expect(&format!("half {id}"), "filled");
        // Their own deadlines are beyond the watchdog: only the death ends this.
        actors[1..].iter_mut().for_each(|actor| actor.say(&format!("keep {id}")));
        stage.until_pins(RANKS.into());
        actors[0].kill();
        let answers: Vec<String> = actors[1..].iter_mut().map(Process::hear).collect();
        let owners = answers.iter().filter(|answer| answer.starts_with("owner")).count();
        assert_eq!(owners, 1, "{answers:?}");
        let slots: Vec<u32> = answers.iter().map(|answer| number_in(answer)).collect();
        assert!(slots.iter().all(|&slot| slot == slots[0] && slot != dead_slot), "{answers:?}");
        for actor in &mut actors[1..] {
            actor.expect(&format!("release {id}"), "released");
        }
        actors[0] = stage.rank(0);
    }
    assert_eq!(stage.segment().plane().count(Counter::Quarantined), 3);
    leave_all(actors);
    stage.finish();
}

#[test]
fn a_stopped_owner_is_never_robbed() {
    let stage = stage(Setup::default());
    let mut actors = ranks(&stage, 4);
    actors[0].expect("get 1", "owner");
    actors[0].expect("half 1", "filled");
    actors[0].stop();
    for actor in &mut actors[1..] {
        actor.expect("get 1", "wait");
        // Several slices, so several looks at the owner's byte.
        actor.expect("wait 1 150", "error Deadline");
        actor.expect("reap", "reaped 0");
        actor.expect("loads 100 160", "loaded");
        actor.expect("get 1", "wait");
    }
    actors[0].resume();
    actors[0].expect("fill 1", "filled");
    actors[0].expect("publish 1", "published");
    for actor in &mut actors[1..] {
        actor.expect(&format!("wait 1 {FOR_EVER_MS}"), "ready");
        actor.expect("release 1", "released");
    }
    actors[0].expect("release 1", "released");
    leave_all(actors);
    stage.finish();
}

#[test]
fn a_publication_wakes_a_process_that_sleeps_without_a_timeout() {
    let stage = stage(Setup::default());
    let mut actors = ranks(&stage, 3);
    for (id, end) in [(1, "publish 1"), (2, "fail 2")] {
        actors[0].expect(&format!("get {id}"), "owner");
        actors[0].expect(&format!("fill {id}"), "filled");
        for actor in &mut actors[1..] {
            actor.expect(&format!("get {id}"), "wait");
            actor.say(&format!("sleep {id}"));
        }
        // They are asleep, or about to be; the word itself settles which.
        for actor in &actors[1..] {
            let path = format!("/proc/{}/syscall", actor.pid());
            let futex = format!("{} ", libc::SYS_futex);
            stage.until("asleep", || {
                std::fs::read_to_string(&path).is_ok_and(|call| call.starts_with(&futex))
            });
        }
        actors[0].expect(end, end.split(' ').next().unwrap());
        for actor in &mut actors[1..] {
            assert_eq!(actor.hear(), "woken");
            actor.expect(&format!("release {id}"), "released");
        }
    }
    actors[0].expect("release 1", "released");
    leave_all(actors);
    stage.finish();
}

#[test]
fn what_is_still_written_for_a_dead_owner_reaches_nobody_elses_bytes() {
    let stage = stage(Setup { ranks: 2, quarantine_ms: 4000, ..Setup::default() });
    let dma = dma(&stage);
    let (mut owner, mut other) = (stage.rank(0), stage.rank(1));
    for id in 0..8 {
        owner.expect(&format!("get {id}"), "owner");
    }
    // One transfer a life; it is written when its owner is long dead.
    owner.expect("transfer 5 400", "submitted");
    owner.kill();
    other.expect("reap", "reaped 1");
    assert_eq!(stage.segment().plane().count(Counter::Quarantined), 8);
    // Every slot that may be had is filled, before and after that write.
    other.expect("loads 100 140", "loaded 40");
    let board = stage.board();
    stage.until("the late write", || {
        board.tally(Tally::Transfers) + board.tally(Tally::TransfersRefused) == 1
    });
    for id in 132..140 {
        other.expect(&format!("keep {id}"), "hit");
        let right = other.ask(&format!("check {id}"));
        assert!(right == "right" || board.tally(Tally::TransfersOverran) > 0, "key {id}");
        other.expect(&format!("release {id}"), "released");
    }
    assert_eq!(board.tally(Tally::TransfersRefused), 0, "the helper came too late for this test");
    let rested = stage.rank(0);
    leave_all(vec![other, rested]);
    end_dma(&stage, dma);
    stage.finish();
}

#[test]
fn all_ranks_are_killed_at_once_and_a_newcomer_finds_a_sound_segment() {
    let stage = stage(Setup { quarantine_ms: 250, ..Setup::default() });
    stage.let_go();
    let mut actors = ranks(&stage, RANKS);
    for (seed, actor) in actors.iter_mut().enumerate() {
        actor.say(&format!("hammer {seed} 64 {}", u64::MAX));
    }
    let board = stage.board();
    stage.until("some loads", || board.tally(Tally::Loads) >= 300);
    actors.iter().for_each(|actor| actor.signal(Signal::SIGKILL));
    actors.iter_mut().for_each(Process::expect_death);
    let mut newcomer = stage.rank(3);
    stage.hold_again();
    newcomer.expect("reap", "reaped 7");
    assert_eq!(audit::violations(&stage.segment()), []);
    newcomer.expect("loads 0 64", "loaded");
    newcomer.expect("leave", "left");
    newcomer.finish();
    stage.finish();
}

#[test]
fn the_last_one_out_removes_the_segment_and_the_dead_do_not_count() {
    let stage = stage(Setup::default());
    stage.let_go();
    assert_eq!(stage.segment_files(), [""; 0]);
    let mut actors = ranks(&stage, 3);
    assert_eq!(stage.segment_files().len(), 2);
    actors[1].kill();
    actors[0].expect("leave", "left");
    assert_eq!(stage.segment_files().len(), 2, "one is left");
    actors[2].expect("leave", "left");
    assert_eq!(stage.segment_files(), [""; 0]);
    // And when the last one is killed, the next one finds it and cleans up.
    actors[0].expect("join 0", "joined");
    actors[0].expect("loads 0 8", "loaded 8");
    actors[0].kill();
    assert_eq!(stage.segment_files().len(), 2);
    actors[2].expect("join 0", "joined");
    actors[2].expect("loads 0 8", "loaded 0");
    actors[2].expect("leave", "left");
    assert_eq!(stage.segment_files(), [""; 0]);
    drop(actors);
    stage.assert_nothing_wrong();
}
