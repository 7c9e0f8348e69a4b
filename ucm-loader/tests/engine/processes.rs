//! Ranks in other processes, and what becomes of their loads when they are killed.

use std::time::Duration;

use ucm_loader::backend::recorder::{EventKind, read_events};
use ucm_loader::rank::protocol::Command;

use crate::common::child::RankProcess;
use crate::common::rank::Rank;
use crate::common::{Corner, SHARD_BYTES, WATCHDOG, keys, until};

fn blocks(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

#[test]
fn ranks_of_several_processes_share_one_load_of_each_shard() {
    let corner = Corner::new();
    let config = corner.config(3, 64);
    corner.fill_backend(&config, 0..8);
    let store = corner.store(&config);
    store.set_latency(Duration::from_millis(2));
    let here = Rank::start(config.clone(), 0);
    let mut others: Vec<_> = (1..3).map(|rank| RankProcess::start(&config, rank)).collect();
    let task = here.load(&keys(0..8));
    for other in &mut others {
        other.begin(Command::Serve { blocks: blocks(0..8), at: 0 });
    }
    assert!(task.wait(WATCHDOG).unwrap().is_complete());
    here.assert_holds(&keys(0..8));
    for mut other in others {
        // The answer to what it began above comes first.
        let done = other.finish();
        assert_eq!((done.failed_shards, done.mismatched_shards), (0, 0), "{done:?}");
        assert_eq!(done.verified_bytes, 32 * SHARD_BYTES);
        let hot = other.ask(Command::Serve { blocks: blocks(0..8), at: 0 });
        assert_eq!((hot.hits, hot.verified_bytes), (32, 32 * SHARD_BYTES));
        other.leave();
    }
    assert_eq!(store.loads(), 32);
    corner.until_no_pins();
}

#[test]
fn when_the_owner_is_killed_the_survivor_loads_each_shard_once_and_a_new_rank_joins() {
    let corner = Corner::new();
    let config = corner.config(2, 64);
    corner.fill_backend(&config, 0..2);
    let store = corner.store(&config);
    // The one to be killed would be at it for an hour.
    store.set_latency(Duration::from_secs(3600));
    let events = corner.dir("events");
    let mut owner = RankProcess::try_start(&config, 1, Some(events.clone())).unwrap();
    owner.begin(Command::Load { blocks: blocks(0..2), at: 0 });
    until("its loads are under way", || corner.look().1.loading == 4);
    // Only a load that has begun to wait keeps waiting when the latency goes.
    until("both its workers are at one", || owner.loads_asleep() == 2);
    let survivor = Rank::start(config.clone(), 0);
    store.set_latency(Duration::ZERO);
    let task = survivor.load(&keys(0..2));
    until("the survivor has loaded the rest and waits", || {
        matches!(task.check(), ucm_loader::TaskStatus::Running { ended: 4, shards: 8 })
    });
    assert_eq!(store.loads(), 4);
    owner.kill();
    let report = task.wait(WATCHDOG).unwrap();
    assert_eq!(report.failures, []);
    survivor.assert_holds(&keys(0..2));
    // The dead one's loads never got as far as being counted by the store.
    assert_eq!(store.loads(), 8);
    let begun = read_events(&events).unwrap();
    assert_eq!(begun.iter().filter(|event| event.kind == EventKind::LoadStart).count(), 4);
    corner.until_no_pins();
    assert_eq!(corner.look().1.quarantined, 4);

    let mut again = RankProcess::start(&config, 1);
    let done = again.ask(Command::Serve { blocks: blocks(0..2), at: 0 });
    assert_eq!((done.hits, done.failed_shards, done.mismatched_shards), (8, 0, 0));
    assert_eq!(store.loads(), 8);
    again.leave();
    survivor.leave();
    assert_eq!(corner.segment_files(), [""; 0]);
}

#[test]
fn a_killed_waiter_leaves_no_pin_and_the_owner_goes_on() {
    let corner = Corner::new();
    let config = corner.config(2, 64);
    corner.fill_backend(&config, 0..1);
    let store = corner.store(&config);
    let gate = crate::common::doubles::Gate::closed(&config);
    let device = std::sync::Arc::new(ucm_core::device::HostDevice);
    let owner = Rank::with(config.clone(), 0, gate.clone(), device).unwrap();
    let mut waiter = RankProcess::start(&config, 1);
    let task = owner.load(&keys(0..1));
    until("the loads are under way", || gate.holds() == 4);
    let alone = corner.look().0;
    waiter.begin(Command::Load { blocks: blocks(0..1), at: 0 });
    until("the other waits", || corner.look().0 == alone + 4);
    waiter.kill();
    gate.open();
    assert!(task.wait(WATCHDOG).unwrap().is_complete());
    owner.assert_holds(&keys(0..1));
    // The janitor takes the dead one's pins back within seconds.
    corner.until_no_pins();
    assert_eq!(store.loads(), 4);
}

#[test]
fn a_process_refuses_a_rank_that_another_process_has() {
    let corner = Corner::new();
    let config = corner.config(2, 16);
    let holder = RankProcess::start(&config, 0);
    let reason = RankProcess::try_start(&config, 0, None).err().unwrap();
    let pid = holder.pid();
    assert!(reason.contains(&format!("rank 0 is taken by process {pid}")), "{reason}");
    let reason = RankProcess::try_start(&config, 2, None).err().unwrap();
    assert!(reason.contains("rank = 2 is outside 0..2"), "{reason}");
    holder.leave();
}
