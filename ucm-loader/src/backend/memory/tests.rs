//! The memory backend against files in a temporary directory.

use tempfile::TempDir;

use super::*;
use crate::backend::testing::*;
use crate::backend::traits::Backend;

const SHARDS: u32 = 2;
const SHARD_BYTES: usize = 5000;

fn options(dir: &TempDir) -> MemoryOptions {
    MemoryOptions {
        shm_dir: dir.path().to_owned(),
        name: "test".to_owned(),
        geometry: StoreGeometry {
            shard_bytes: SHARD_BYTES as u64,
            shards_per_block: SHARDS,
            content_tag: 3,
        },
        capacity_blocks: 8,
        verify: true,
    }
}

fn open(dir: &TempDir) -> MemoryBackend {
    MemoryBackend::open(&options(dir), THREADS).unwrap()
}

#[test]
fn another_opening_reads_what_was_put_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let (writer, reader) = (open(&dir), open(&dir));
    (0..8).for_each(|number| put_block(&writer, id(number), SHARDS, SHARD_BYTES));
    (0..8).for_each(|number| assert_block(&reader, id(number), SHARDS, SHARD_BYTES));
    assert_eq!(reader.longest_prefix(&[id(0), id(7), id(8), id(1)]), Ok(2));
}

#[test]
fn a_block_is_invisible_until_its_last_shard_is_put() {
    let dir = tempfile::tempdir().unwrap();
    let (writer, reader) = (open(&dir), open(&dir));
    let first = ShardKey::new(id(1), 0);
    put(&writer, first, b"x", None).unwrap();
    assert_eq!(reader.exists(&[id(1)]), Ok(vec![false]));
    assert_eq!(load(&reader, first, SHARD_BYTES).1, Err(BackendError::NotFound(first)));
    put(&writer, ShardKey::new(id(1), 1), b"y", None).unwrap();
    assert_eq!(reader.exists(&[id(1)]), Ok(vec![true]));
    let loaded = LoadedShard { len_bytes: 1, checksum: None };
    assert_eq!(load(&reader, first, SHARD_BYTES).1, Ok(loaded));
}

#[test]
fn a_full_store_says_how_much_it_holds() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(&dir);
    (0..8).for_each(|number| put_block(&backend, id(number), SHARDS, SHARD_BYTES));
    let full = BackendError::StoreFull { capacity_blocks: 8 };
    assert_eq!(put(&backend, ShardKey::new(id(8), 0), b"", None), Err(full));
}

#[test]
fn two_writers_of_one_block_leave_one_copy_and_one_spare_slot() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (open(&dir), open(&dir));
    for shard in 0..SHARDS {
        let key = ShardKey::new(id(1), shard);
        put(&one, key, &bytes_of(key, SHARD_BYTES), None).unwrap();
        put(&two, key, &bytes_of(key, SHARD_BYTES), None).unwrap();
    }
    // Six slots are left, and the one `two` took in vain is its own to reuse.
    (2..9).for_each(|number| put_block(&two, id(number), SHARDS, SHARD_BYTES));
    (2..9).for_each(|number| assert_block(&one, id(number), SHARDS, SHARD_BYTES));
}

#[test]
fn threads_of_many_openings_publish_each_block_exactly_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(&dir);
    options.capacity_blocks = 4 * 64;
    let backends: Vec<_> =
        (0..4).map(|_| MemoryBackend::open(&options, THREADS).unwrap()).collect();
    thread::scope(|scope| {
        for backend in &backends {
            scope.spawn(|| (0..64).for_each(|n| put_block(backend, id(n), SHARDS, SHARD_BYTES)));
        }
    });
    (0..64).for_each(|number| assert_block(&backends[0], id(number), SHARDS, SHARD_BYTES));
    let words = backends[0].store().map.table().iter();
    assert_eq!(words.filter(|word| word.load(Ordering::Relaxed) != 0).count(), 64);
}

#[test]
fn the_next_loads_of_a_key_fail_for_whoever_makes_them() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (open(&dir), open(&dir));
    put_block(&one, id(1), SHARDS, SHARD_BYTES);
    let (bad, good) = (ShardKey::new(id(1), 1), ShardKey::new(id(1), 0));
    assert!(one.store().fail_next(bad, 2));
    let injected = Err(BackendError::Injected { errno: libc::EIO });
    assert_eq!(load(&two, bad, SHARD_BYTES).1, injected);
    assert!(load(&two, good, SHARD_BYTES).1.is_ok());
    assert_eq!(load(&one, bad, SHARD_BYTES).1, injected);
    assert!(load(&one, bad, SHARD_BYTES).1.is_ok());
    assert_eq!(two.store().loads(), 4);
}

#[test]
fn the_share_of_failures_is_what_was_set_and_repeats_with_its_seed() {
    let failures = |seed| {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(&dir);
        put_block(&backend, id(1), SHARDS, SHARD_BYTES);
        backend.store().set_failures(250_000, seed);
        let key = ShardKey::new(id(1), 0);
        let fails = |_| load(&backend, key, SHARD_BYTES).1.is_err();
        (0..400).map(fails).collect::<Vec<_>>()
    };
    let first = failures(1);
    let count = first.iter().filter(|failed| **failed).count();
    assert!((60..140).contains(&count), "{count} of 400 at 25 %");
    assert_eq!(failures(1), first);
    assert_ne!(failures(2), first);
}

#[test]
fn a_set_latency_passes_before_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (open(&dir), open(&dir));
    put_block(&one, id(1), SHARDS, SHARD_BYTES);
    one.store().set_latency(Duration::from_millis(30));
    let begun = std::time::Instant::now();
    assert!(load(&two, ShardKey::new(id(1), 0), SHARD_BYTES).1.is_ok());
    assert!(begun.elapsed() >= Duration::from_millis(30));
}

#[test]
fn an_overwritten_byte_is_a_mismatch() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(&dir);
    put_block(&backend, id(1), SHARDS, SHARD_BYTES);
    let map = &backend.store().map;
    let byte = map.shard(backend.store().find(&id(1)).unwrap(), 1, 1);
    // SAFETY: no load is running.
    unsafe { *byte ^= 1 };
    let error = load(&backend, ShardKey::new(id(1), 1), SHARD_BYTES).1.unwrap_err();
    assert!(matches!(error, BackendError::ChecksumMismatch { .. }), "{error}");
}

#[test]
fn a_store_of_another_shape_or_no_store_at_all_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let _first = open(&dir);
    let mut wider = options(&dir);
    wider.geometry.shards_per_block = 3;
    let error = MemoryStore::open(&wider).err().unwrap();
    let path = dir.path().join("ucm.test.mem");
    let stored = options(&dir).geometry;
    let asked = wider.geometry;
    assert_eq!(error, OpenError::OtherGeometry { path: path.clone(), stored, asked });
    let mut larger = options(&dir);
    larger.capacity_blocks = 9;
    let key = "capacity_blocks";
    let error = MemoryStore::open(&larger).err().unwrap();
    assert_eq!(error, OpenError::OutOfRange { key, value: 9, min: 8, max: 8 });
    for foreign in [vec![], vec![1; 5000]] {
        std::fs::write(&path, foreign).unwrap();
        let error = MemoryStore::open(&options(&dir)).err().unwrap();
        assert_eq!(error, OpenError::NotAStore { path: path.clone() });
    }
    let mut named = options(&dir);
    named.name = "../up".to_owned();
    assert_eq!(
        MemoryStore::open(&named).err().unwrap(),
        OpenError::BadName { name: "../up".to_owned() }
    );
}

#[test]
fn more_than_the_file_system_holds_is_refused_with_both_numbers() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut huge = options(&dir);
    huge.geometry.shard_bytes = 1 << 30;
    huge.capacity_blocks = 1 << 15;
    let error = MemoryStore::open(&huge).err().unwrap();
    let OpenError::NoRoom { needed_bytes, free_bytes, .. } = error else {
        panic!("{error}");
    };
    assert!(needed_bytes > free_bytes && needed_bytes > 1 << 46);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn unlinking_removes_the_file_and_says_whether_there_was_one() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(&dir);
    put_block(&backend, id(1), SHARDS, SHARD_BYTES);
    assert_eq!(MemoryStore::unlink(dir.path(), "test"), Ok(true));
    assert_eq!(MemoryStore::unlink(dir.path(), "test"), Ok(false));
    assert_block(&backend, id(1), SHARDS, SHARD_BYTES);
    assert_eq!(open(&dir).exists(&[id(1)]), Ok(vec![false]));
}
