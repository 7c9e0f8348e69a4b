//! Who is alive: processes that are killed, stopped, and that fork.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Actor, assignment, hear, options, say, scratch, until};
use nix::sys::signal::Signal;
use ucm_core::host::Liveness;
use ucm_core::participant::{ParticipantId, Role};
use ucm_posix::{Attachment, JoinError, OfdLiveness, Segment};

fn participant(index: u32) -> ParticipantId {
    ParticipantId::new(index).unwrap()
}

#[test]
fn child_process() {
    let Some((action, dir, rank)) = assignment() else { return };
    let segment = Arc::new(Segment::open_or_create(&options(&dir)).unwrap());
    let rank = rank.parse().unwrap();
    let attachment =
        Attachment::join(Arc::clone(&segment), Role::Rank, Some(rank), Some(0)).unwrap();
    match action.as_str() {
        "hold" => {
            say("joined");
            hear();
        }
        "fork and wait" => {
            // SAFETY: the child calls only functions that are allowed after
            // the fork of a threaded process.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: async-signal-safe; the alarm ends the child should
                // the test not.
                unsafe { libc::alarm(300) };
                loop {
                    // SAFETY: async-signal-safe.
                    unsafe { libc::pause() };
                }
            }
            say(child);
            hear();
        }
        "fork and look" => {
            // SAFETY: the child reads atomics, drops handles that are inert
            // in it, and leaves by `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let refused = segment.check_process().is_err()
                    && attachment.try_cache().is_err()
                    && segment.slot_ptr(0).is_none()
                    && segment.is_linked().is_err();
                drop(attachment);
                drop(segment);
                // SAFETY: async-signal-safe.
                unsafe { libc::_exit(if refused { 7 } else { 8 }) };
            }
            let mut status = 0;
            // SAFETY: `child` is a child of ours, `status` is writable.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            say(libc::WEXITSTATUS(status));
            assert!(segment.check_process().is_ok());
            assert_eq!(attachment.cache().me(), participant(rank));
            hear();
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_killed_process_lets_go_and_a_stopped_one_does_not() {
    let (_temp, dir) = scratch();
    let segment = Segment::open_or_create(&options(&dir)).unwrap();
    let liveness = OfdLiveness::new(Arc::clone(segment.lock_file()));
    assert!(!liveness.is_held(participant(3)));

    let mut actor = Actor::start("hold", &dir.path, "3");
    actor.expect("joined");
    assert!(liveness.is_held(participant(3)));
    assert!(!liveness.is_held(participant(2)) && !liveness.is_held(participant(4)));

    actor.signal(Signal::SIGSTOP);
    std::thread::sleep(Duration::from_millis(100));
    assert!(liveness.is_held(participant(3)));
    assert!(liveness.try_claim(participant(3)).is_none());

    actor.kill();
    until("the byte is free", || !liveness.is_held(participant(3)));
    let claim = liveness.try_claim(participant(3)).unwrap();
    assert!(liveness.is_held(participant(3)), "our own claim counts");
    drop(claim);
    assert!(!liveness.is_held(participant(3)));
}

/// A grandchild, ended when the test is over, however it went.
struct Orphan(nix::unistd::Pid);

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = nix::sys::signal::kill(self.0, Signal::SIGKILL);
    }
}

#[test]
fn a_forked_child_that_outlives_its_parent_does_not_keep_it_alive() {
    let (_temp, dir) = scratch();
    let segment = Segment::open_or_create(&options(&dir)).unwrap();
    let liveness = OfdLiveness::new(Arc::clone(segment.lock_file()));
    let mut actor = Actor::start("fork and wait", &dir.path, "0");
    let orphan = Orphan(nix::unistd::Pid::from_raw(actor.hear().parse().unwrap()));
    assert!(liveness.is_held(participant(0)));
    actor.kill();
    until("the byte is free", || !liveness.is_held(participant(0)));
    nix::sys::signal::kill(orphan.0, None).expect("the forked child lives on");
}

#[test]
fn a_forked_child_is_refused_and_its_exit_changes_nothing() {
    let (_temp, dir) = scratch();
    let segment = Segment::open_or_create(&options(&dir)).unwrap();
    let liveness = OfdLiveness::new(Arc::clone(segment.lock_file()));
    let actor = Actor::start("fork and look", &dir.path, "5");
    actor.expect("7");
    assert!(liveness.is_held(participant(5)));
    assert!(segment.is_linked().unwrap());
    let view = segment.plane().participant(participant(5)).unwrap();
    assert!(view.live && view.pid == actor.pid() as u32);
    actor.finish();
    assert!(!segment.plane().participant(participant(5)).unwrap().live);
}

#[test]
fn a_rank_is_taken_once_and_comes_back_after_it_was_killed() {
    let (_temp, dir) = scratch();
    let segment = Arc::new(Segment::open_or_create(&options(&dir)).unwrap());
    let mut actor = Actor::start("hold", &dir.path, "1");
    actor.expect("joined");
    let now = Duration::ZERO;
    let join = |role, rank| Attachment::join_within(Arc::clone(&segment), role, rank, None, now);
    match join(Role::Rank, Some(1)).unwrap_err() {
        JoinError::RankTaken { rank: 1, pid } => assert_eq!(pid, actor.pid() as u32),
        other => panic!("{other}"),
    }
    assert!(matches!(
        join(Role::Rank, Some(8)).unwrap_err(),
        JoinError::RankOutOfRange { rank: 8, local_rank_size: 8 }
    ));
    assert!(matches!(join(Role::Rank, None).unwrap_err(), JoinError::RankMissing));
    let scouts = [join(Role::Scout, None).unwrap(), join(Role::Scout, None).unwrap()];
    assert_eq!(scouts.map(|scout| scout.me().index()), [8, 9]);

    actor.kill();
    let again = Attachment::join(Arc::clone(&segment), Role::Rank, Some(1), None).unwrap();
    assert_eq!(again.me(), participant(1));
    let view = segment.plane().participant(participant(1)).unwrap();
    assert!(view.live && view.pid == std::process::id() && view.epoch >= 1);
}

#[test]
fn a_byte_that_is_given_back_is_free_though_a_process_about_to_exec_has_its_descriptor() {
    let (_temp, dir) = scratch();
    let segment = Segment::open_or_create(&options(&dir)).unwrap();
    let liveness = OfdLiveness::new(Arc::clone(segment.lock_file()));
    let claim = liveness.try_claim(participant(0)).unwrap();
    // Past the C library, so that no handler runs: what a starting process
    // looks like between its creation and its `exec`.
    let flags = libc::c_long::from(libc::SIGCHLD);
    // SAFETY: the child makes only system calls.
    let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0_i64, 0_i64, 0_i64, 0_i64) };
    if child == 0 {
        // SAFETY: a system call; the alarm ends the child should the test not.
        unsafe { libc::alarm(300) };
        loop {
            // SAFETY: a system call.
            unsafe { libc::pause() };
        }
    }
    let _starting = Orphan(nix::unistd::Pid::from_raw(child as i32));
    assert!(liveness.is_held(participant(0)));
    drop(claim);
    assert!(!liveness.is_held(participant(0)));
    let path = segment.control_path().to_path_buf();
    drop((liveness, segment));
    assert!(!path.exists(), "and the last one out is seen to be the last one");
}
