//! Bad arguments, too little room, and what --help says.

use std::path::Path;
use std::process::Command;

use crate::common::Corner;
use crate::common::child::{refused, run, ucm, words};
use crate::machine::{assert_clean, shared, ucm_in};

#[track_caller]
fn assert_refused(arguments: &[&str], says: &[&str]) {
    let _with_others = shared();
    let corner = Corner::new();
    let output = run(&mut ucm_in(&corner, arguments));
    refused(&output, 2, says);
    assert_clean(&corner);
}

#[test]
fn shards_that_do_not_fill_their_blocks_are_refused_with_both_numbers() {
    let arguments = ["demo", "--shards", "7", "--shards-per-block", "2"];
    assert_refused(&arguments, &["--shards 7", "--shards-per-block 2"]);
    assert_refused(&["demo", "--shards", "0"], &["--shards 0"]);
    assert_refused(&["demo", "--shards-per-block", "0"], &["--shards-per-block 0"]);
}

#[test]
fn a_shard_of_no_bytes_is_refused_with_the_least_that_works() {
    let arguments = ["demo", "--ranks", "1", "--shard-bytes", "0"];
    assert_refused(&arguments, &["shard_bytes = 0", "minimum of 8"]);
}

#[test]
fn a_size_beyond_all_memory_is_refused_and_does_not_overflow() {
    let arguments =
        ["demo", "--ranks", "1", "--shards", "18446744073709551608", "--shard-bytes", "4096"];
    assert_refused(&arguments, &["capacity_bytes", "outside"]);
    let most = u64::MAX.to_string();
    assert_refused(&["demo", "--ranks", "1", "--shard-bytes", &most], &["shard_bytes", "outside"]);
    let replay = ["replay", "--synthetic", "chat", "--requests", "2", "--shards-per-block", "1"];
    let replay = [&replay[..], &["--block-bytes", &most]].concat();
    assert_refused(&replay, &["shard_bytes", "outside"]);
}

#[test]
fn a_number_of_ranks_that_cannot_be_is_refused_with_the_limits() {
    assert_refused(&["demo", "--ranks", "0"], &["--ranks", "1..=31"]);
    assert_refused(&["replay", "--ranks", "32", "--synthetic", "chat"], &["32", "1..=31"]);
}

#[test]
fn blocks_that_do_not_divide_into_shards_are_refused_with_both_numbers() {
    let arguments = ["replay", "--synthetic", "chat", "--requests", "2", "--block-bytes", "1000"];
    let arguments = [&arguments[..], &["--shards-per-block", "3"]].concat();
    assert_refused(&arguments, &["--block-bytes 1000", "--shards-per-block 3"]);
}

#[test]
fn a_capacity_below_one_slot_for_each_rank_is_refused_with_the_bytes_needed() {
    let arguments = ["replay", "--synthetic", "chat", "--requests", "2", "--ranks", "4"];
    let arguments = [&arguments[..], &["--capacity", "12288"]].concat();
    assert_refused(&arguments, &["capacity_bytes = 12288", "16384"]);
}

#[test]
fn a_directory_for_shared_memory_that_is_not_there_is_refused_by_name() {
    let output = run(&mut ucm(&["demo", "--ranks", "1", "--shm-dir", "/no-such-place"]));
    refused(&output, 2, &["/no-such-place", "No such file"]);
}

/// A small file system in memory. Unmounted at the end.
struct SmallFileSystem<'a>(&'a Path);

impl<'a> SmallFileSystem<'a> {
    fn mount(at: &'a Path, size: &str) -> Result<Self, String> {
        let options = format!("size={size}");
        let mount = ["-t", "tmpfs", "-o", &options, "ucm-test"];
        let output = Command::new("mount").args(mount).arg(at).output();
        match output {
            Ok(output) if output.status.success() => Ok(Self(at)),
            Ok(output) => Err(words(&output)),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl Drop for SmallFileSystem<'_> {
    fn drop(&mut self) {
        let _best_effort = Command::new("umount").arg(self.0).status();
    }
}

#[test]
fn too_small_a_file_system_for_shared_memory_is_refused_with_both_sizes_and_the_remedy() {
    let _with_others = shared();
    let corner = Corner::new();
    let small = match SmallFileSystem::mount(corner.shm(), "8m") {
        Ok(small) => small,
        Err(reason) => {
            println!("SKIPPED: no file system can be mounted here: {reason}");
            return;
        }
    };
    // The ranks' channels fit, the segment does not.
    let arguments = ["demo", "--ranks", "2", "--shards", "256", "--shard-bytes", "65536"];
    let output = run(&mut ucm_in(&corner, &arguments));
    refused(&output, 2, &["bytes free", "are needed", "--shm-size", "lower the capacity"]);
    let said = words(&output);
    let number_before = |part: &str| -> u64 {
        let before = said.split_once(part).unwrap().0;
        before.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let (free, needed) = (number_before(" bytes free"), number_before(" are needed"));
    assert!(free <= 8 << 20 && needed >= 256 * 65_536, "{free} and {needed}");
    println!("refused with {free} bytes free and {needed} needed");
    assert_clean(&corner);
    drop(small);
}

#[test]
fn the_help_of_every_subcommand_says_what_it_does() {
    let helps: [(&[&str], &[&str]); 8] = [
        (&[], &["KV cache", "demo", "replay", "bench", "inspect", "gc", "needs no configuration"]),
        (&["demo"], &["and verify every byte", "--corrupt-one", "--json", "cold load"]),
        (&["replay"], &["Mooncake", "hash_ids", "--synthetic", "--concurrency", "--json"]),
        (&["bench"], &["order", "wait", "Yield-spin against futex"]),
        (&["bench", "order"], &["Natural against rotated order", "--load-ms", "--json"]),
        (&["bench", "wait"], &["Yield-spin against futex", "CPU time", "--json"]),
        (&["inspect"], &["slots by state", "read-only", "--audit", "--json"]),
        (&["gc"], &["Remove segments", "--dry-run", "--all", "--json"]),
    ];
    for (subcommand, says) in helps {
        let output = run(ucm(subcommand).arg("--help"));
        assert!(output.status.success());
        // Lines are broken where the terminal ends.
        let said = String::from_utf8(output.stdout).unwrap();
        let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in says {
            assert!(said.contains(part), "{subcommand:?}: {part:?} is not in: {said}");
        }
        assert!(!said.contains("rank-process"), "{subcommand:?} tells of what is not for people");
    }
}

#[test]
fn what_is_no_subcommand_is_refused() {
    refused(&run(&mut ucm(&["dmeo"])), 2, &["dmeo", "demo"]);
    refused(&run(&mut ucm(&[])), 2, &["Usage"]);
}
