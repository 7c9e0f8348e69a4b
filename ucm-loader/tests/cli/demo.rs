//! `ucm demo`: every figure, a wrong byte, and Ctrl-C.

use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::common::child::{end, good, report, run, words};
use crate::common::{Corner, files_of, until};
use crate::machine::{assert_clean, fraction, numbers, shared, ucm_in};

const RANKS: u64 = 3;
const SHARDS: u64 = 64;
const SHARD_BYTES: u64 = 65_536;
const SMALL: [&str; 8] =
    ["demo", "--ranks", "3", "--shards", "64", "--shard-bytes", "65536", "--json"];

#[test]
fn the_demo_loads_each_shard_once_verifies_every_byte_and_leaves_nothing() {
    let _with_others = shared();
    let corner = Corner::new();
    let report = good(&run(&mut ucm_in(&corner, &SMALL)));
    assert_eq!(numbers(&report, ["ranks", "shards", "shard_bytes"]), [RANKS, SHARDS, SHARD_BYTES]);
    let dump = ["phases.dump.stored_shards", "phases.dump.d2h_bytes"];
    assert_eq!(numbers(&report, dump), [SHARDS, SHARDS * SHARD_BYTES]);
    let loads = ["phases.cold.backend_loads", "phases.hot.backend_loads"];
    assert_eq!(numbers(&report, loads), [SHARDS, 0]);
    let copied = ["phases.cold.h2d_bytes", "phases.hot.h2d_bytes"];
    assert_eq!(numbers(&report, copied), [RANKS * SHARDS * SHARD_BYTES; 2]);
    let peaks = ["phases.cold.peak_backend_in_flight", "phases.hot.peak_backend_in_flight"];
    let [cold, hot] = numbers(&report, peaks);
    assert!(cold >= 1 && hot == 0, "{cold} and {hot} loads in flight");
    assert_eq!(numbers(&report, ["verified_bytes"]), [2 * RANKS * SHARDS * SHARD_BYTES]);
    let wrong = ["mismatched_shards", "leaked_pins", "leftover_files"];
    assert_eq!(numbers(&report, wrong), [0; 3]);
    for phase in ["dump", "cold", "hot"] {
        assert!(fraction(&report, &format!("phases.{phase}.wall_s")) > 0.0);
        assert!(fraction(&report, &format!("phases.{phase}.gb_per_s")) > 0.0);
    }
    assert!(fraction(&report, "phases.cold.waiter_cpu_s") >= 0.0);
    assert_clean(&corner);
}

#[test]
fn the_demo_of_one_rank_and_small_shards_verifies_every_byte_too() {
    let _with_others = shared();
    let corner = Corner::new();
    let small = ["demo", "--ranks", "1", "--shards", "2000", "--shard-bytes", "512", "--json"];
    let report = good(&run(&mut ucm_in(&corner, &small)));
    assert_eq!(numbers(&report, ["verified_bytes"]), [2 * 2000 * 512]);
    let loads = ["phases.cold.backend_loads", "phases.hot.backend_loads"];
    assert_eq!(numbers(&report, loads), [2000, 0]);
    assert_clean(&corner);
}

#[test]
fn one_flipped_bit_makes_the_demo_fail_and_name_what_is_wrong() {
    let _with_others = shared();
    let corner = Corner::new();
    let output = run(ucm_in(&corner, &SMALL).arg("--corrupt-one"));
    assert_eq!(output.status.code(), Some(1), "{}", words(&output));
    let report = report(&output);
    let [mismatched, verified] = numbers(&report, ["mismatched_shards", "verified_bytes"]);
    assert!(mismatched > 0);
    assert!(verified < 2 * RANKS * SHARDS * SHARD_BYTES);
    // Whatever is not right was not delivered as if it were.
    assert_eq!(verified + mismatched * SHARD_BYTES, 2 * RANKS * SHARDS * SHARD_BYTES);
    assert!(words(&output).contains("mismatched_shards is"), "{}", words(&output));
    assert_eq!(numbers(&report, ["leaked_pins", "leftover_files"]), [0, 0]);
    assert_clean(&corner);
}

#[test]
fn without_json_the_demo_prints_a_table_for_people() {
    let _with_others = shared();
    let corner = Corner::new();
    let output = run(&mut ucm_in(&corner, &SMALL[..7]));
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    let said = String::from_utf8(output.stdout).unwrap();
    for part in ["phase", "dump", "cold", "hot", "compared and right, 0 shards wrong"] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

/// Processes whose parent is `parent`.
fn children_of(parent: u32) -> Vec<u32> {
    let parent_of = |pid: u32| -> Option<u32> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // After the name, which may contain anything: state, parent.
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    let pids = std::fs::read_dir("/proc").unwrap();
    pids.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
        .filter(|&pid| parent_of(pid) == Some(parent))
        .collect()
}

/// Segments in the run's private directory of shared memory.
fn segments(corner: &Corner) -> usize {
    files_of(corner.shm()).iter().map(|dir| files_of(&corner.shm().join(dir)).len()).sum()
}

/// A demo in a process group of its own, interrupted when its ranks are at work.
fn interrupted(send: impl Fn(&Child)) {
    let corner = Corner::new();
    let large = ["demo", "--ranks", "3", "--shards", "32768", "--shard-bytes", "4096"];
    let mut command = ucm_in(&corner, &large);
    command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    until("its segment is there", || segments(&corner) > 0);
    let ranks = children_of(child.id());
    assert!(!ranks.is_empty());
    send(&child);
    let output = end(child);
    assert_eq!(output.status.code(), Some(130), "{}", words(&output));
    assert!(words(&output).contains("interrupted"), "{}", words(&output));
    for rank in ranks {
        assert!(!std::path::Path::new(&format!("/proc/{rank}")).exists(), "rank {rank} lives");
    }
    assert_clean(&corner);
}

#[test]
fn an_interrupted_demo_leaves_no_file_and_no_process() {
    let _with_others = shared();
    interrupted(|child| kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap());
}

#[test]
fn ctrl_c_which_reaches_every_process_of_a_demo_leaves_no_file_and_no_process() {
    let _with_others = shared();
    interrupted(|child| killpg(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap());
}

#[test]
fn a_terminated_demo_leaves_no_file_and_no_process() {
    let _with_others = shared();
    interrupted(|child| kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap());
}
