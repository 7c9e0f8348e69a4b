//! A store's upkeep: planted damage is found and named, the limit is kept, the cold goes first.
#![allow(clippy::unwrap_used)]

mod damage;
mod limit;

use std::path::Path;
use std::sync::Arc;

use ucm_core::key::{BlockId, ShardKey};
use ucm_loader::backend::StoreGeometry;
use ucm_loader::backend::file::{FileOptions, FileStore};
use ucm_loader::backend::threaded::BlockingStore;
use ucm_loader::content;
use xxhash_rust::xxh3::xxh3_64;

const SHARD_BYTES: usize = 6000;
const SHARDS: u32 = 3;
const GEOMETRY: StoreGeometry =
    StoreGeometry { shard_bytes: SHARD_BYTES as u64, shards_per_block: SHARDS, content_tag: 9 };
const SEED: u64 = 3;

fn id(number: u64) -> BlockId {
    BlockId::from_words(number.wrapping_mul(0x9E37_79B9_7F4A_7C15), number)
}

fn bytes_of(key: ShardKey) -> Vec<u8> {
    let mut bytes = vec![0; SHARD_BYTES];
    content::fill(&mut bytes, SEED, &key, 0);
    bytes
}

fn open(dir: &Path, limit_bytes: Option<u64>) -> Arc<FileStore> {
    let options = FileOptions { limit_bytes, ..FileOptions::new(dir, GEOMETRY) };
    Arc::new(FileStore::open(&options).unwrap())
}

fn put(store: &FileStore, number: u64) {
    for shard in 0..SHARDS {
        let key = ShardKey::new(id(number), shard);
        let bytes = bytes_of(key);
        store.store(key, &bytes, Some(xxh3_64(&bytes))).unwrap();
    }
}

/// Whether the block is there; if it is, it must be right.
fn is_there(store: &FileStore, number: u64) -> bool {
    let mut buffer = vec![0; SHARD_BYTES];
    (0..SHARDS).all(|shard| {
        let key = ShardKey::new(id(number), shard);
        let is_loaded = store.load(key, &mut buffer).is_ok();
        assert!(!is_loaded || buffer == bytes_of(key), "block {number}, shard {shard}");
        is_loaded
    })
}
