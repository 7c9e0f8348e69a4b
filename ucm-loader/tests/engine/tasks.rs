//! Tasks: waiting, cancelling, deadlines, the completion descriptor, shutdown.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use ucm_loader::{LoaderConfig, ShardError, TaskOptions, TaskReport, TaskStatus};

use crate::common::doubles::Gate;
use crate::common::rank::Rank;
use crate::common::{Corner, WATCHDOG, keys, until};

const SOON: Duration = Duration::from_millis(20);

/// A rank whose loads stay under way until the gate is opened.
fn gated(config: &LoaderConfig, rank: u32) -> (Rank, std::sync::Arc<Gate>) {
    let gate = Gate::closed(config);
    let device = std::sync::Arc::new(ucm_core::device::HostDevice);
    (Rank::with(config.clone(), rank, gate.clone(), device).unwrap(), gate)
}

fn readable(rank: &Rank, timeout: Duration) -> bool {
    let fd = rank.engine.completion_fd().as_fd();
    let timeout = Timespec::try_from(timeout).unwrap();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

/// All of them failed, each shard once, for this reason.
#[track_caller]
fn assert_all(report: &TaskReport, error: &ShardError) {
    let mut indices: Vec<_> = report.failures.iter().map(|failure| failure.index).collect();
    indices.sort_unstable();
    assert_eq!(indices, (0..report.shards).collect::<Vec<_>>());
    assert!(report.failures.iter().all(|failure| failure.error == *error), "{report:?}");
}

#[test]
fn an_empty_task_has_finished_at_once() {
    let corner = Corner::new();
    let rank = Rank::start(corner.config(1, 16), 0);
    for task in [rank.load(&[]), rank.dump(&[])] {
        assert_eq!(task.check(), TaskStatus::Finished(TaskReport::default()));
        assert_eq!(task.wait(Duration::ZERO), Ok(TaskReport::default()));
    }
    assert_eq!(rank.engine.completion_fd().take(), 2);
}

#[test]
fn the_completion_descriptor_is_readable_once_a_task_has_finished_and_counts() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..3);
    let (rank, gate) = gated(&config, 0);
    let tasks: Vec<_> =
        (0..3).map(|n| rank.try_load(&keys(n..n + 1), 4 * n as usize).unwrap()).collect();
    assert!(!readable(&rank, SOON));
    assert_eq!(rank.engine.completion_fd().take(), 0);
    gate.open();
    let mut finished = 0;
    while finished < 3 {
        assert!(readable(&rank, WATCHDOG));
        finished += rank.engine.completion_fd().take();
    }
    assert!(tasks.iter().all(|task| matches!(task.check(), TaskStatus::Finished(_))));
    assert!(!readable(&rank, Duration::ZERO));
}

#[test]
fn a_wait_that_is_too_short_says_how_many_shards_ended_and_the_task_goes_on() {
    let corner = Corner::new();
    let config = corner.config(2, 64);
    corner.fill_backend(&config, 0..2);
    let (rank, gate) = gated(&config, 0);
    let other = Rank::start(config, 1);
    other.load_right(&keys(0..1));
    let task = rank.load(&keys(0..2));
    until("the first block is copied", || {
        task.check() == TaskStatus::Running { ended: 4, shards: 8 }
    });
    let error = task.wait(SOON).unwrap_err();
    assert_eq!((error.ended, error.shards), (4, 8));
    assert!(error.waited_ms >= 20, "{error}");
    assert!(error.to_string().contains("4 of 8 shards"), "{error}");
    gate.open();
    assert_eq!(task.wait(WATCHDOG).unwrap().failures, []);
    rank.assert_holds(&keys(0..2));
}

#[test]
fn a_deadline_ends_every_shard_and_a_late_load_keeps_its_slot_until_it_ends() {
    let corner = Corner::new();
    let config = LoaderConfig { timeout_ms: 60, ..corner.config(1, 64) };
    corner.fill_backend(&config, 0..2);
    let (rank, gate) = gated(&config, 0);
    let report = rank.load(&keys(0..2)).wait(WATCHDOG).unwrap();
    assert_all(&report, &ShardError::Deadline);
    // Claims are bounded: what is not under way by then never begins.
    let held = gate.holds();
    assert!((1..=4).contains(&held), "{held} loads under way");
    let (pins, census) = corner.look();
    assert_eq!((census.loading as usize, pins as usize), (held, held));
    assert!(corner.segment_files().len() == 2);
    gate.open();
    corner.until_no_pins();
    let (_, census) = corner.look();
    assert_eq!((census.loading, census.ready as usize), (0, held));
    rank.leave();
    assert_eq!(corner.segment_files(), [""; 0]);
}

#[test]
fn a_cancelled_task_ends_however_often_it_is_cancelled_and_harms_no_later_one() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..2);
    let (rank, gate) = gated(&config, 0);
    let task = rank.load(&keys(0..2));
    until("loads are under way", || gate.holds() > 0);
    task.cancel();
    task.cancel();
    let report = task.wait(WATCHDOG).unwrap();
    assert_all(&report, &ShardError::Cancelled);
    task.cancel();
    assert_eq!(task.wait(Duration::ZERO).unwrap(), report);
    gate.open();
    rank.load_right(&keys(0..2));
    corner.until_no_pins();
}

#[test]
fn a_cancelled_dump_ends_too_and_can_be_done_again() {
    let corner = Corner::new();
    let config = corner.config(1, 16);
    let rank = Rank::start(config, 0);
    let first = rank.dump(&keys(0..20));
    first.cancel();
    let report = first.wait(WATCHDOG).unwrap();
    assert!(report.failures.iter().all(|f| f.error == ShardError::Cancelled), "{report:?}");
    let report = rank.dump(&keys(0..20)).wait(WATCHDOG).unwrap();
    assert_eq!(report.failures, []);
    rank.load_right(&keys(0..20));
    corner.until_no_pins();
}

#[test]
fn a_shutdown_with_work_under_way_ends_everything_and_leaves_nothing() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..6);
    let (Rank { engine, memory }, gate) = gated(&config, 0);
    // SAFETY: the memory outlives the tasks, which have all ended below.
    let load = |at: usize| unsafe {
        engine.load(
            memory.targets(&keys(at as u64 * 2..at as u64 * 2 + 2), at * 8),
            &TaskOptions::default(),
        )
    };
    let tasks: Vec<_> = (0..3).map(|at| load(at).unwrap()).collect();
    until("loads are under way", || gate.holds() > 0);
    let opener = std::thread::spawn({
        let gate = gate.clone();
        move || {
            std::thread::sleep(SOON);
            gate.open();
        }
    });
    assert!(engine.shutdown(WATCHDOG));
    opener.join().unwrap();
    for task in &tasks {
        let report = task.wait(Duration::ZERO).unwrap();
        let expected = |error: &ShardError| *error == ShardError::ShuttingDown;
        assert!(report.failures.iter().all(|failure| expected(&failure.error)), "{report:?}");
    }
    assert!(tasks.iter().any(|task| !task.wait(Duration::ZERO).unwrap().is_complete()));
    until("the segment is gone", || corner.segment_files().is_empty());
}

#[test]
fn an_impatient_shutdown_says_so_and_the_place_is_left_when_the_work_ends() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..1);
    let (Rank { engine, memory }, gate) = gated(&config, 0);
    // SAFETY: the memory outlives the task.
    let task =
        unsafe { engine.load(memory.targets(&keys(0..1), 0), &TaskOptions::default()) }.unwrap();
    until("loads are under way", || gate.holds() > 0);
    assert!(!engine.shutdown(SOON));
    assert_all(&task.wait(Duration::ZERO).unwrap(), &ShardError::ShuttingDown);
    let (pins, census) = corner.look();
    assert_eq!((pins, census.loading as usize), (gate.holds() as u64, gate.holds()));
    gate.open();
    until("the segment is gone", || corner.segment_files().is_empty());
}

#[test]
fn a_dropped_handle_leaves_its_task_running() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..1);
    let (rank, gate) = gated(&config, 0);
    drop(rank.load(&keys(0..1)));
    gate.open();
    assert!(readable(&rank, WATCHDOG));
    rank.assert_holds(&keys(0..1));
}
