//! Ranks behind their channels: real processes, killed, stopped, interrupted, reloaded.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Command as Process, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ucm_core::channel::message::{TOKEN_LAST, TOKEN_LIMIT};
use ucm_core::channel::{Parameters, Status, TokenRecord};
use ucm_loader::LoaderConfig;
use ucm_loader::channel::{ClientError, Health, Heard, Limits, Watchdog, Worker};
use ucm_loader::rank::protocol::{Command, Done, Outcome, Setup};
use ucm_posix::{SegmentId, ShmDir};

/// Only a hang takes this long; nothing is measured by it.
const HANG: Duration = Duration::from_secs(120);
const SEED: u64 = 3;

struct Place {
    temp: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { temp: tempfile::tempdir_in("/dev/shm").unwrap() }
    }

    fn worker(&self) -> Worker {
        let program = Path::new(env!("CARGO_BIN_EXE_ucm"));
        let dir = ShmDir::new(self.temp.path());
        Worker::start(program, &dir, &SegmentId::new("w").unwrap()).unwrap()
    }

    fn setup(&self) -> Setup {
        let config = LoaderConfig {
            segment_id: "run".to_owned(),
            shm_dir: self.temp.path().to_owned(),
            capacity_bytes: 64 * 4096,
            reserved_slots: Some(0),
            shard_bytes: 4096,
            block_bytes: 4 * 4096,
            local_rank_size: 1,
            backend: "memory:test".to_owned(),
            memory_backend_bytes: 1 << 20,
            ..LoaderConfig::default()
        };
        Setup { config, events_dir: None, device_shards: 256, seed: SEED }
    }

    /// What it leaves, the backend's own file aside.
    fn left(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.temp.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".chan") || name.ends_with(".ctrl")).collect()
    }
}

#[track_caller]
fn outcome(answers: &Receiver<Heard>) -> Outcome {
    loop {
        match answers.recv_timeout(HANG) {
            Ok(Heard::Outcome(outcome)) => return outcome,
            Ok(Heard::Tokens { .. }) => {}
            Err(error) => panic!("no answer: {error}"),
        }
    }
}

#[track_caller]
fn done(worker: &Worker, command: &Command) -> Done {
    match outcome(&worker.send(command, SEED, HANG).unwrap()) {
        Outcome::Done(done) => done,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn load(worker: &Worker, setup: &Setup) {
    let answers = worker.load_weights(setup, HANG).unwrap();
    assert!(matches!(outcome(&answers), Outcome::Ready));
}

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !so() {
        assert!(began.elapsed() < HANG, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The tokens of a stream up to its end, whatever that is.
fn stream(answers: &Receiver<Heard>) -> (Vec<TokenRecord>, Option<Outcome>) {
    let mut all = Vec::new();
    loop {
        match answers.recv_timeout(HANG) {
            Ok(Heard::Tokens { tokens, .. }) => all.extend(tokens),
            Ok(Heard::Outcome(outcome)) => return (all, Some(outcome)),
            Err(RecvTimeoutError::Disconnected) => return (all, None),
            Err(RecvTimeoutError::Timeout) => panic!("the stream hangs"),
        }
    }
}

fn signal(worker: &Worker, signal: Signal) {
    kill(Pid::from_raw(worker.pid() as i32), signal).unwrap();
}

#[test]
fn a_rank_dumps_looks_up_and_loads_through_its_channel_several_things_at_a_time() {
    let place = Place::new();
    let worker = place.worker();
    load(&worker, &place.setup());
    let blocks: Vec<u64> = (0..12).collect();
    let dumped = done(&worker, &Command::Dump { blocks: blocks.clone(), at: 0 });
    assert_eq!((dumped.failed_shards, &dumped.reasons[..]), (0, &[][..]));
    let found = done(&worker, &Command::Lookup { blocks: (0..20).collect() });
    assert_eq!((found.ready_blocks, found.found_blocks), (12, 12));
    let answers: Vec<_> = (0..8)
        .map(|lane| {
            let serve = Command::Serve { blocks: vec![lane, lane + 4], at: 8 * lane };
            worker.send(&serve, SEED, HANG).unwrap()
        })
        .collect();
    for answers in &answers {
        let Outcome::Done(done) = outcome(answers) else { panic!() };
        assert_eq!((done.verified_bytes, done.mismatched_shards), (8 * 4096, 0));
    }
    // What does not fit is refused, and nothing else suffers.
    let answers = worker.send(&Command::Load { blocks, at: 250 }, SEED, HANG).unwrap();
    assert!(matches!(outcome(&answers), Outcome::Error(_)));
    let answers = worker.send(&Command::Metrics, SEED, HANG).unwrap();
    assert!(matches!(outcome(&answers), Outcome::Metrics(_)));
    let answers = worker.send(&Command::Stop, SEED, HANG).unwrap();
    assert!(matches!(outcome(&answers), Outcome::Stopped { drained: true }));
    until("done", || worker.channel().status().get() == Ok(Status::Done));
    drop(worker);
    assert!(place.left().is_empty(), "{:?}", place.left());
}

#[test]
fn weights_are_unloaded_and_loaded_again_by_the_same_process() {
    let place = Place::new();
    let worker = place.worker();
    let pid = worker.pid();
    // Nothing works without them, and a bad setup says why.
    let answers = worker.send(&Command::Poison, SEED, HANG).unwrap();
    assert!(matches!(outcome(&answers), Outcome::Error(_)));
    let mut bad = place.setup();
    bad.config.block_bytes = 1;
    let answers = worker.load_weights(&bad, HANG).unwrap();
    assert!(matches!(outcome(&answers), Outcome::Error(_)));
    for _ in 0..3 {
        load(&worker, &place.setup());
        done(&worker, &Command::Dump { blocks: vec![1], at: 0 });
        assert!(place.left().iter().any(|name| name.ends_with(".ctrl")));
        let took = worker.unload_weights(HANG).unwrap();
        println!("unloaded in {took:?}");
        assert!(!place.left().iter().any(|name| name.ends_with(".ctrl")));
        assert_eq!(worker.channel().status().get(), Ok(Status::Idle));
    }
    assert_eq!(worker.pid(), pid);
}

#[test]
fn a_killed_workers_tokens_are_delivered_and_it_is_restarted_on_the_same_channel() {
    let place = Place::new();
    let worker = place.worker();
    load(&worker, &place.setup());
    for round in 1..=3_u32 {
        let endless = Command::Generate { tokens: u32::MAX, pause_us: 50 };
        let answers = worker.send(&endless, SEED, HANG).unwrap();
        let mut seen = 0;
        while seen < 100 {
            if let Ok(Heard::Tokens { tokens, .. }) = answers.recv_timeout(HANG) {
                assert!(tokens.iter().all(|token| {
                    seen += 1;
                    token.index == seen - 1
                }));
            }
        }
        let killed = Instant::now();
        signal(&worker, Signal::SIGKILL);
        let (rest, outcome) = stream(&answers);
        let learned = killed.elapsed();
        assert!(outcome.is_none(), "{outcome:?}");
        assert!(rest.iter().zip(seen..).all(|(token, index)| token.index == index));
        until("the kernel says it is dead", || !worker.channel().is_worker_alive());
        assert!(matches!(
            worker.send(&Command::Poison, SEED, Duration::from_millis(200)),
            Err(ClientError::Dead | ClientError::Slow { .. })
        ));
        let restarted = worker.restart().unwrap();
        assert_eq!(restarted.epoch, round + 1);
        println!(
            "learned of the death and read {} more tokens in {learned:?}; restarted in {:?}",
            rest.len(),
            restarted.took
        );
        load(&worker, &place.setup());
    }
}

#[test]
fn a_stopped_worker_hangs_and_is_not_dead_and_is_alive_again_when_it_goes_on() {
    let place = Place::new();
    let worker = place.worker();
    load(&worker, &place.setup());
    let limits = Limits { other: Duration::from_millis(1000), ..Limits::default() };
    let period = Duration::from_millis(50);
    let watchdog = Watchdog::start(worker.channel().clone(), limits, period, |_| {}).unwrap();
    until("alive", || watchdog.health() == Health::Alive);
    // Loading weights may take longer than the rest before it counts as hung.
    until("idle", || worker.channel().status().get() == Ok(Status::Idle));
    signal(&worker, Signal::SIGSTOP);
    until("hung", || {
        let health = watchdog.health();
        assert_ne!(health, Health::Dead);
        matches!(health, Health::Hung { .. })
    });
    assert!(matches!(worker.restart(), Err(ClientError::Open(_))));
    signal(&worker, Signal::SIGCONT);
    until("alive again", || watchdog.health() == Health::Alive);
    let answers =
        worker.send(&Command::Generate { tokens: u32::MAX, pause_us: 100 }, SEED, HANG).unwrap();
    until("busy", || watchdog.health() == Health::Busy);
    signal(&worker, Signal::SIGKILL);
    until("dead", || watchdog.health() == Health::Dead);
    assert!(stream(&answers).1.is_none());
}

#[test]
fn an_interrupt_stops_a_stream_at_once_and_a_token_limit_ends_it() {
    let place = Place::new();
    let worker = place.worker();
    load(&worker, &place.setup());
    let endless = Command::Generate { tokens: u32::MAX, pause_us: 60_000_000 };
    for _ in 0..5 {
        let answers = worker.send(&endless, SEED, HANG).unwrap();
        until("streaming", || worker.channel().status().get() == Ok(Status::Streaming));
        let took = worker.interrupt(HANG).unwrap();
        println!("interrupted in {took:?}");
        let (tokens, outcome) = stream(&answers);
        assert!(tokens.is_empty());
        assert!(matches!(outcome, Some(Outcome::Error(reason)) if reason == "interrupted"));
    }
    assert!(matches!(worker.interrupt(HANG), Err(ClientError::Status(Status::Idle))));
    worker.set_parameters(&Parameters { token_limit: 10, ..Parameters::default() }).unwrap();
    let generate = Command::Generate { tokens: 1000, pause_us: 0 };
    let (tokens, outcome) = stream(&worker.send(&generate, SEED, HANG).unwrap());
    assert!(matches!(outcome, Some(Outcome::Done(_))));
    assert_eq!(tokens.len(), 10);
    assert_eq!(tokens[9].flags, TOKEN_LAST | TOKEN_LIMIT);
}

#[test]
fn a_stream_far_longer_than_the_ring_arrives_whole() {
    let place = Place::new();
    let worker = place.worker();
    load(&worker, &place.setup());
    // 32 bytes a token: three times what the ring holds.
    const TOKENS: u32 = 100_000;
    let generate = Command::Generate { tokens: TOKENS, pause_us: 0 };
    let (tokens, outcome) = stream(&worker.send(&generate, SEED, HANG).unwrap());
    assert!(matches!(outcome, Some(Outcome::Done(_))));
    assert_eq!(tokens.len(), TOKENS as usize);
    assert!(tokens.iter().zip(0..).all(|(token, index)| token.index == index));
}

/// Processes whose command line mentions `what`.
fn processes(what: &str) -> usize {
    let of = |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline")).ok();
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(of)
        .filter(|line| String::from_utf8_lossy(line).contains(what))
        .count()
}

#[test]
fn ranks_end_when_their_parent_is_killed() {
    let place = Place::new();
    let dir = place.temp.path().to_str().unwrap().to_owned();
    let mut parent = Process::new(env!("CARGO_BIN_EXE_ucm"))
        .args(["replay", "--synthetic", "chat", "--requests", "20000"])
        .args(["--ranks", "3", "--capacity", "8000000"])
        .args(["--shm-dir", &dir])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("four processes", || {
        assert!(parent.try_wait().unwrap().is_none(), "it has ended");
        processes(&dir) == 4
    });
    parent.kill().unwrap();
    parent.wait().unwrap();
    until("none of them is left", || processes(&dir) == 0);
}
