//! Device copies that fail.

use std::sync::Arc;

use ucm_loader::backend::open::open;
use ucm_loader::{LoaderConfig, ShardError, ShardFailure};

use crate::common::doubles::BadDevice;
use crate::common::rank::Rank;
use crate::common::{Corner, WATCHDOG, keys};

fn with_bad_device(config: &LoaderConfig) -> (Rank, Arc<BadDevice>) {
    let device = Arc::new(BadDevice::default());
    let backend = open(&config.clone().check().unwrap(), None).unwrap();
    (Rank::with(config.clone(), 0, backend, device.clone()).unwrap(), device)
}

#[test]
fn a_failing_copy_to_the_device_fails_that_shard_only_and_leaves_no_pin() {
    let corner = Corner::new();
    let config = corner.config(1, 64);
    corner.fill_backend(&config, 0..2);
    let (rank, device) = with_bad_device(&config);
    let keys = keys(0..2);
    device.fail_at(&[rank.memory.address(3)]);
    let report = rank.load(&keys).wait(WATCHDOG).unwrap();
    let error = ShardError::Device(BadDevice::ERROR);
    assert!(error.to_string().contains("copy failed with driver code 719"), "{error}");
    assert_eq!(report.failures, [ShardFailure { index: 3, key: keys[3], error }]);
    let right = (0..8).filter(|&at| rank.holds(&keys[at], at)).count();
    assert_eq!(right, 7);
    corner.until_no_pins();
    // It is in the cache all the same.
    device.fail_at(&[]);
    assert_eq!(rank.load_right(&keys).hits, 8);
}

/// One shard of two blocks cannot be read from the device; then it can.
fn dump_again(corner: &Corner, config: &LoaderConfig) {
    let (rank, device) = with_bad_device(config);
    let keys = keys(0..2);
    device.fail_at(&[rank.memory.address(6)]);
    let report = rank.dump(&keys).wait(WATCHDOG).unwrap();
    let error = ShardError::Device(BadDevice::ERROR);
    assert_eq!(report.failures, [ShardFailure { index: 6, key: keys[6], error }]);
    corner.until_no_pins();
    // The backend has the whole first block, and of the second one nothing
    // that anybody could see.
    let blocks = [keys[0].block, keys[4].block];
    let backend = open(&config.clone().check().unwrap(), None).unwrap();
    assert_eq!(backend.exists(&blocks).unwrap(), [true, false]);
    device.fail_at(&[]);
    let report = rank.dump(&keys).wait(WATCHDOG).unwrap();
    assert_eq!(report.failures, []);
    assert_eq!(backend.exists(&blocks).unwrap(), [true, true]);
    rank.leave();
    Rank::start(config.clone(), 0).load_right(&keys);
}

#[test]
fn a_dump_with_a_failing_copy_fails_that_shard_only_and_can_be_done_again_in_memory() {
    let corner = Corner::new();
    dump_again(&corner, &corner.config(1, 64));
}

#[test]
fn a_dump_with_a_failing_copy_fails_that_shard_only_and_can_be_done_again_in_files() {
    let corner = Corner::new();
    dump_again(&corner, &corner.file_config(1, 64));
}
