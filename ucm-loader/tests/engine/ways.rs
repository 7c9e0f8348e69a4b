//! Other ways of moving shards: scattered over tensors, ahead of time, past the cache.

use std::ops::Range;

use ucm_core::DevicePtr;
use ucm_core::cache::Presence;
use ucm_core::segment::counters::Counter;
use ucm_loader::content;
use ucm_loader::{LoaderConfig, SubmitError, TaskOptions};

use crate::common::rank::Rank;
use crate::common::{Corner, Memory, SEED, SHARD_BYTES, SHARDS_PER_BLOCK, WATCHDOG, keys};

fn plain() -> TaskOptions {
    TaskOptions::default()
}

fn presence(rank: &Rank, blocks: Range<u64>) -> Vec<Presence> {
    let plane = rank.engine.attachment().cache().plane();
    keys(blocks).iter().map(|key| plane.probe(key)).collect()
}

#[test]
fn a_shard_is_scattered_over_its_tensors_and_gathered_from_them() {
    let corner = Corner::new();
    let quarter = SHARD_BYTES / 4;
    let tensor_bytes = vec![quarter, 2 * quarter, quarter];
    let config = LoaderConfig { tensor_bytes: tensor_bytes.clone(), ..corner.config(1, 64) };
    let rank = Rank::start(config, 0);
    let keys = keys(0..3);
    // Each tensor of each shard in a device shard of its own: nothing touches.
    let memory = Memory::new(keys.len() * 3);
    let mut addresses = Vec::new();
    for (number, key) in keys.iter().enumerate() {
        let mut whole = vec![0; SHARD_BYTES as usize];
        content::fill(&mut whole, SEED, key, 0);
        let mut offset = 0;
        for (tensor, len) in tensor_bytes.iter().enumerate() {
            let (at, len) = (number * 3 + tensor, *len as usize);
            memory.set(at, |bytes| bytes[..len].copy_from_slice(&whole[offset..offset + len]));
            addresses.push(memory.address(at));
            offset += len;
        }
    }
    // SAFETY: `memory` outlives the task, and nobody else touches it.
    let dump = unsafe { rank.engine.dump_tensors(&keys, addresses.clone(), &plain()) }.unwrap();
    assert_eq!(dump.wait(WATCHDOG).unwrap().failures, []);
    // In one piece they are what they must be.
    rank.load_right(&keys);
    // And back into other tensors, here lying one behind the other.
    let back = Memory::new(keys.len());
    let rows: Vec<DevicePtr> = (0..keys.len())
        .flat_map(|at| {
            let start = back.address(at).0;
            [0, quarter, 3 * quarter].map(|offset| DevicePtr(start + offset))
        })
        .collect();
    // SAFETY: as above, for `back`.
    let load = unsafe { rank.engine.load_tensors(&keys, rows, &plain()) }.unwrap();
    assert_eq!(load.wait(WATCHDOG).unwrap().failures, []);
    for (at, key) in keys.iter().enumerate() {
        assert_eq!(content::verify(back.shard(at), SEED, key, 0), None);
    }
    addresses.pop();
    // SAFETY: refused before anything is touched.
    let refused = unsafe { rank.engine.load_tensors(&keys, addresses, &plain()) };
    assert!(matches!(
        refused.unwrap_err(),
        SubmitError::Addresses { shards: 12, tensors: 3, addresses: 35 }
    ));
    corner.until_no_pins();
}

#[test]
fn a_prefetch_brings_shards_into_the_cache_and_touches_no_device() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..4);
    let store = corner.store(&config);
    let rank = Rank::start(LoaderConfig { reserved_slots: Some(60), ..config }, 0);
    let before = store.loads();
    let task = rank.engine.prefetch(&keys(0..4), &plain()).unwrap();
    assert_eq!(task.wait(WATCHDOG).unwrap().failures, []);
    // Sixteen shards where ordinary loads have four slots: it used the reserve.
    assert_eq!(presence(&rank, 0..4), vec![Presence::Ready; 16]);
    assert_eq!((store.loads() - before, rank.engine.metrics().h2d_bytes), (16, 0));
    let report = rank.load_right(&keys(0..4));
    assert_eq!((report.hits, report.owned), (16, 0));
    corner.until_no_pins();
}

#[test]
fn backend_only_mode_really_goes_to_the_backend() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..2);
    let store = corner.store(&config);
    let rank = Rank::start(config, 0);
    rank.load_right(&keys(0..2));
    let before = store.loads();
    let again = TaskOptions { backend_only: true, ..plain() };
    let report = rank.load_with(&keys(0..2), &again);
    assert_eq!((report.failures.len(), report.owned), (0, 8));
    assert_eq!(store.loads() - before, 8);
    let plane = rank.engine.attachment().cache().plane();
    assert_eq!(plane.count(Counter::ForcedReloads), 8, "counted apart");
    corner.until_no_pins();
}

#[test]
fn the_next_shard_of_each_block_is_prepared_while_nothing_else_is_to_be_done() {
    let corner = Corner::new();
    let config = LoaderConfig { reserved_slots: Some(8), ..corner.config(1, 64) };
    corner.fill_backend(&config, 0..4);
    let rank = Rank::start(config, 0);
    // Layer by layer: the same shard of every block.
    let layer = |shard: usize| -> Vec<_> {
        keys(0..4).into_iter().skip(shard).step_by(SHARDS_PER_BLOCK as usize).collect()
    };
    let count = |counter| rank.engine.attachment().cache().plane().count(counter);
    for shard in 0..SHARDS_PER_BLOCK as usize {
        rank.load_right(&layer(shard));
        let expected = 4 * (shard as u64 + 1).min(u64::from(SHARDS_PER_BLOCK) - 1);
        crate::common::until("the next layer is prepared", || count(Counter::Prepared) == expected);
    }
    let prepared_layers = u64::from(SHARDS_PER_BLOCK) - 1;
    assert_eq!(count(Counter::PreparedUsed), 4 * prepared_layers, "never past a block's end");
    corner.until_no_pins();
}

#[test]
fn prealloc_can_be_switched_off() {
    let corner = Corner::new();
    let config = LoaderConfig { prealloc: false, ..corner.config(1, 64) };
    corner.fill_backend(&config, 0..1);
    let rank = Rank::start(config, 0);
    rank.load_right(&keys(0..1)[..1]);
    rank.load_right(&keys(0..1)[..1]);
    assert_eq!(presence(&rank, 0..1)[1], Presence::Absent);
}
