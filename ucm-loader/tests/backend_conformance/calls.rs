//! Blocking calls on a backend, and blocks whose bytes are known.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use ucm_core::key::{BlockId, ShardKey};
use ucm_loader::backend::{
    Backend, BackendError, LoadRequest, LoadedShard, RawBuf, RawBufConst, StoreRequest,
};
use ucm_loader::content;
use xxhash_rust::xxh3::xxh3_64;

use crate::{SHARD_BYTES, SHARDS};

const SEED: u64 = 23;
/// Only a hang takes this long.
const WATCHDOG: Duration = Duration::from_secs(60);

pub type Answer = Result<LoadedShard, BackendError>;

pub fn soon() -> Instant {
    Instant::now() + WATCHDOG
}

pub fn id(number: u64) -> BlockId {
    BlockId::from_words(number.wrapping_mul(0x9E37_79B9_7F4A_7C15), number)
}

pub fn key(block: u64, shard: u32) -> ShardKey {
    ShardKey::new(id(block), shard)
}

pub fn bytes_of(key: ShardKey, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    content::fill(&mut bytes, SEED, &key, 0);
    bytes
}

/// Loads several shards in one batch, each into `len` poisoned bytes that
/// begin `skew` bytes behind a page's start.
pub fn load_batch(
    backend: &dyn Backend,
    keys: &[ShardKey],
    len: usize,
    skew: usize,
) -> Vec<(Vec<u8>, Answer)> {
    const PAGE: usize = 4096;
    let mut buffers: Vec<Vec<u8>> =
        keys.iter().map(|_| vec![content::POISON_BYTE; len + 2 * PAGE]).collect();
    let (sender, answers) = mpsc::channel();
    let starts: Vec<usize> = buffers.iter().map(|buffer| start(buffer, skew)).collect();
    let mut batch = Vec::new();
    for (number, key) in keys.iter().enumerate() {
        let target = &mut buffers[number][starts[number]..][..len];
        // SAFETY: no buffer is touched or moved until every answer has come.
        let dst = unsafe { RawBuf::new(target.as_mut_ptr(), len) };
        let sender = sender.clone();
        let done = move |answer| sender.send((number, answer)).unwrap();
        batch.push(LoadRequest::new(*key, dst, done));
    }
    backend.submit(batch);
    drop(sender);
    let mut found: Vec<Option<Answer>> = keys.iter().map(|_| None).collect();
    for _ in keys {
        let (number, answer) = answers.recv_timeout(WATCHDOG).unwrap();
        assert!(found[number].replace(answer).is_none(), "request {number} was answered twice");
    }
    // Every sender is gone: a disconnect, not a wait.
    assert!(answers.recv_timeout(WATCHDOG).is_err(), "an answer too many");
    let cut = |(number, buffer): (usize, Vec<u8>)| buffer[starts[number]..][..len].to_vec();
    let buffers = buffers.into_iter().enumerate().map(cut);
    buffers.zip(found.into_iter().map(Option::unwrap)).collect()
}

/// Where in `buffer` a page's start plus `skew` is.
fn start(buffer: &[u8], skew: usize) -> usize {
    buffer.as_ptr().align_offset(4096) + skew
}

pub fn load(backend: &dyn Backend, key: ShardKey, len: usize) -> (Vec<u8>, Answer) {
    load_batch(backend, &[key], len, 0).remove(0)
}

pub fn put(
    backend: &dyn Backend,
    key: ShardKey,
    bytes: &[u8],
    checksum: Option<u64>,
) -> Result<(), BackendError> {
    let (sender, answers) = mpsc::channel();
    // SAFETY: `bytes` is borrowed until the answer has come.
    let src = unsafe { RawBufConst::new(bytes.as_ptr(), bytes.len()) };
    backend.put(StoreRequest::new(key, src, checksum, move |answer| sender.send(answer).unwrap()));
    answers.recv_timeout(WATCHDOG).unwrap()
}

/// Puts one shard of a block with its checksum.
pub fn put_shard(backend: &dyn Backend, block: u64, shard: u32) -> Result<(), BackendError> {
    let bytes = bytes_of(key(block, shard), SHARD_BYTES);
    put(backend, key(block, shard), &bytes, Some(xxh3_64(&bytes)))
}

/// Puts a whole block, last shard first.
pub fn put_block(backend: &dyn Backend, block: u64) {
    (0..SHARDS).rev().for_each(|shard| put_shard(backend, block, shard).unwrap());
}

/// Loads a whole block in one batch and compares every byte.
#[track_caller]
pub fn assert_block(backend: &dyn Backend, block: u64) {
    let keys: Vec<_> = (0..SHARDS).map(|shard| key(block, shard)).collect();
    let loaded = load_batch(backend, &keys, SHARD_BYTES, 0);
    for (key, (bytes, answer)) in keys.iter().zip(loaded) {
        assert_eq!(answer.unwrap().len_bytes, SHARD_BYTES as u64);
        assert_eq!(content::verify(&bytes, SEED, key, 0), None);
    }
}
