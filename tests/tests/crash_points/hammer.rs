//! Eight ranks hammering, each with a death or a pause waiting for it at some point.

use std::time::{Duration, Instant};

use ucm_core::crash::Point;
use ucm_tests::board::Tally;
use ucm_tests::process::{Heard, Process};
use ucm_tests::rng::Rng;
use ucm_tests::setup::Setup;
use ucm_tests::stage::{Stage, number_from_env};

use crate::play::ACTOR;

fn start(stage: &Stage, rank: usize, rng: &mut Rng) -> Process {
    let mut actor = stage.start();
    let points = Point::ALL.len() as u64;
    let mut point = || Point::ALL[rng.below(points) as usize].name();
    let (deadly, slow) = (point(), point());
    let (nth, pause_ms) = (1 + rng.below(60), rng.below(40));
    actor.say(&format!("crash-at {deadly} {nth} kill"));
    actor.say(&format!("crash-at {slow} {} pause:{pause_ms}", 1 + rng.below(100)));
    actor.say(&format!("join {rank}"));
    actor.say(&format!("hammer-dma {} 64 300", rng.number() >> 1));
    // Leaving and reaping have points too.
    actor.say("reap");
    actor.say("leave");
    actor
}

#[test]
fn eight_ranks_hammer_while_all_of_them_die_and_pause_at_random_points() {
    let seconds = number_from_env("UCM_TEST_SECONDS", 3);
    let setup = Setup { reserved: 1, quarantine_ms: 250, ..Setup::default() };
    let stage = Stage::lasting(setup, ACTOR, seconds);
    let mut dma = stage.start();
    dma.say("dma");
    let mut rng = Rng::new(number_from_env("UCM_TEST_SEED", 1));
    let mut actors: Vec<Process> = (0..8).map(|rank| start(&stage, rank, &mut rng)).collect();
    let board = stage.board();
    let began = Instant::now();
    let (mut deaths, mut survivors) = (0, 0);
    let mut running = true;
    while running || !actors.is_empty() {
        running = began.elapsed() < Duration::from_secs(seconds) || deaths < 60;
        if !running {
            board.stop_hammering();
        }
        let mut going = Vec::new();
        for (rank, mut actor) in actors.into_iter().enumerate() {
            match actor.hear_now() {
                Some(Heard::Died(signal)) => {
                    assert_eq!(signal, Some(nix::sys::signal::Signal::SIGKILL as i32));
                    deaths += 1;
                }
                Some(Heard::Line(line)) if line == "left" => survivors += 1,
                Some(Heard::Line(line)) => {
                    assert!(!line.starts_with("error"), "rank {rank}: {line}");
                    going.push(actor);
                    continue;
                }
                Some(Heard::Stopped) | None => {
                    going.push(actor);
                    continue;
                }
            }
            drop(actor);
            if running {
                going.push(start(&stage, rank, &mut rng));
            }
        }
        actors = going;
        std::thread::sleep(Duration::from_millis(1));
    }
    board.stop_transfers();
    assert_eq!(dma.hear(), "done");
    dma.finish();
    let reached = Point::ALL.iter().filter(|&&point| board.passed(point) > 0).count();
    eprintln!(
        "hammered: {deaths} deaths at points, {survivors} survived theirs, {reached} of {} points \
         passed; {}",
        Point::ALL.len(),
        stage.tallies()
    );
    assert!(board.tally(Tally::Overtaken) <= deaths, "only the dead are overtaken");
    stage.finish();
}
