//! What a backend refuses, and that it answers every request exactly once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use ucm_loader::backend::{BackendError, LoadRequest, RawBuf};

use crate::calls::*;
use crate::{Open, SHARD_BYTES, SHARDS};

pub fn what_is_not_there_is_not_found(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    // In one batch, so that each answer names its own shard.
    let keys: Vec<_> = (0..SHARDS).map(|shard| key(9, shard)).collect();
    for (key, (_, answer)) in keys.iter().zip(load_batch(&*backend, &keys, 8, 0)) {
        assert_eq!(answer, Err(BackendError::NotFound(*key)));
    }
}

pub fn a_shard_that_no_block_has_is_refused(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    put_block(&*backend, 1);
    let beyond = key(1, SHARDS);
    let refused = BackendError::ShardOutOfRange { key: beyond, shards_per_block: SHARDS };
    assert_eq!(load(&*backend, beyond, 8).1, Err(refused.clone()));
    assert_eq!(put(&*backend, beyond, b"", None), Err(refused));
}

pub fn what_does_not_fit_is_refused_with_both_sizes(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    let (len_bytes, room_bytes) = (SHARD_BYTES as u64 + 1, SHARD_BYTES as u64);
    let refused = BackendError::DoesNotFit { key: key(1, 0), len_bytes, room_bytes };
    assert_eq!(put(&*backend, key(1, 0), &vec![0; SHARD_BYTES + 1], None), Err(refused));
    put_block(&*backend, 1);
    let (len_bytes, room_bytes) = (SHARD_BYTES as u64, SHARD_BYTES as u64 - 1);
    let refused = BackendError::DoesNotFit { key: key(1, 1), len_bytes, room_bytes };
    assert_eq!(load(&*backend, key(1, 1), SHARD_BYTES - 1).1, Err(refused));
    assert_block(&*backend, 1);
}

pub fn a_shard_is_put_once(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    put_shard(&*backend, 1, 1).unwrap();
    assert_eq!(put_shard(&*backend, 1, 1), Err(BackendError::PutTwice(key(1, 1))));
    put_shard(&*backend, 1, 0).unwrap();
    put_shard(&*backend, 1, 2).unwrap();
    assert_block(&*backend, 1);
}

pub fn every_request_of_a_large_batch_is_answered_once(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 1024);
    (0..50).for_each(|block| put_block(&*backend, block));
    let keys: Vec<_> =
        (0..60).flat_map(|block| (0..SHARDS).map(move |shard| key(block, shard))).collect();
    for (key, (bytes, answer)) in keys.iter().zip(load_batch(&*backend, &keys, SHARD_BYTES, 0)) {
        if (0..50).any(|block| id(block) == key.block) {
            answer.unwrap();
            assert_eq!(bytes, bytes_of(*key, SHARD_BYTES));
        } else {
            assert_eq!(answer, Err(BackendError::NotFound(*key)));
        }
    }
}

pub fn what_the_queue_cannot_take_is_refused_on_the_spot(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 4);
    put_block(&*backend, 1);
    let keys = vec![key(1, 0); 400];
    let answers = load_batch(&*backend, &keys, SHARD_BYTES, 0);
    let full = BackendError::QueueFull { depth: 4 };
    let refused = answers.iter().filter(|(_, answer)| answer.as_ref() == Err(&full)).count();
    let good = answers.iter().filter(|(_, answer)| answer.is_ok()).count();
    assert_eq!(good + refused, 400);
    assert!(good >= 4 && refused > 0, "{good} loaded, {refused} refused");
}

pub fn a_flush_returns_when_everything_was_answered(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 256);
    put_block(&*backend, 1);
    let answered = Arc::new(AtomicUsize::new(0));
    let mut buffers = vec![vec![0; SHARD_BYTES]; 200];
    let mut batch = Vec::new();
    for buffer in &mut buffers {
        // SAFETY: the buffers stay until the flush below has succeeded.
        let dst = unsafe { RawBuf::new(buffer.as_mut_ptr(), buffer.len()) };
        let answered = Arc::clone(&answered);
        let done = move |_| {
            answered.fetch_add(1, Ordering::SeqCst);
        };
        batch.push(LoadRequest::new(key(1, 0), dst, done));
    }
    backend.submit(batch);
    backend.flush(soon()).unwrap();
    assert_eq!(answered.load(Ordering::SeqCst), 200);
}

pub fn after_shutdown_every_request_is_refused(open: Open) {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path(), 64);
    put_block(&*backend, 1);
    backend.shutdown(soon()).unwrap();
    assert_eq!(load(&*backend, key(1, 0), SHARD_BYTES).1, Err(BackendError::ShuttingDown));
    assert_eq!(put_shard(&*backend, 2, 0), Err(BackendError::ShuttingDown));
    let (sender, answers) = mpsc::channel();
    let mut buffer = [0; 8];
    // SAFETY: the buffer outlives the backend, which answers by then.
    let dst = unsafe { RawBuf::new(buffer.as_mut_ptr(), 8) };
    backend.submit(vec![LoadRequest::new(key(2, 0), dst, move |a| sender.send(a).unwrap())]);
    drop(backend);
    assert_eq!(answers.recv(), Ok(Err(BackendError::ShuttingDown)));
}
