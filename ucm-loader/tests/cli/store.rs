//! `ucm store` and `ucm bench store`, on real block files.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use ucm_core::key::{BlockId, ShardKey};
use ucm_loader::backend::StoreGeometry;
use ucm_loader::backend::file::{FileOptions, FileStore};
use ucm_loader::backend::threaded::BlockingStore;
use xxhash_rust::xxh3::xxh3_64;

use crate::common::child::{good, refused, report, run, ucm};
use crate::common::{Corner, files_of};
use crate::machine::{alone, fraction, numbers, shared};

const GEOMETRY: StoreGeometry =
    StoreGeometry { shard_bytes: 4096, shards_per_block: 2, content_tag: 0x77 };

/// A store with so many blocks, and the path of the first.
fn store_of(corner: &Corner, blocks: u64) -> (PathBuf, PathBuf) {
    let dir = corner.dir("store");
    let store = FileStore::open(&FileOptions::new(&dir, GEOMETRY)).unwrap();
    for number in 0..blocks {
        for shard in 0..2 {
            let bytes = vec![number as u8; 4096];
            let key = ShardKey::new(BlockId::from_words(number, number), shard);
            store.store(key, &bytes, Some(xxh3_64(&bytes))).unwrap();
        }
    }
    (dir, store.block_path(&BlockId::from_words(0, 0)))
}

fn tool(verb: &str, dir: &PathBuf, rest: &[&str]) -> Command {
    let mut command = ucm(&["store", verb]);
    command.arg(dir).args(rest).arg("--json");
    command
}

#[test]
fn du_and_gc_say_what_there_is_and_what_went() {
    let _with_others = shared();
    let corner = Corner::new();
    let (dir, _) = store_of(&corner, 6);
    let before = good(&run(&mut tool("du", &dir, &[])));
    let counts = ["shard_bytes", "shards_per_block", "blocks", "unfinished", "bad", "foreign"];
    assert_eq!(numbers(&before, counts), [4096, 2, 6, 0, 0, 0]);
    let [bytes] = numbers(&before, ["block_bytes"]);
    let half = (bytes / 2).to_string();
    let gone = good(&run(&mut tool("gc", &dir, &["--limit-bytes", &half])));
    assert_eq!(
        numbers(&gone, ["before_bytes", "after_bytes", "removed_blocks"]),
        [bytes, bytes / 2, 3]
    );
    let after = good(&run(&mut tool("du", &dir, &[])));
    assert_eq!(numbers(&after, ["blocks", "block_bytes"]), [3, bytes / 2]);
}

#[test]
fn verify_ends_well_on_a_good_store_and_names_the_file_on_a_bad_one() {
    let _with_others = shared();
    let corner = Corner::new();
    let (dir, first) = store_of(&corner, 4);
    let verified = good(&run(&mut tool("verify", &dir, &[])));
    assert_eq!(numbers(&verified, ["files", "bytes", "wrong"]), [4, 32768, 0]);
    let mut bytes = fs::read(&first).unwrap();
    bytes[5000] ^= 4;
    fs::write(&first, bytes).unwrap();
    let output = run(&mut tool("verify", &dir, &[]));
    assert_eq!(output.status.code(), Some(1));
    let found = report(&output);
    assert_eq!(numbers(&found, ["files", "wrong"]), [4, 1]);
    assert_eq!(found["findings"][0]["path"], first.display().to_string());
    assert!(found["findings"][0]["problem"].as_str().unwrap().contains("shard 0"), "{found}");
}

#[test]
fn what_is_no_store_is_refused_and_stays_as_it_is() {
    let _with_others = shared();
    let corner = Corner::new();
    let dir = corner.dir("empty");
    for verb in ["du", "verify"] {
        refused(&run(&mut tool(verb, &dir, &[])), 2, &["store.toml"]);
    }
    refused(&run(&mut tool("gc", &dir, &["--limit-bytes", "1"])), 2, &["store.toml"]);
    assert_eq!(files_of(&dir), [""; 0]);
}

#[test]
fn the_bench_measures_every_engine_beside_bare_reads() {
    let _without_others = alone();
    let corner = Corner::new();
    let size = ["--blocks", "16", "--shards-per-block", "2", "--shard-bytes", "9000"];
    let mut command = ucm(&["bench", "store", "--threads", "1,2", "--json"]);
    command.args(size).env("TMPDIR", corner.dir("tmp"));
    let output = run(&mut command);
    if output.status.code() == Some(2) {
        refused(&output, 2, &["io_uring"]);
        println!("SKIPPED: no io_uring here");
        return;
    }
    let report = good(&output);
    assert_eq!(numbers(&report, ["blocks", "shard_bytes"]), [16, 9000]);
    assert_eq!(report["rows"].as_array().unwrap().len(), 10);
    for row in 0..10 {
        assert!(fraction(&report, &format!("rows.{row}.gb_per_s")) > 0.0, "{report}");
    }
    assert_eq!(files_of(&corner.dir("tmp")), [""; 0]);
}
