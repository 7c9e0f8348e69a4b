//! Channels between real processes: who may attach, who is alive, what a killed one leaves.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use common::{Actor, assignment, hear, names, say, scratch, until};
use nix::sys::signal::Signal;
use ucm_core::channel::message::{token_bytes, tokens};
use ucm_core::channel::{Kind, Status, TokenRecord};
use ucm_posix::channel::{EngineOutput, Spins, collect};
use ucm_posix::{ChannelOpenError, EngineChannel, SegmentId, ShmDir, WorkerChannel, monotonic_ns};

const MINUTE_NS: u64 = 60_000_000_000;

fn id() -> SegmentId {
    SegmentId::new("worker-0").unwrap()
}

fn far() -> u64 {
    monotonic_ns() + MINUTE_NS
}

#[test]
fn child_process() {
    let Some((action, dir, count)) = assignment() else { return };
    match action.as_str() {
        "engine" => {
            let _channel = EngineChannel::create(&dir, &id(), Spins::default()).unwrap();
            say("made");
            hear();
        }
        "worker" => worker(&dir, count.parse().unwrap()),
        other => panic!("{other}"),
    }
}

/// Streams tokens when asked, says how far it is, and waits to be killed.
fn worker(dir: &ShmDir, count: u32) {
    let (channel, mut input, mut output) =
        WorkerChannel::attach(dir, &id(), Spins::default()).unwrap();
    say("attached");
    let status = channel.status();
    assert_eq!(status.wait_while(Status::Idle, far()), Ok(Status::ExecInfer));
    let mut prompt = [0; 64];
    let length = input.read(&mut prompt).unwrap();
    assert_eq!(&prompt[..length], b"go");
    status.stream().unwrap();
    for index in 0..count {
        let token = TokenRecord { id: index * 3, index, ..TokenRecord::default() };
        output.send_frame(Kind::Tokens, 1, false, token_bytes(&[token]), far()).unwrap();
        status.beat();
    }
    say("sent");
    hear();
    // Whoever lets it go on has gone, or wants it to leave.
    say(if channel.is_engine_alive() { "engine alive" } else { "engine gone" });
}

/// Reads `count` tokens, of a dead worker or a live one.
fn read_tokens(output: &mut EngineOutput, count: u32, stale: bool) {
    let mut buffer = [0; 1024];
    for index in 0..count {
        assert!(output.wait_readable(16, far()).unwrap());
        let frame = output.try_read_frame(&mut buffer).unwrap().unwrap();
        assert_eq!((frame.kind, frame.stale), (Kind::Tokens, stale));
        let token = tokens(&buffer[..frame.payload_bytes]).unwrap().next().unwrap();
        assert_eq!((token.index, token.id), (index, index * 3));
    }
}

#[test]
fn a_killed_workers_tokens_are_read_and_another_takes_its_place() {
    let (_temp, dir) = scratch();
    let (channel, mut input, mut output) =
        EngineChannel::create(&dir, &id(), Spins::default()).unwrap();
    for round in 1..=3_u32 {
        let mut worker = Actor::start("worker", &dir.path, "500");
        assert!(channel.status().wait_attached(far()));
        output.learn_peer();
        assert_eq!(channel.status().epoch(), round);
        worker.expect("attached");
        input.execute(b"go").unwrap();
        worker.expect("sent");
        assert_eq!(channel.status().heartbeat(), u64::from(round) * 500);
        read_tokens(&mut output, 100, false);

        // A stopped one is alive, and nobody takes its place.
        worker.signal(Signal::SIGSTOP);
        std::thread::sleep(Duration::from_millis(50));
        assert!(channel.is_worker_alive());
        let refused = output.begin_epoch();
        assert!(matches!(refused, Err(ChannelOpenError::WorkerAlive { .. })));
        let refused = WorkerChannel::attach(&dir, &id(), Spins::default());
        assert!(matches!(refused.map(drop), Err(ChannelOpenError::WorkerAlive { .. })));

        worker.kill();
        until("the kernel says it is dead", || !channel.is_worker_alive());
        // Nobody takes its place before the engine has seen to it.
        let refused = WorkerChannel::attach(&dir, &id(), Spins::default());
        assert!(matches!(refused.map(drop), Err(ChannelOpenError::Attach(_))));
        assert_eq!(output.begin_epoch().unwrap(), round + 1);
        assert_eq!(channel.status().get(), Ok(Status::Idle));
        // The rest of its stream: 400 frames of 32 bytes.
        assert_eq!(output.stale_bytes(), 400 * 32);
        let mut buffer = [0; 64];
        for index in 100..500 {
            let frame = output.try_read_frame(&mut buffer).unwrap().unwrap();
            assert!(frame.stale);
            let token = tokens(&buffer[..frame.payload_bytes]).unwrap().next().unwrap();
            assert_eq!(token.index, index);
        }
        assert_eq!(output.try_read_frame(&mut buffer), Ok(None));
    }
    drop((channel, input, output));
    assert!(names(&dir).is_empty());
}

#[test]
fn a_worker_whose_engine_was_killed_notices_and_takes_the_file_away() {
    let (_temp, dir) = scratch();
    let mut engine = Actor::start("engine", &dir.path, "");
    engine.expect("made");
    let (channel, _input, _output) = WorkerChannel::attach(&dir, &id(), Spins::default()).unwrap();
    assert!(channel.is_engine_alive());
    engine.kill();
    until("the kernel says it is dead", || !channel.is_engine_alive());
    assert_eq!(names(&dir).len(), 1);
    drop((channel, _input, _output));
    assert!(names(&dir).is_empty());
}

#[test]
fn a_channel_is_collected_when_both_its_ends_are_gone_and_not_before() {
    let (_temp, dir) = scratch();
    let mut engine = Actor::start("engine", &dir.path, "");
    engine.expect("made");
    std::fs::write(dir.path.join("ucm.x.chan.not"), "a stranger").unwrap();
    assert_eq!(collect(&dir).unwrap(), 0);
    let mut worker = Actor::start("worker", &dir.path, "1");
    worker.expect("attached");
    engine.kill();
    assert_eq!(collect(&dir).unwrap(), 0);
    worker.kill();
    until("collected", || collect(&dir).unwrap() == 1);
    assert_eq!(names(&dir), ["ucm.x.chan.not"]);
    let refused = WorkerChannel::attach(&dir, &id(), Spins::default());
    assert!(matches!(refused.map(drop), Err(ChannelOpenError::NotFound { .. })));
}

#[test]
fn a_channel_is_the_users_alone_and_files_that_are_none_are_refused() {
    let (_temp, dir) = scratch();
    let (channel, _input, _output) = EngineChannel::create(&dir, &id(), Spins::default()).unwrap();
    let mode = std::fs::metadata(channel.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let twice = EngineChannel::create(&dir, &id(), Spins::default());
    assert!(matches!(twice.map(drop), Err(ChannelOpenError::Shm(_))));

    let other = SegmentId::new("other").unwrap();
    let path = dir.path.join("ucm.other.chan");
    let attach = || WorkerChannel::attach(&dir, &other, Spins::default()).map(drop).unwrap_err();
    std::fs::write(&path, vec![0; 100]).unwrap();
    assert!(matches!(attach(), ChannelOpenError::Length { found_bytes: 100, .. }));
    std::fs::write(&path, vec![0; std::fs::metadata(channel.path()).unwrap().len() as usize])
        .unwrap();
    assert!(matches!(attach(), ChannelOpenError::EngineGone { .. }));
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(channel.path(), &path).unwrap();
    assert!(matches!(attach(), ChannelOpenError::NotOurs { .. }));
}
