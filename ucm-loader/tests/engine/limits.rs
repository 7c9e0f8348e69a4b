//! What is refused, and in which words.

use std::sync::Arc;
use std::time::Duration;

use ucm_core::device::HostDevice;
use ucm_loader::engine::{StartError, SubmitError};
use ucm_loader::{Config, LoaderConfig, ShardError};
use ucm_posix::{JoinError, SegmentError};

use crate::common::doubles::Gate;
use crate::common::rank::Rank;
use crate::common::{Corner, SHARD_BYTES, WATCHDOG, keys, until};

#[test]
fn a_full_waiting_queue_is_an_error_that_names_its_depth_and_harms_no_task() {
    let corner = Corner::new();
    let config =
        LoaderConfig { waiting_queue_depth: 1, claim_window: Some(1), ..corner.config(1, 64) };
    corner.fill_backend(&config, 0..1);
    let gate = Gate::closed(&config);
    let rank = Rank::with(config, 0, gate.clone(), Arc::new(HostDevice)).unwrap();
    // One is being dispatched, which takes until its loads are done; one waits.
    let mut taken = vec![rank.load(&keys(0..1))];
    until("the first load is under way", || gate.holds() == 1);
    let error = loop {
        match rank.try_load(&keys(0..1), 4 * taken.len()) {
            Ok(task) => taken.push(task),
            Err(error) => break error,
        }
        assert!(taken.len() < 4, "the queue of one takes more and more");
    };
    assert_eq!(error, SubmitError::QueueFull { depth: 1 });
    let words = error.to_string();
    assert!(words.contains("queue of 1 tasks is full"), "{words}");
    assert!(words.contains("waiting_queue_depth"), "{words}");
    gate.open();
    for task in &taken {
        assert_eq!(task.wait(WATCHDOG).unwrap().failures, []);
    }
    rank.load_right(&keys(0..1));
    corner.until_no_pins();
}

#[test]
fn a_queue_whose_depth_is_no_power_of_two_is_full_at_its_depth() {
    let corner = Corner::new();
    let config =
        LoaderConfig { waiting_queue_depth: 3, claim_window: Some(1), ..corner.config(1, 64) };
    corner.fill_backend(&config, 0..1);
    let gate = Gate::closed(&config);
    let rank = Rank::with(config, 0, gate.clone(), Arc::new(HostDevice)).unwrap();
    let mut taken = vec![rank.load(&keys(0..1))];
    until("the first load is under way", || gate.holds() == 1);
    let error = loop {
        match rank.try_load(&keys(0..1), 4 * taken.len()) {
            Ok(task) => taken.push(task),
            Err(error) => break error,
        }
    };
    // One being dispatched, and as many as the depth that the error names.
    let SubmitError::QueueFull { depth } = error else { panic!("{error}") };
    assert_eq!(taken.len(), 1 + depth as usize);
    assert!(depth >= 3);
    gate.open();
    assert!(taken.iter().all(|task| task.wait(WATCHDOG).unwrap().is_complete()));
}

#[test]
fn a_task_larger_than_the_running_queue_is_refused_with_both_numbers() {
    let corner = Corner::new();
    let config = LoaderConfig { running_queue_depth: 8, ..corner.config(1, 64) };
    corner.fill_backend(&config, 0..2);
    let rank = Rank::start(config, 0);
    let many = &keys(0..3)[..9];
    let error = rank.try_load(many, 0).unwrap_err();
    assert_eq!(error, SubmitError::TaskTooLarge { shards: 9, depth: 8 });
    let words = error.to_string();
    assert!(words.contains("9 shards") && words.contains("running_queue_depth = 8"), "{words}");
    rank.load_right(&keys(0..2));
}

#[test]
fn every_slot_pinned_by_others_is_an_error_at_the_deadline_and_not_a_hang() {
    let corner = Corner::new();
    let config = LoaderConfig { timeout_ms: 100, ..corner.config(2, 2) };
    corner.fill_backend(&config, 0..2);
    // Two slots, both being loaded by a rank whose backend does not answer.
    let gate = Gate::closed(&config);
    let greedy = LoaderConfig { local_rank_size: 2, timeout_ms: 10_000, ..config.clone() };
    let greedy = LoaderConfig { io_quarantine_ms: Some(20_000), ..greedy };
    let config = LoaderConfig { io_quarantine_ms: Some(20_000), ..config };
    let first = Rank::with(greedy.clone(), 0, gate.clone(), Arc::new(HostDevice)).unwrap();
    let task = first.load(&keys(0..1)[..1]);
    until("one load is under way", || gate.holds() == 1);
    let second = Rank::with(config, 1, gate.clone(), Arc::new(HostDevice)).unwrap();
    let report = second.load(&keys(0..1)[1..3]).wait(WATCHDOG).unwrap();
    assert_eq!(report.failures.len(), 2);
    assert!(report.failures.iter().any(|failure| failure.error == ShardError::Deadline));
    gate.open();
    assert!(task.wait(WATCHDOG).unwrap().is_complete());
    corner.until_no_pins();
    second.load_right(&keys(0..2));
}

fn check(config: LoaderConfig) -> Result<Config, String> {
    config.check().map_err(|error| error.to_string())
}

#[test]
fn a_rank_that_is_taken_is_refused_and_its_holder_undisturbed() {
    let corner = Corner::new();
    let config = corner.config(2, 16);
    corner.fill_backend(&config, 0..1);
    let holder = Rank::start(config.clone(), 1);
    let error = Rank::try_start(config, 1).err().unwrap();
    let StartError::Join(JoinError::RankTaken { rank: 1, pid }) = error else {
        panic!("{error}");
    };
    assert_eq!(pid, std::process::id());
    assert!(error.to_string().contains("rank 1 is taken"), "{error}");
    holder.load_right(&keys(0..1));
}

#[test]
fn a_rank_outside_the_node_is_refused_with_both_numbers() {
    let corner = Corner::new();
    let words = check(LoaderConfig { rank: 3, ..corner.config(2, 16) }).unwrap_err();
    assert!(words.contains("rank = 3") && words.contains("0..2"), "{words}");
    assert_eq!(corner.segment_files(), [""; 0]);
}

#[test]
fn less_than_a_slot_for_each_rank_is_refused_with_the_bytes_needed() {
    let corner = Corner::new();
    let words = check(corner.config(4, 3)).unwrap_err();
    let (has, needs) = (3 * SHARD_BYTES, 4 * SHARD_BYTES);
    assert!(words.contains(&format!("capacity_bytes = {has}")), "{words}");
    assert!(words.contains(&format!("below {needs}")), "{words}");
}

#[test]
fn another_configuration_on_a_live_segment_is_refused_naming_both_values() {
    let corner = Corner::new();
    let config = corner.config(2, 16);
    corner.fill_backend(&config, 0..1);
    let first = Rank::start(config.clone(), 0);
    let refused = |other: LoaderConfig| {
        let backend = Gate::closed(&config);
        let error = Rank::with(other, 1, backend, Arc::new(HostDevice)).err().unwrap();
        assert!(
            matches!(error, StartError::Segment(SegmentError::Refused { in_use: true, .. })),
            "{error}"
        );
        error.to_string()
    };
    let words = refused(LoaderConfig { shard_bytes: 2048, ..config.clone() });
    assert!(words.contains("4096") && words.contains("2048"), "{words}");
    let words = refused(LoaderConfig { capacity_bytes: 32 * SHARD_BYTES, ..config.clone() });
    assert!(words.contains("16") && words.contains("32"), "{words}");
    let words = refused(LoaderConfig { local_rank_size: 4, ..config.clone() });
    assert!(words.contains('2') && words.contains('4'), "{words}");
    // The one that is there goes on.
    first.load_right(&keys(0..1));
}

#[test]
fn another_model_on_a_live_segment_is_refused() {
    let corner = Corner::new();
    let config = corner.config(2, 16);
    let _first = Rank::start(config.clone(), 0);
    let other = LoaderConfig { model: "other".to_owned(), ..config.clone() };
    let tags = [&config, &other].map(|c| c.clone().check().unwrap().content_tag);
    let backend = Gate::closed(&config);
    let error = Rank::with(other, 1, backend, Arc::new(HostDevice)).err().unwrap();
    let words = error.to_string();
    for tag in tags {
        let named = [format!("{tag}"), format!("{tag:x}"), format!("{tag:#018x}")];
        assert!(named.iter().any(|tag| words.contains(tag)), "{tag} or {tag:#x} in {words}");
    }
}

#[test]
fn fewer_ranks_than_configured_are_reported() {
    let corner = Corner::new();
    let config = corner.config(3, 16);
    let ranks = [Rank::start(config.clone(), 0), Rank::start(config.clone(), 2)];
    let mismatch = ranks[0].engine.check_ranks().unwrap();
    let words = mismatch.to_string();
    assert!(words.contains('3') && words.contains('2'), "{words}");
    let last = Rank::start(config, 1);
    assert_eq!(last.engine.check_ranks(), None);
    drop(last);
    std::thread::sleep(Duration::ZERO);
    assert!(ranks[0].engine.check_ranks().is_some());
}
