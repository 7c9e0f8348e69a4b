//! A power cut after any of the writer's operations: each block is complete and right, or absent.
//!
//! The model: what was synced stays; of what was not, any part may be lost,
//! and a renaming counts only with what it was preceded by. Every prefix of
//! the recorded operations is replayed into an empty directory.

use std::cell::RefCell;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ucm_core::key::ShardKey;
use xxhash_rust::xxh3::xxh3_64;

use super::store::Fsync;
use super::*;
use crate::backend::testing::{bytes_of, id};
use crate::content::mix;

/// One operation on the files of a store.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Length(PathBuf, u64),
    Write(PathBuf, u64, Vec<u8>),
    Sync(PathBuf),
    Rename(PathBuf, PathBuf),
}

thread_local! {
    static RECORD: RefCell<Option<Vec<Op>>> = const { RefCell::new(None) };
}

/// Notes an operation of this thread, if somebody wants to know.
pub(super) fn note(op: impl FnOnce() -> Op) {
    RECORD.with_borrow_mut(|record| {
        if let Some(record) = record {
            record.push(op());
        }
    });
}

const SHARDS: u32 = 3;
const SHARD_BYTES: usize = 5000;
const GEOMETRY: StoreGeometry =
    StoreGeometry { shard_bytes: SHARD_BYTES as u64, shards_per_block: SHARDS, content_tag: 1 };

fn record(fsync: Fsync) -> (PathBuf, Vec<Op>) {
    let dir = tempfile::tempdir().unwrap();
    let options = FileOptions { fsync, ..FileOptions::new(dir.path(), GEOMETRY) };
    let store = FileStore::open(&options).unwrap();
    RECORD.set(Some(Vec::new()));
    // The blocks' shards one among the other, as layers come.
    for shard in 0..SHARDS {
        for number in 0..3 {
            let key = ShardKey::new(id(number), shard);
            let bytes = bytes_of(key, SHARD_BYTES);
            store.store(key, &bytes, Some(xxh3_64(&bytes))).unwrap();
        }
    }
    (dir.path().to_owned(), RECORD.take().unwrap())
}

/// Replays `ops`; unsynced writes are lost as `draw` says.
fn replay(root: &Path, ops: &[Op], to: &Path, mut draw: impl FnMut() -> bool) {
    let moved = |path: &Path| to.join(path.strip_prefix(root).unwrap());
    for (at, op) in ops.iter().enumerate() {
        let is_safe = |path: &Path| {
            ops[at..].iter().any(|later| matches!(later, Op::Sync(synced) if synced == path))
        };
        match op {
            Op::Length(path, length) => {
                let file =
                    File::options().create(true).truncate(false).write(true).open(moved(path));
                file.unwrap().set_len(*length).unwrap();
            }
            Op::Write(path, offset, bytes) if is_safe(path) || !draw() => {
                let file = File::options().write(true).open(moved(path)).unwrap();
                file.write_all_at(bytes, *offset).unwrap();
            }
            Op::Write(..) | Op::Sync(_) => {}
            Op::Rename(from, name) => {
                fs::create_dir_all(moved(name).parent().unwrap()).unwrap();
                fs::rename(moved(from), moved(name)).unwrap();
            }
        }
    }
}

/// How many of the blocks are there after a cut; those must be right.
fn survivors(root: &Path, ops: &[Op], draw: impl FnMut() -> bool) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let options = FileOptions::new(dir.path(), GEOMETRY);
    drop(FileStore::open(&options).unwrap());
    replay(root, ops, dir.path(), draw);
    let store = FileStore::open(&options).unwrap();
    assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
    let ids: Vec<_> = (0..3).map(id).collect();
    let present = store.exists(&ids).unwrap();
    for (block, _) in ids.iter().zip(&present).filter(|(_, present)| **present) {
        for shard in 0..SHARDS {
            let key = ShardKey::new(*block, shard);
            let mut buffer = vec![0; SHARD_BYTES];
            store.load(key, &mut buffer).unwrap();
            assert_eq!(buffer, bytes_of(key, SHARD_BYTES));
        }
    }
    present.into_iter().filter(|present| *present).count()
}

#[test]
fn a_cut_after_any_operation_leaves_each_block_complete_or_absent() {
    for fsync in [Fsync::Data, Fsync::Full] {
        let (root, ops) = record(fsync);
        let mut seed = 1;
        let mut counts = Vec::new();
        for end in 0..=ops.len() {
            for _ in 0..4 {
                let draw = || {
                    seed = mix(seed + 1);
                    seed.is_multiple_of(2)
                };
                counts.push(survivors(&root, &ops[..end], draw));
            }
        }
        assert!(counts.is_sorted(), "{counts:?}");
        assert_eq!((counts.first(), counts.last()), (Some(&0), Some(&3)));
    }
}

#[test]
fn without_syncing_a_lost_write_is_found_and_is_never_a_success() {
    let (root, ops) = record(Fsync::None);
    let dir = tempfile::tempdir().unwrap();
    let options = FileOptions::new(dir.path(), GEOMETRY);
    drop(FileStore::open(&options).unwrap());
    replay(&root, &ops, dir.path(), || true);
    let store = FileStore::open(&options).unwrap();
    for number in 0..3 {
        let mut buffer = vec![0; SHARD_BYTES];
        assert!(store.load(ShardKey::new(id(number), 0), &mut buffer).is_err());
    }
}
