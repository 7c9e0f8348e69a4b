//! What comes out is what went in, and every shard is loaded once.

use std::sync::Arc;

use ucm_core::ShardKey;
use ucm_core::device::HostDevice;
use ucm_loader::replay::trace::block_id;
use ucm_loader::{LoaderConfig, Prefix, TaskReport, TaskStatus};

use crate::common::doubles::StoreGate;
use crate::common::rank::Rank;
use crate::common::{Corner, SEED, SHARD_BYTES, WATCHDOG, keys, until};

fn comes_back(corner: &Corner, config: &LoaderConfig) {
    corner.fill_backend(config, 0..6);
    let rank = Rank::start(config.clone(), 0);
    let report = rank.load_right(&keys(0..6));
    assert_eq!((report.shards, report.owned, report.hits, report.waited), (24, 24, 0, 0));
    rank.leave();
    assert_eq!(corner.segment_files(), [""; 0]);
}

#[test]
fn a_dumped_block_comes_back_from_block_files_byte_for_byte_after_the_cache_is_gone() {
    let corner = Corner::new();
    comes_back(&corner, &corner.file_config(1, 64));
}

#[test]
fn a_dumped_block_comes_back_from_memory_byte_for_byte_after_the_cache_is_gone() {
    let corner = Corner::new();
    comes_back(&corner, &corner.config(1, 64));
}

#[test]
fn four_ranks_load_each_shard_from_the_backend_exactly_once() {
    let corner = Corner::new();
    let config = corner.config(4, 64);
    corner.fill_backend(&config, 0..12);
    let store = corner.store(&config);
    store.set_latency(std::time::Duration::from_millis(2));
    let ranks = Rank::all(&config);
    let keys = keys(0..12);
    let tasks: Vec<_> = ranks.iter().map(|rank| rank.load(&keys)).collect();
    let reports: Vec<_> = tasks.iter().map(|task| task.wait(WATCHDOG).unwrap()).collect();
    for (rank, report) in ranks.iter().zip(&reports) {
        assert_eq!(report.failures, []);
        assert_eq!(report.hits + report.owned + report.waited, 48);
        rank.assert_holds(&keys);
        assert_eq!(rank.engine.metrics().h2d_bytes, 48 * SHARD_BYTES);
        assert_eq!(rank.engine.check_ranks(), None);
    }
    assert_eq!(store.loads(), 48);
    assert_eq!(reports.iter().map(|report| report.owned).sum::<u64>(), 48);
    corner.until_no_pins();
    ranks.into_iter().for_each(Rank::leave);
}

#[test]
fn a_second_load_is_all_hits_and_asks_the_backend_for_nothing() {
    let corner = Corner::new();
    let config = corner.config(2, 64);
    corner.fill_backend(&config, 0..4);
    let store = corner.store(&config);
    let ranks = Rank::all(&config);
    ranks[0].load_right(&keys(0..4));
    for rank in &ranks {
        let before = rank.engine.metrics();
        let report = rank.load_right(&keys(0..4));
        let expected = TaskReport { shards: 16, hits: 16, ..TaskReport::default() };
        assert_eq!(report, expected);
        let counted = rank.engine.metrics().since(&before);
        assert_eq!((counted.hits, counted.owned, counted.waits), (16, 0, 0));
    }
    assert_eq!(store.loads(), 16);
}

#[test]
fn what_one_rank_dumps_is_a_hit_for_the_others_without_a_load() {
    let corner = Corner::new();
    let config = corner.config(2, 64);
    let ranks = Rank::all(&config);
    let store = corner.store(&config);
    let report = ranks[0].dump(&keys(0..5)).wait(WATCHDOG).unwrap();
    assert_eq!(report.failures, []);
    let counted = ranks[0].engine.metrics();
    assert_eq!((counted.stored, counted.d2h_bytes), (20, 20 * SHARD_BYTES));
    assert_eq!(ranks[1].load_right(&keys(0..5)).hits, 20);
    assert_eq!(store.loads(), 0);
    corner.until_no_pins();
}

#[test]
fn the_same_shard_twice_in_a_task_is_loaded_once_and_copied_twice() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..1);
    let store = corner.store(&config);
    let rank = Rank::start(config, 0);
    let key = ShardKey::new(block_id(SEED, 0), 2);
    rank.load_right(&[key, key, key]);
    assert_eq!(store.loads(), 1);
    corner.until_no_pins();
}

#[test]
fn a_task_larger_than_the_whole_cache_completes_on_every_rank() {
    let corner = Corner::new();
    let config = corner.config(2, 8);
    corner.fill_backend(&config, 0..30);
    let ranks = Rank::all(&config);
    let keys = keys(0..30);
    let tasks: Vec<_> = ranks.iter().map(|rank| rank.load(&keys)).collect();
    for (rank, task) in ranks.iter().zip(&tasks) {
        assert_eq!(task.wait(WATCHDOG).unwrap().failures, []);
        rank.assert_holds(&keys);
    }
    corner.until_no_pins();
    ranks.into_iter().for_each(Rank::leave);
}

#[test]
fn a_dump_larger_than_the_whole_cache_completes_and_comes_back() {
    let corner = Corner::new();
    let config = corner.config(2, 8);
    let ranks = Rank::all(&config);
    let report = ranks[0].dump(&keys(0..30)).wait(WATCHDOG).unwrap();
    assert_eq!(report.failures, []);
    ranks[1].load_right(&keys(0..30));
    corner.until_no_pins();
}

#[test]
fn two_dumps_of_one_block_at_a_time_both_succeed_and_the_block_is_whole() {
    for config in [Corner::config, Corner::file_config] {
        let corner = Corner::new();
        let config = config(&corner, 1, 64);
        let rank = Rank::start(config.clone(), 0);
        let keys = keys(0..3);
        let tasks: Vec<_> = (0..5).map(|n| rank.dump_at(&keys, n * keys.len())).collect();
        for task in tasks {
            assert_eq!(task.wait(WATCHDOG).unwrap().failures, []);
        }
        corner.until_no_pins();
        rank.leave();
        Rank::start(config, 0).load_right(&keys);
    }
}

#[test]
fn no_shard_of_a_dumped_block_is_evicted_before_the_backend_has_the_whole_block() {
    let corner = Corner::new();
    let config = corner.config(1, 8);
    corner.fill_backend(&config, 0..4);
    let gate = StoreGate::closed(&config);
    let rank = Rank::with(config, 0, gate.clone(), Arc::new(HostDevice)).unwrap();
    let task = rank.dump_at(&keys(9..10), 100);
    until("the first shard is stored", || {
        gate.holds() == 3 && task.check() == TaskStatus::Running { ended: 1, shards: 4 }
    });
    // Sixteen shards go through the other half of the cache.
    rank.load_right(&keys(0..4));
    let block = [block_id(SEED, 9)];
    assert_eq!(rank.engine.prefix(&block).unwrap(), Prefix { ready_blocks: 1, found_blocks: 1 });
    assert_eq!(rank.load_right(&keys(9..10)).hits, 4);
    gate.open();
    assert_eq!(task.wait(WATCHDOG).unwrap().failures, []);
    corner.until_no_pins();
    // Now it may go, and comes back.
    rank.load_right(&keys(0..4));
    rank.load_right(&keys(9..10));
}

#[test]
fn blocks_larger_than_a_ranks_share_of_the_cache_are_dumped_all_the_same() {
    let corner = Corner::new();
    // One slot for each rank, blocks of four.
    let config = corner.config(3, 3);
    let ranks = Rank::all(&config);
    let tasks: Vec<_> = (0..)
        .zip(&ranks)
        .map(|(number, rank)| rank.dump(&keys(number * 4..number * 4 + 4)))
        .collect();
    for task in tasks {
        assert_eq!(task.wait(WATCHDOG).unwrap().failures, []);
    }
    corner.until_no_pins();
    ranks[1].load_right(&keys(0..12));
}

#[test]
fn the_prefix_tells_what_the_cache_has_and_what_it_and_the_backend_have() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..5);
    let rank = Rank::start(config, 0);
    let chain: Vec<_> = (0..8).map(|number| block_id(SEED, number)).collect();
    let prefix = |ready_blocks, found_blocks| Prefix { ready_blocks, found_blocks };
    assert_eq!(rank.engine.prefix(&chain).unwrap(), prefix(0, 5));
    rank.load_right(&keys(0..2));
    rank.load_right(&keys(3..4));
    assert_eq!(rank.engine.prefix(&chain).unwrap(), prefix(2, 5));
    // Three of four shards are no block.
    rank.load_right(&keys(2..3)[..3]);
    assert_eq!(rank.engine.prefix(&chain).unwrap(), prefix(2, 5));
    rank.dump(&keys(5..6)).wait(WATCHDOG).unwrap();
    assert_eq!(rank.engine.prefix(&chain).unwrap(), prefix(2, 6));
    assert_eq!(rank.engine.prefix(&[]).unwrap(), prefix(0, 0));
    assert_eq!(rank.engine.prefix(&chain[6..]).unwrap(), prefix(0, 0));
}

#[test]
fn a_touch_counts_the_resident_shards_of_its_blocks() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..3);
    let rank = Rank::start(config, 0);
    rank.load_right(&keys(0..1));
    rank.load_right(&keys(1..2)[..3]);
    let blocks: Vec<_> = (0..4).map(|number| block_id(SEED, number)).collect();
    assert_eq!(rank.engine.touch(&blocks), 7);
    assert_eq!(rank.engine.touch(&blocks[2..]), 0);
}

#[test]
fn a_touched_block_outlives_its_neighbours_when_slots_are_needed() {
    let corner = Corner::new();
    let config = corner.config(1, 16);
    corner.fill_backend(&config, 0..6);
    let rank = Rank::start(config, 0);
    // The fifth block of a cache of four clears every mark and takes the
    // first one's slots; the hand stands before the second one's.
    (0..5).for_each(|number| drop(rank.load_right(&keys(number..number + 1))));
    let ready = |number| rank.engine.prefix(&[block_id(SEED, number)]).unwrap().ready_blocks;
    assert_eq!((0..5).map(ready).collect::<Vec<_>>(), [0, 1, 1, 1, 1]);
    assert_eq!(rank.engine.touch(&[block_id(SEED, 1)]), 4);
    rank.load_right(&keys(5..6));
    assert_eq!((0..6).map(ready).collect::<Vec<_>>(), [0, 1, 0, 1, 1, 1]);
}
