//! The posix backend against real directories.

use std::fs;
use std::os::unix::fs::FileExt;

use tempfile::TempDir;
use ucm_core::key::ShardKey;
use ucm_core::slot::meta::LoadErrorCode;
use xxhash_rust::xxh3::xxh3_64;

use super::layout::BadObject;
use super::*;
use crate::backend::testing::*;
use crate::backend::traits::Backend;

const SHARDS: u32 = 3;
const SHARD_BYTES: usize = 5000;
const GEOMETRY: StoreGeometry =
    StoreGeometry { shard_bytes: SHARD_BYTES as u64, shards_per_block: SHARDS, content_tag: 1 };

fn open_with(dir: &TempDir, change: impl FnOnce(&mut FileOptions)) -> FileBackend {
    let mut options = FileOptions::new(dir.path(), GEOMETRY);
    change(&mut options);
    FileBackend::open(&options, THREADS).unwrap()
}

fn open(dir: &TempDir) -> FileBackend {
    open_with(dir, |_| {})
}

fn files_in(dir: &TempDir, part: &str) -> usize {
    fs::read_dir(dir.path().join(part)).unwrap().count()
}

/// Overwrites bytes of a stored block behind the backend's back.
fn damage(backend: &FileBackend, block: &BlockId, offset: u64, bytes: &[u8]) {
    let path = backend.store().block_path(block);
    let file = fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, offset).unwrap();
}

#[test]
fn another_opening_reads_what_was_put_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    for fsync in [Fsync::None, Fsync::Data, Fsync::Full] {
        let block = id(fsync as u64);
        let writer = open_with(&dir, |options| options.fsync = fsync);
        put_block(&writer, block, SHARDS, SHARD_BYTES);
        assert_block(&open(&dir), block, SHARDS, SHARD_BYTES);
    }
    assert_eq!(files_in(&dir, "tmp"), 0);
}

#[test]
fn a_block_is_invisible_until_its_last_shard_is_put() {
    let dir = tempfile::tempdir().unwrap();
    let (writer, reader) = (open(&dir), open(&dir));
    let block = id(1);
    for shard in 0..SHARDS {
        assert_eq!(reader.exists(&[block]), Ok(vec![false]));
        let key = ShardKey::new(block, shard);
        assert_eq!(load(&reader, key, SHARD_BYTES).1, Err(BackendError::NotFound(key)));
        put(&writer, key, &bytes_of(key, SHARD_BYTES), None).unwrap();
    }
    assert_eq!(reader.exists(&[block, id(2)]), Ok(vec![true, false]));
}

#[test]
fn the_longest_prefix_ends_at_the_first_gap() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(&dir);
    for number in (0..40).filter(|number| *number != 35) {
        put_block(&backend, id(number), SHARDS, SHARD_BYTES);
    }
    let chain: Vec<_> = (0..40).map(id).collect();
    assert_eq!(backend.longest_prefix(&chain), Ok(35));
    assert_eq!(backend.longest_prefix(&chain[..10]), Ok(10));
    assert_eq!(backend.longest_prefix(&chain[35..]), Ok(0));
    // The gap early, so that whole pieces of present blocks come after it.
    let early: Vec<_> = (0..5).chain([35]).chain(5..35).chain(36..40).map(id).collect();
    assert_eq!(backend.longest_prefix(&early), Ok(5));
    assert_eq!(backend.longest_prefix(&[]), Ok(0));
}

#[test]
fn a_flipped_byte_is_a_mismatch_once_and_then_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(&dir);
    let (block, key) = (id(1), ShardKey::new(id(1), 1));
    put_block(&backend, block, SHARDS, SHARD_BYTES);
    let offset = backend.store().shard_offset(1) + 4999;
    let wrong = !bytes_of(key, SHARD_BYTES)[4999];
    damage(&backend, &block, offset, &[wrong]);

    assert!(load(&backend, ShardKey::new(block, 0), SHARD_BYTES).1.is_ok());
    let error = load(&backend, key, SHARD_BYTES).1.unwrap_err();
    assert_eq!(error.code(), LoadErrorCode::CHECKSUM);
    assert_eq!(files_in(&dir, "bad"), 1);
    assert_eq!(load(&backend, key, SHARD_BYTES).1, Err(BackendError::NotFound(key)));
    assert_eq!(backend.exists(&[block]), Ok(vec![false]));

    put_block(&backend, block, SHARDS, SHARD_BYTES);
    assert_block(&backend, block, SHARDS, SHARD_BYTES);
}

#[test]
fn a_good_copy_that_replaced_the_bad_one_is_not_put_aside() {
    let dir = tempfile::tempdir().unwrap();
    let (stale, writer) = (open(&dir), open(&dir));
    let (block, key) = (id(1), ShardKey::new(id(1), 0));
    put_block(&writer, block, SHARDS, SHARD_BYTES);
    // `stale` holds the file open; it is damaged, then replaced.
    assert!(load(&stale, key, SHARD_BYTES).1.is_ok());
    damage(&writer, &block, writer.store().shard_offset(0), &[0; 64]);
    put_block(&writer, block, SHARDS, SHARD_BYTES);
    let error = load(&stale, key, SHARD_BYTES).1.unwrap_err();
    assert_eq!(error.code(), LoadErrorCode::CHECKSUM);
    assert_eq!(files_in(&dir, "bad"), 0);
    assert_block(&stale, block, SHARDS, SHARD_BYTES);
}

#[test]
fn without_verification_the_wrong_byte_is_the_callers_to_find() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open_with(&dir, |options| options.verify = false);
    let (block, key) = (id(1), ShardKey::new(id(1), 0));
    put_block(&backend, block, SHARDS, SHARD_BYTES);
    let good = bytes_of(key, SHARD_BYTES);
    damage(&backend, &block, backend.store().shard_offset(0), &[!good[0]]);
    let (bytes, answer) = load(&backend, key, SHARD_BYTES);
    assert_eq!(answer.unwrap().checksum, Some(xxh3_64(&good)));
    assert_ne!(bytes, good);
}

#[test]
fn every_damaged_object_is_a_typed_error_and_is_put_aside() {
    let dir = tempfile::tempdir().unwrap();
    let writer = open(&dir);
    type Damage = fn(&Path);
    let cut: Damage =
        |path| fs::File::options().write(true).open(path).unwrap().set_len(9000).unwrap();
    let empty: Damage = |path| fs::write(path, "").unwrap();
    let noise: Damage = |path| fs::write(path, vec![0x5A; 28672]).unwrap();
    let other: Damage = |path| {
        let name = path.with_file_name(format!("{}.kv", id(77)));
        fs::rename(name, path).unwrap();
    };
    let cases: [(u64, Damage, BadObject); 4] = [
        (1, cut, BadObject::Length { found_bytes: 9000, expected_bytes: 28672 }),
        (2, empty, BadObject::Length { found_bytes: 0, expected_bytes: 28672 }),
        (3, noise, BadObject::Magic),
        (4, other, BadObject::OtherBlock { found: id(77) }),
    ];
    put_block(&writer, id(77), SHARDS, SHARD_BYTES);
    for (count, (number, damage, reason)) in cases.into_iter().enumerate() {
        let key = ShardKey::new(id(number), 0);
        put_block(&writer, id(number), SHARDS, SHARD_BYTES);
        let path = writer.store().block_path(&id(number));
        damage(&path);
        let expected = BackendError::BadObject { path, reason };
        assert_eq!(load(&open(&dir), key, SHARD_BYTES).1, Err(expected));
        assert_eq!(files_in(&dir, "bad"), count + 1);
        assert_eq!(load(&open(&dir), key, SHARD_BYTES).1, Err(BackendError::NotFound(key)));
    }
}

#[test]
fn a_pipe_or_a_link_in_place_of_a_block_neither_blocks_nor_leads_away() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(&dir);
    put_block(&backend, id(9), SHARDS, SHARD_BYTES);
    let (pipe, link) = (backend.store().block_path(&id(1)), backend.store().block_path(&id(2)));
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::os::unix::fs::symlink(backend.store().block_path(&id(9)), &link).unwrap();
    for (number, path) in [(1, pipe), (2, link)] {
        let expected = BackendError::BadObject { path, reason: BadObject::NotAFile };
        assert_eq!(load(&backend, ShardKey::new(id(number), 0), SHARD_BYTES).1, Err(expected));
    }
}

#[test]
fn shards_may_be_shorter_but_neither_longer_nor_put_twice_nor_beyond_the_block() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(&dir);
    let key = |shard| ShardKey::new(id(1), shard);
    let long = vec![0; SHARD_BYTES + 1];
    let does_not_fit =
        BackendError::DoesNotFit { key: key(0), len_bytes: 5001, room_bytes: SHARD_BYTES as u64 };
    assert_eq!(put(&backend, key(0), &long, None), Err(does_not_fit));
    let beyond = BackendError::ShardOutOfRange { key: key(3), shards_per_block: SHARDS };
    assert_eq!(put(&backend, key(3), &[], None), Err(beyond.clone()));
    assert_eq!(load(&backend, key(3), 1).1, Err(beyond));
    put(&backend, key(0), b"short", None).unwrap();
    assert_eq!(put(&backend, key(0), b"short", None), Err(BackendError::PutTwice(key(0))));
    put(&backend, key(1), b"", None).unwrap();
    put(&backend, key(2), b"!", Some(xxh3_64(b"!"))).unwrap();

    let (bytes, answer) = load(&backend, key(0), 8);
    assert_eq!(answer, Ok(LoadedShard { len_bytes: 5, checksum: None }));
    assert_eq!(&bytes[..5], b"short");
    let too_small = BackendError::DoesNotFit { key: key(0), len_bytes: 5, room_bytes: 4 };
    assert_eq!(load(&backend, key(0), 4).1, Err(too_small));
}

#[test]
fn a_discarded_or_abandoned_block_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(&dir);
    put(&backend, ShardKey::new(id(1), 0), b"a", None).unwrap();
    put(&backend, ShardKey::new(id(2), 0), b"b", None).unwrap();
    assert_eq!(files_in(&dir, "tmp"), 2);
    backend.discard(id(1));
    assert_eq!(files_in(&dir, "tmp"), 1);
    drop(backend);
    assert_eq!(files_in(&dir, "tmp"), 0);
    assert_eq!(open(&dir).exists(&[id(1), id(2)]), Ok(vec![false, false]));
}

#[test]
fn unfinished_blocks_are_limited_and_the_limit_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open_with(&dir, |options| options.unfinished_blocks = 1);
    put(&backend, ShardKey::new(id(1), 0), b"a", None).unwrap();
    let error = put(&backend, ShardKey::new(id(2), 0), b"b", None).unwrap_err();
    assert_eq!(error, BackendError::TooManyUnfinished { limit: 1 });
    backend.discard(id(1));
    put(&backend, ShardKey::new(id(2), 0), b"b", None).unwrap();
}

#[test]
fn more_blocks_than_open_files_are_still_all_readable() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open_with(&dir, |options| options.open_files = 2);
    (0..6).for_each(|number| put_block(&backend, id(number), SHARDS, SHARD_BYTES));
    for _ in 0..2 {
        (0..6).for_each(|number| assert_block(&backend, id(number), SHARDS, SHARD_BYTES));
    }
    let blocks = dir.path().join("blocks");
    let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let open = open.filter_map(|entry| fs::read_link(entry.path()).ok());
    assert_eq!(open.filter(|path| path.starts_with(&blocks)).count(), 2);
}

#[test]
fn after_shutdown_every_request_is_refused_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(&dir);
    put_block(&backend, id(1), SHARDS, SHARD_BYTES);
    backend.flush(soon()).unwrap();
    backend.shutdown(soon()).unwrap();
    let key = ShardKey::new(id(1), 0);
    assert_eq!(load(&backend, key, SHARD_BYTES).1, Err(BackendError::ShuttingDown));
    assert_eq!(put(&backend, key, b"", None), Err(BackendError::ShuttingDown));
}

const CHILD: &str = "UCM_TEST_FILE_STORE_DIR";

/// Does nothing by itself: the next test runs it as another process.
#[test]
fn the_child_that_is_killed_while_it_writes() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let backend = FileBackend::open(&FileOptions::new(dir, GEOMETRY), THREADS).unwrap();
    put_block(&backend, id(1), SHARDS, SHARD_BYTES);
    put(&backend, ShardKey::new(id(2), 0), b"half", None).unwrap();
    let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
}

#[test]
fn a_killed_writer_leaves_its_whole_blocks_and_nothing_of_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "backend::file::tests::the_child_that_is_killed_while_it_writes"])
        .env(CHILD, dir.path())
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(!status.success());
    assert_eq!(files_in(&dir, "tmp"), 1);
    let backend = open(&dir);
    assert_eq!(files_in(&dir, "tmp"), 0);
    assert_eq!(backend.exists(&[id(1), id(2)]), Ok(vec![true, false]));
    assert_block(&backend, id(1), SHARDS, SHARD_BYTES);
    put_block(&backend, id(2), SHARDS, SHARD_BYTES);
    assert_block(&backend, id(2), SHARDS, SHARD_BYTES);
}

#[test]
fn shards_of_one_block_may_come_from_several_openings_in_any_order() {
    let dir = tempfile::tempdir().unwrap();
    let writers = [open(&dir), open(&dir), open(&dir)];
    for number in 0..20 {
        let block = id(number);
        for shard in [1, 2, 0] {
            assert_eq!(writers[0].exists(&[block]), Ok(vec![false]));
            let key = ShardKey::new(block, shard);
            let bytes = bytes_of(key, SHARD_BYTES);
            let writer = &writers[(number as u32 + shard) as usize % 3];
            put(writer, key, &bytes, Some(xxh3_64(&bytes))).unwrap();
        }
        assert_block(&writers[number as usize % 3], block, SHARDS, SHARD_BYTES);
    }
    assert_eq!(files_in(&dir, "tmp"), 0);
}

#[test]
fn openings_that_put_overlapping_shards_at_once_make_whole_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let writers = [open(&dir), open(&dir)];
    std::thread::scope(|scope| {
        for (first, writer) in (0..).zip(&writers) {
            scope.spawn(move || {
                for number in 0..40 {
                    // Each leaves out another one; the middle is put by both.
                    for shard in [first, 1 + first] {
                        let key = ShardKey::new(id(number), shard);
                        let bytes = bytes_of(key, SHARD_BYTES);
                        put(writer, key, &bytes, Some(xxh3_64(&bytes))).unwrap();
                    }
                }
            });
        }
    });
    (0..40).for_each(|number| assert_block(&writers[0], id(number), SHARDS, SHARD_BYTES));
    // What was put after a block had become visible goes with its writer.
    drop(writers);
    assert_eq!(files_in(&dir, "tmp"), 0);
}

#[test]
fn a_part_that_another_opening_put_outlives_a_discard_of_ones_own() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (open(&dir), open(&dir));
    let put_shard = |writer, shard| {
        let key = ShardKey::new(id(1), shard);
        let bytes = bytes_of(key, SHARD_BYTES);
        put(writer, key, &bytes, Some(xxh3_64(&bytes))).unwrap();
    };
    put_shard(&one, 0);
    put(&two, ShardKey::new(id(1), 1), b"wrong", None).unwrap();
    two.discard(id(1));
    put_shard(&one, 2);
    assert_eq!(one.exists(&[id(1)]), Ok(vec![false]));
    put_shard(&two, 1);
    assert_block(&one, id(1), SHARDS, SHARD_BYTES);
}

#[test]
fn a_block_that_was_removed_can_be_put_again_by_whoever_put_a_part_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (open(&dir), open(&dir));
    put(&one, ShardKey::new(id(1), 0), b"first", None).unwrap();
    put(&two, ShardKey::new(id(1), 1), b"second", None).unwrap();
    put(&two, ShardKey::new(id(1), 2), b"third", None).unwrap();
    assert_eq!(one.exists(&[id(1)]), Ok(vec![true]));
    fs::remove_file(one.store().block_path(&id(1))).unwrap();
    put_block(&one, id(1), SHARDS, SHARD_BYTES);
    assert_block(&open(&dir), id(1), SHARDS, SHARD_BYTES);
}

#[test]
fn blocks_that_others_have_finished_do_not_count_as_unfinished() {
    let dir = tempfile::tempdir().unwrap();
    let one = open_with(&dir, |options| options.unfinished_blocks = 2);
    let two = open(&dir);
    for number in 0..6 {
        put(&one, ShardKey::new(id(number), 0), b"a", None).unwrap();
        put(&two, ShardKey::new(id(number), 1), b"b", None).unwrap();
        put(&two, ShardKey::new(id(number), 2), b"c", None).unwrap();
    }
    let all: Vec<_> = (0..6).map(id).collect();
    assert_eq!(two.exists(&all), Ok(vec![true; 6]));
}
