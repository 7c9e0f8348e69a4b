//! Loads that fail: who hears of it, and what comes after.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use ucm_core::cache::GetError;
use ucm_core::device::HostDevice;
use ucm_core::slot::meta::LoadErrorCode;
use ucm_loader::backend::fault::{FaultBackend, FaultPlan};
use ucm_loader::backend::file::{FileOptions, FileStore};
use ucm_loader::backend::memory::MemoryBackend;
use ucm_loader::backend::open::memory_options;
use ucm_loader::backend::threaded::Threads;
use ucm_loader::{LoaderConfig, ShardError, ShardFailure, TaskReport};

use crate::common::doubles::Gate;
use crate::common::rank::Rank;
use crate::common::{Corner, SHARD_BYTES, WATCHDOG, files_of, keys, until};

const EIO: LoadErrorCode = LoadErrorCode(libc::EIO);

fn load_error(failure: &ShardFailure) -> LoadErrorCode {
    match failure.error {
        ShardError::Load(code) | ShardError::Cache(GetError::Failed(code)) => code,
        ref other => panic!("shard {} failed for another reason: {other}", failure.index),
    }
}

#[test]
fn one_failing_shard_fails_nothing_else_says_why_and_is_retried_by_a_later_task() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..3);
    let store = corner.store(&config);
    let keys = keys(0..3);
    assert!(store.fail_next(keys[5], 1));
    let rank = Rank::start(config, 0);
    let report = rank.load(&keys).wait(WATCHDOG).unwrap();
    let failure = ShardFailure { index: 5, key: keys[5], error: ShardError::Load(EIO) };
    assert_eq!(report.failures, [failure]);
    assert!(report.failures[0].error.to_string().contains("the load failed"));
    for (at, key) in keys.iter().enumerate().filter(|(at, _)| *at != 5) {
        assert!(rank.holds(key, at), "shard {at}");
    }
    assert!(!rank.holds(&keys[5], 5));
    assert_eq!(rank.engine.metrics().shard_failures, 1);
    let again = rank.load_right(&keys);
    assert_eq!((again.hits, again.owned), (11, 1));
    assert_eq!(store.loads(), 13);
    corner.until_no_pins();
}

#[test]
fn every_waiting_rank_sees_the_code_of_the_one_load() {
    let corner = Corner::new();
    let config = corner.config(4, 64);
    corner.fill_backend(&config, 0..1);
    let store = corner.store(&config);
    let key = keys(0..1)[3];
    assert!(store.fail_next(key, 1));
    let gate = Gate::closed(&config);
    let owner = Rank::with(config.clone(), 0, gate.clone(), Arc::new(HostDevice)).unwrap();
    let waiters: Vec<_> = (1..4).map(|rank| Rank::start(config.clone(), rank)).collect();
    let mut tasks = vec![owner.load(&[key])];
    until("the load is under way", || gate.holds() == 1);
    tasks.extend(waiters.iter().map(|rank| rank.load(&[key])));
    // The owner's two (its load's and its own wait's) and one of each other.
    until("everybody waits", || corner.look().0 == 5);
    gate.open();
    for task in &tasks {
        let report = task.wait(WATCHDOG).unwrap();
        assert_eq!(report.failures.len(), 1, "{report:?}");
        assert_eq!(load_error(&report.failures[0]), EIO);
    }
    assert_eq!(store.loads(), 1);
    // Nobody holds the failure any more, so it is forgotten.
    corner.until_no_pins();
    assert_eq!(waiters[0].load_right(&[key]).owned, 1);
}

#[test]
fn with_a_third_of_all_loads_failing_what_comes_is_right_and_retries_bring_the_rest() {
    let corner = Corner::new();
    let config = corner.config(3, 128);
    corner.fill_backend(&config, 0..30);
    let store = corner.store(&config);
    store.set_failures(333_333, 9);
    let ranks = Rank::all(&config);
    let keys = keys(0..30);
    let mut rounds = 0;
    loop {
        let tasks: Vec<_> = ranks.iter().map(|rank| rank.load(&keys)).collect();
        let mut failed = 0;
        for (rank, task) in ranks.iter().zip(&tasks) {
            let report = task.wait(WATCHDOG).unwrap();
            let lost: Vec<_> = report.failures.iter().map(|failure| failure.index).collect();
            assert!(report.failures.iter().all(|failure| load_error(failure) == EIO));
            for (at, key) in keys.iter().enumerate() {
                assert_eq!(rank.holds(key, at), !lost.contains(&at), "shard {at}");
            }
            failed += lost.len();
        }
        rounds += 1;
        if failed == 0 {
            break;
        }
        assert!(rounds < 200, "{failed} shards fail again and again");
    }
    assert!(rounds > 1, "nothing failed");
    corner.until_no_pins();
}

#[test]
fn a_block_that_is_nowhere_is_not_found_and_the_rest_of_the_task_comes() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..1);
    let rank = Rank::start(config, 0);
    let keys = keys(0..2);
    let report = rank.load(&keys).wait(WATCHDOG).unwrap();
    assert_eq!(report.failures.len(), 4);
    for failure in &report.failures {
        assert_eq!(load_error(failure), LoadErrorCode::NOT_FOUND);
        assert_eq!(failure.key, keys[failure.index]);
        assert!(failure.index >= 4);
    }
    rank.assert_holds(&keys[..4]);
}

#[test]
fn a_wrong_stored_byte_is_a_checksum_failure_then_a_miss_and_never_data() {
    let corner = Corner::new();
    let config = corner.file_config(1, 64);
    corner.fill_backend(&config, 0..2);
    let checked = config.clone().check().unwrap();
    let dir = corner.dir("store");
    let store = FileStore::open(&FileOptions::new(&dir, checked.store_geometry())).unwrap();
    let key = keys(0..1)[2];
    let path = store.block_path(&key.block);
    let mut bytes = fs::read(&path).unwrap();
    bytes[store.shard_offset(2) as usize + 1000] ^= 4;
    fs::write(&path, bytes).unwrap();

    let rank = Rank::start(config, 0);
    let report = rank.load(&[key]).wait(WATCHDOG).unwrap();
    assert_eq!(report.failures.len(), 1);
    assert_eq!(load_error(&report.failures[0]), LoadErrorCode::CHECKSUM);
    assert!(!rank.holds(&key, 0));
    assert!(!path.exists(), "the bad file is still in its place");
    let aside = files_of(&dir.join("bad"));
    assert_eq!(aside.len(), 1);
    assert!(aside[0].starts_with(&key.block.to_string()));
    // Put aside, the block is a miss: for the whole chain, and for a load.
    assert_eq!(rank.engine.prefix(&[key.block]).unwrap().found_blocks, 0);
    let report = rank.load(&[key]).wait(WATCHDOG).unwrap();
    assert_eq!(load_error(&report.failures[0]), LoadErrorCode::NOT_FOUND);
    // And a dump heals it.
    assert!(rank.dump(&keys(0..1)).wait(WATCHDOG).unwrap().is_complete());
    rank.leave();
    let rank = Rank::start(corner.file_config(1, 64), 0);
    rank.load_right(&keys(0..2));
    corner.until_no_pins();
}

#[test]
fn without_checksums_a_wrong_stored_byte_is_delivered_as_it_is() {
    let corner = Corner::new();
    let config = LoaderConfig { checksum: false, ..corner.file_config(1, 64) };
    corner.fill_backend(&config, 0..1);
    let geometry = config.clone().check().unwrap().store_geometry();
    let store = FileStore::open(&FileOptions::new(corner.dir("store"), geometry)).unwrap();
    let key = keys(0..1)[0];
    let path = store.block_path(&key.block);
    let mut bytes = fs::read(&path).unwrap();
    bytes[store.shard_offset(0) as usize] ^= 1;
    fs::write(&path, bytes).unwrap();
    let rank = Rank::start(config, 0);
    assert!(rank.load(&[key]).wait(WATCHDOG).unwrap().is_complete());
    assert!(!rank.holds(&key, 0));
}

#[test]
fn short_reads_and_late_answers_fail_their_own_shards_with_their_own_codes() {
    let corner = Corner::new();
    let config = corner.config(2, 128);
    corner.fill_backend(&config, 0..25);
    let plan = FaultPlan {
        seed: 3,
        delay_ppm: 100_000,
        delay: Duration::from_millis(3),
        errno_ppm: 150_000,
        errno: libc::ETIMEDOUT,
        short_ppm: 150_000,
        ..FaultPlan::default()
    };
    let options = memory_options(&config.clone().check().unwrap()).unwrap();
    let threads = Threads { load_workers: 2, store_workers: 1, queue_depth: 256 };
    let inner = MemoryBackend::open(&options, threads).unwrap();
    let faulty = Arc::new(FaultBackend::new(inner, plan));
    let rank = Rank::with(config, 0, faulty.clone(), Arc::new(HostDevice)).unwrap();
    let keys = keys(0..25);
    let report: TaskReport = rank.load(&keys).wait(WATCHDOG).unwrap();
    let with = |code| report.failures.iter().filter(|f| load_error(f) == code).count() as u64;
    let counts = faulty.counts();
    let count =
        |counter: &ucm_core::sync::AtomicU64| counter.load(ucm_core::sync::Ordering::Relaxed);
    assert!(count(&counts.failed) > 0 && count(&counts.cut) > 0 && count(&counts.delayed) > 0);
    assert_eq!(with(LoadErrorCode(libc::ETIMEDOUT)), count(&counts.failed));
    assert_eq!(with(LoadErrorCode::BAD_OBJECT), count(&counts.cut));
    let lost: Vec<_> = report.failures.iter().map(|failure| failure.index).collect();
    for (at, key) in keys.iter().enumerate() {
        assert_eq!(rank.holds(key, at), !lost.contains(&at), "shard {at}");
    }
    assert_eq!(rank.engine.metrics().h2d_bytes, (100 - lost.len() as u64) * SHARD_BYTES);
    corner.until_no_pins();
}

#[test]
fn a_store_without_room_fails_the_dump_with_its_code_and_the_cache_keeps_serving() {
    let corner = Corner::new();
    let config = LoaderConfig { memory_backend_bytes: 2 * SHARD_BYTES * 4, ..corner.config(1, 64) };
    let rank = Rank::start(config, 0);
    let report = rank.dump(&keys(0..3)).wait(WATCHDOG).unwrap();
    assert_eq!(report.failures.len(), 4);
    let full = ShardError::Store(LoadErrorCode(libc::ENOSPC));
    assert!(report.failures.iter().all(|failure| failure.error == full), "{report:?}");
    assert_eq!(rank.load_right(&keys(0..3)).hits, 12);
    corner.until_no_pins();
}
