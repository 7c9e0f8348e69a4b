//! Collection: what goes, what stays, and that the limit is kept under writers.

use std::fs::File;
use std::thread;
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, flock};
use ucm_loader::backend::file::collect::{Limits, collect};
use ucm_loader::backend::file::upkeep::usage;

use crate::*;

/// The blocks as if they had last been read so many hours ago.
fn age(store: &FileStore, number: u64, hours: u64) {
    let file = File::options().write(true).open(store.block_path(&id(number))).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(3600 * hours)).unwrap();
}

fn one_block(dir: &Path) -> u64 {
    let usage = usage(dir).unwrap();
    usage.block_bytes / usage.blocks
}

fn exactly(limit_bytes: u64) -> Limits {
    Limits { limit_bytes, trigger_percent: 100, target_percent: 100, batch: usize::MAX }
}

#[test]
fn the_coldest_go_first_and_reading_warms() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), None);
    (0..10).for_each(|number| put(&store, number));
    (0..10).for_each(|number| age(&store, number, 100 - number));
    // The two coldest are read by an opening that has not opened them yet.
    let reader = open(dir.path(), None);
    assert!(is_there(&reader, 0) && is_there(&reader, 1));
    let collected = collect(dir.path(), &exactly(4 * one_block(dir.path()))).unwrap();
    assert_eq!((collected.removed_blocks, collected.busy), (6, false));
    assert_eq!(usage(dir.path()).unwrap().block_bytes, collected.after_bytes);
    let fresh = open(dir.path(), None);
    let left: Vec<_> = (0..10).filter(|number| is_there(&fresh, *number)).collect();
    assert_eq!(left, [0, 1, 8, 9]);
}

#[test]
fn below_its_trigger_nothing_goes_and_a_batch_is_not_exceeded() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), None);
    (0..10).for_each(|number| put(&store, number));
    let all = usage(dir.path()).unwrap().block_bytes;
    assert_eq!(collect(dir.path(), &exactly(all)).unwrap().removed_blocks, 0);
    let few = Limits { batch: 2, ..exactly(all / 10) };
    assert_eq!(collect(dir.path(), &few).unwrap().removed_blocks, 2);
    assert_eq!(usage(dir.path()).unwrap().blocks, 8);
}

#[test]
fn who_has_a_block_open_reads_on_and_who_writes_one_finishes_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), None);
    (0..4).for_each(|number| put(&store, number));
    assert!(is_there(&store, 2));
    let key = |shard| ShardKey::new(id(7), shard);
    let bytes = |shard| bytes_of(key(shard));
    store.store(key(0), &bytes(0), Some(xxh3_64(&bytes(0)))).unwrap();
    assert_eq!(collect(dir.path(), &exactly(0)).unwrap().removed_blocks, 4);
    assert!(is_there(&store, 2));
    assert!(!is_there(&open(dir.path(), None), 2));
    for shard in [1, 2] {
        store.store(key(shard), &bytes(shard), Some(xxh3_64(&bytes(shard)))).unwrap();
    }
    assert!(is_there(&open(dir.path(), None), 7));
}

#[test]
fn one_collector_works_at_a_time_and_a_dead_one_leaves_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    put(&open(dir.path(), None), 1);
    let lock = File::create(dir.path().join("gc.lock")).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    assert!(collect(dir.path(), &exactly(0)).unwrap().busy);
    assert_eq!(usage(dir.path()).unwrap().blocks, 1);
    drop(lock);
    assert_eq!(collect(dir.path(), &exactly(0)).unwrap().removed_blocks, 1);
}

#[test]
fn a_store_with_a_limit_stays_within_it_while_it_is_written_and_read() {
    let dir = tempfile::tempdir().unwrap();
    let one = {
        put(&open(dir.path(), None), 0);
        one_block(dir.path())
    };
    let limit = 100 * one;
    thread::scope(|scope| {
        for writer in 0..2 {
            let dir = dir.path();
            scope.spawn(move || {
                let store = open(dir, Some(limit));
                for number in (1..400).filter(|number| number % 2 == writer) {
                    put(&store, number);
                    // What is read is right; `is_there` compares every byte.
                    is_there(&store, number / 2);
                    let held = usage(dir).unwrap().block_bytes;
                    assert!(held <= limit, "{held} of {limit} after block {number}");
                }
            });
        }
    });
    let left = usage(dir.path()).unwrap();
    assert!(left.blocks >= 60 && left.unfinished == 0, "{left:?}");
}
