//! `ucm inspect` and `ucm gc`, on segments of running and of killed ranks.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;
use ucm_loader::LoaderConfig;
use ucm_loader::rank::protocol::Command;

use crate::common::child::{RankProcess, good, refused, run};
use crate::common::{Corner, ID, SHARD_BYTES, until};
use crate::machine::{numbers, shared, ucm_in};

#[test]
fn inspect_shows_who_lives_and_what_they_hold_and_changes_nothing() {
    let _with_others = shared();
    let corner = Corner::new();
    let config = corner.config(2, 16);
    corner.fill_backend(&config, 0..2);
    let store = corner.store(&config);
    let mut ranks = [RankProcess::start(&config, 0), RankProcess::start(&config, 1)];
    let done = ranks[1].ask(Command::Load { blocks: vec![0], at: 0 });
    assert_eq!(done.owned, 4);
    store.set_latency(Duration::from_secs(3600));
    ranks[0].begin(Command::Load { blocks: vec![1], at: 0 });
    until("four loads are under way", || corner.look().1.loading == 4);
    let inspect = || good(&run(&mut ucm_in(&corner, &["inspect", ID, "--json"])));
    let report = inspect();
    let slots = ["slots.total", "slots.ready", "slots.loading", "slots.free"];
    assert_eq!(numbers(&report, slots), [16, 4, 4, 8]);
    let sizes = ["shard_bytes", "shards_per_block", "local_rank_size", "attached_ranks"];
    assert_eq!(numbers(&report, sizes), [SHARD_BYTES, 4, 2, 2]);
    assert_eq!(report["id"], ID);
    assert_eq!((&report["persistent"], &report["poisoned"]), (&false.into(), &false.into()));
    let participants = report["participants"].as_array().unwrap();
    assert_eq!(participants.len(), 2);
    for (rank, found) in ranks.iter().zip(participants) {
        assert_eq!((&found["role"], &found["alive"]), (&"rank".into(), &true.into()));
        assert_eq!(found["pid"], rank.pid());
    }
    let pins = |at: usize| participants[at]["pins"].as_u64().unwrap();
    assert!(pins(0) >= 4 && pins(1) == 0, "{participants:?}");
    let counters = ["counters.owned", "counters.published", "counters.evictions"];
    assert_eq!(numbers(&report, counters), [8, 4, 0]);
    // Looking took no place and no pin, and counted nothing.
    assert_eq!(inspect(), report);
    let audited = good(&run(&mut ucm_in(&corner, &["inspect", ID, "--audit", "--json"])));
    assert_eq!(audited["violations"], serde_json::json!([]));
}

#[test]
fn inspect_without_json_prints_tables_for_people() {
    let _with_others = shared();
    let corner = Corner::new();
    let config = corner.config(1, 16);
    let _rank = RankProcess::start(&config, 0);
    let output = run(&mut ucm_in(&corner, &["inspect", ID]));
    let said = String::from_utf8(output.stdout).unwrap();
    for part in ["16 slots", "free", "1 of 1 ranks attached", "true"] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

#[test]
fn inspect_shows_a_killed_rank_as_dead_with_its_pins() {
    let _with_others = shared();
    let corner = Corner::new();
    let config = corner.config(2, 16);
    corner.fill_backend(&config, 0..1);
    corner.store(&config).set_latency(Duration::from_secs(3600));
    let mut rank = RankProcess::start(&config, 1);
    rank.begin(Command::Load { blocks: vec![0], at: 0 });
    until("its loads are under way", || corner.look().1.loading == 4);
    rank.kill();
    let report = good(&run(&mut ucm_in(&corner, &["inspect", ID, "--json"])));
    let participants = report["participants"].as_array().unwrap();
    assert_eq!(participants.len(), 1);
    assert_eq!(participants[0]["alive"], false);
    assert!(participants[0]["pins"].as_u64().unwrap() >= 4);
    // With --audit that is a finding.
    let output = run(&mut ucm_in(&corner, &["inspect", ID, "--audit", "--json"]));
    refused(&output, 1, &["violations"]);
}

#[test]
fn inspect_of_an_unknown_segment_is_refused_with_its_path() {
    let corner = Corner::new();
    let output = run(&mut ucm_in(&corner, &["inspect", "nobody", "--json"]));
    refused(&output, 2, &["there is no segment", "ucm.nobody.ctrl", "check the id"]);
    let output = run(&mut ucm_in(&corner, &["inspect", "no/body"]));
    refused(&output, 2, &["no/body"]);
}

/// Actions by segment id.
fn actions(report: &Value) -> BTreeMap<String, String> {
    let text = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let rows = report["segments"].as_array().unwrap();
    rows.iter().map(|row| (text(row, "id"), text(row, "action"))).collect()
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|&(id, action)| (id.to_owned(), action.to_owned())).collect()
}

#[test]
fn gc_removes_what_is_dead_and_keeps_what_lives_or_is_meant_to_stay() {
    let _with_others = shared();
    let corner = Corner::new();
    let named = |id: &str| LoaderConfig { segment_id: id.to_owned(), ..corner.config(1, 16) };
    let dead = RankProcess::start(&named("dead"), 0);
    let mut live = RankProcess::start(&named("live"), 0);
    let kept = RankProcess::start(&LoaderConfig { persist: true, ..named("kept") }, 0);
    dead.kill();
    kept.leave();
    let before = corner.segment_files();
    assert_eq!(before.len(), 6, "{before:?}");

    let gc = |more: &[&str]| {
        let mut command = ucm_in(&corner, &["gc", "--json"]);
        good(&run(command.args(more)))
    };
    let dry = gc(&["--dry-run"]);
    let would = map(&[("dead", "would remove"), ("live", "keep"), ("kept", "keep")]);
    assert_eq!(actions(&dry), would);
    assert_eq!(numbers(&dry, ["removed", "removed_bytes", "failed"]), [0; 3]);
    assert_eq!(actions(&gc(&["--dry-run", "--all"]))["kept"], "would remove");
    assert_eq!(corner.segment_files(), before);

    let report = gc(&[]);
    let did = map(&[("dead", "removed"), ("live", "kept"), ("kept", "kept")]);
    assert_eq!(actions(&report), did);
    let [removed, bytes, failed] = numbers(&report, ["removed", "removed_bytes", "failed"]);
    assert!(removed == 1 && failed == 0 && bytes >= 16 * SHARD_BYTES, "{report}");
    assert!(corner.segment_files().iter().all(|name| !name.starts_with("ucm.dead.")));
    assert_eq!(corner.segment_files().len(), 4);

    assert_eq!(actions(&gc(&["--all"])), map(&[("live", "kept"), ("kept", "removed")]));
    let left = corner.segment_files();
    assert!(left.len() == 2 && left.iter().all(|name| name.starts_with("ucm.live.")), "{left:?}");
    // The one that lives did not notice.
    assert_eq!(live.ask(Command::Dump { blocks: vec![3], at: 0 }).failed_shards, 0);
    assert_eq!(live.ask(Command::Serve { blocks: vec![3], at: 8 }).verified_bytes, 4 * SHARD_BYTES);
    live.leave();
    assert_eq!(corner.segment_files(), [""; 0]);
}

#[test]
fn gc_of_an_empty_directory_finds_nothing_and_of_a_missing_one_says_so() {
    let corner = Corner::new();
    let report = good(&run(&mut ucm_in(&corner, &["gc", "--json"])));
    assert_eq!(report["segments"], serde_json::json!([]));
    let missing = corner.shm().join("missing");
    let mut command = crate::common::child::ucm(&["gc", "--shm-dir"]);
    refused(&run(command.arg(&missing)), 2, &["missing", "No such file"]);
}
