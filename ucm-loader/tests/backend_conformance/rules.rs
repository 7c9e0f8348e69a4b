//! What a backend keeps: bytes, order, visibility.

use std::thread;

use ucm_loader::backend::{BackendError, LoadedShard};
use xxhash_rust::xxh3::xxh3_64;

use crate::calls::*;
use crate::{Open, SHARD_BYTES, SHARDS};

pub fn what_one_opening_put_another_reads_byte_for_byte(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let (writer, reader) = (open(dir.path(), 64), open(dir.path(), 64));
    for block in 0..20 {
        put_block(&*writer, block);
    }
    for block in 0..20 {
        assert_block(&*reader, block);
    }
    drop((writer, reader));
    assert_block(&*open(dir.path(), 64), 7);
}

pub fn a_block_is_absent_until_its_last_shard_is_put(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let (writer, reader) = (open(dir.path(), 64), open(dir.path(), 64));
    for shard in 0..SHARDS {
        assert_eq!(reader.exists(&[id(1)]), Ok(vec![false]));
        let missing = Err(BackendError::NotFound(key(1, shard)));
        assert_eq!(load(&*reader, key(1, shard), SHARD_BYTES).1, missing);
        put_shard(&*writer, 1, shard).unwrap();
    }
    assert_eq!(reader.exists(&[id(1)]), Ok(vec![true]));
    assert_block(&*reader, 1);
}

pub fn existence_is_answered_in_the_order_of_the_question(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    put_block(&*backend, 1);
    put_block(&*backend, 3);
    let asked = [3, 2, 1, 0, 3].map(id);
    assert_eq!(backend.exists(&asked), Ok(vec![true, false, true, false, true]));
    assert_eq!(backend.exists(&[]), Ok(vec![]));
}

pub fn the_longest_prefix_ends_at_the_first_gap(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    (0..40).filter(|block| *block != 35).for_each(|block| put_block(&*backend, block));
    let chain: Vec<_> = (0..40).map(id).collect();
    assert_eq!(backend.longest_prefix(&chain), Ok(35));
    assert_eq!(backend.longest_prefix(&chain[..10]), Ok(10));
    assert_eq!(backend.longest_prefix(&chain[35..]), Ok(0));
    assert_eq!(backend.longest_prefix(&[]), Ok(0));
}

pub fn a_shard_may_be_shorter_or_empty_and_says_so(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    let lengths = [4096 + 5, 0, 1];
    for (shard, len) in (0..SHARDS).zip(lengths) {
        let bytes = bytes_of(key(1, shard), len);
        let checksum = (shard > 0).then(|| xxh3_64(&bytes));
        put(&*backend, key(1, shard), &bytes, checksum).unwrap();
    }
    for (shard, len) in (0..SHARDS).zip(lengths) {
        let (found, answer) = load(&*backend, key(1, shard), SHARD_BYTES);
        let expected = bytes_of(key(1, shard), len);
        let checksum = (shard > 0).then(|| xxh3_64(&expected));
        assert_eq!(answer, Ok(LoadedShard { len_bytes: len as u64, checksum }));
        assert_eq!(found[..len], expected);
    }
}

pub fn bytes_that_do_not_match_their_checksum_are_never_a_success(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    for shard in 0..SHARDS {
        let bytes = bytes_of(key(1, shard), SHARD_BYTES);
        put(&*backend, key(1, shard), &bytes, Some(xxh3_64(&bytes) ^ 1)).unwrap();
    }
    let error = load(&*backend, key(1, 0), SHARD_BYTES).1.unwrap_err();
    assert!(matches!(error, BackendError::ChecksumMismatch { .. }), "{error}");
    assert!(load(&*backend, key(1, 0), SHARD_BYTES).1.is_err());
}

pub fn a_discarded_block_can_be_put_anew(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    put(&*backend, key(1, 0), b"nothing of this remains", None).unwrap();
    backend.discard(id(1));
    backend.discard(id(2));
    put_block(&*backend, 1);
    assert_block(&*backend, 1);
}

pub fn discarding_a_complete_block_does_nothing(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    put_block(&*backend, 1);
    backend.discard(id(1));
    assert_block(&*backend, 1);
}

pub fn two_openings_may_put_the_same_block_at_once(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (open(dir.path(), 64), open(dir.path(), 64));
    thread::scope(|scope| {
        for backend in [&one, &two] {
            scope.spawn(|| (0..20).for_each(|block| put_block(&**backend, block)));
        }
    });
    for block in 0..20 {
        assert_block(&*one, block);
        assert_block(&*two, block);
    }
}

pub fn a_load_of_a_buffer_at_any_address_is_right(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    put_block(&*backend, 1);
    for skew in [0, 1, 8, 511, 512, 4095] {
        for room in [SHARD_BYTES, SHARD_BYTES + 1, SHARD_BYTES.next_multiple_of(4096)] {
            let (found, answer) = load_batch(&*backend, &[key(1, 2)], room, skew).remove(0);
            assert_eq!(answer.unwrap().len_bytes, SHARD_BYTES as u64);
            assert_eq!(found[..SHARD_BYTES], bytes_of(key(1, 2), SHARD_BYTES));
        }
    }
}
