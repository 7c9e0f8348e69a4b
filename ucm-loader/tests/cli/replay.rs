//! `ucm replay`: generated and recorded traffic, against the model, and traces that are none.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;
use ucm_loader::replay::model::ReferenceModel;
use ucm_loader::replay::synthetic::{ChatConfig, ChatTraffic};
use ucm_loader::replay::trace::{TraceReader, TraceRequest};

use crate::common::Corner;
use crate::common::child::{good, refused, run};
use crate::machine::{assert_clean, fraction, numbers, shared, ucm_in};

const SHARDS_PER_BLOCK: u32 = 4;
const BLOCK_BYTES: u64 = 16_384;
const SLOT_BYTES: u64 = BLOCK_BYTES / SHARDS_PER_BLOCK as u64;

/// What must hold of every replay of `requests`.
#[track_caller]
fn assert_sound(report: &Value, requests: u64) {
    let wrong = ["duplicate_backend_loads", "mismatched_shards", "failed_shards", "leaked_pins"];
    assert_eq!(numbers(report, wrong), [0; 4]);
    let [seen, loads, unique, reloads] =
        numbers(report, ["requests", "backend_loads", "unique_loaded", "reloads_after_eviction"]);
    assert_eq!(seen, requests);
    assert_eq!(loads, unique + reloads);
    let [blocks, prefix, host] =
        numbers(report, ["blocks", "prefix_hit_blocks", "host_hit_blocks"]);
    assert!(host <= prefix && prefix <= blocks);
    let ratio = host as f64 / blocks as f64;
    assert!((fraction(report, "host_hit_ratio") - ratio).abs() < 1e-5);
    let [p50, p99] = numbers(report, ["load_us.p50", "load_us.p99"]);
    assert!(0 < p50 && p50 <= p99);
}

/// Every block that was found was loaded and compared by every rank.
#[track_caller]
fn assert_verified(report: &Value, ranks: u64) {
    let [prefix, verified] = numbers(report, ["prefix_hit_blocks", "verified_bytes"]);
    assert_eq!(verified, prefix * ranks * BLOCK_BYTES);
}

#[test]
fn generated_chat_is_replayed_without_a_duplicate_load_a_wrong_byte_or_a_leak() {
    let _with_others = shared();
    for concurrency in ["1", "8"] {
        let corner = Corner::new();
        let arguments = ["replay", "--synthetic", "chat", "--requests", "60", "--ranks", "3"];
        let mut command = ucm_in(&corner, &arguments);
        command.args(["--concurrency", concurrency, "--json"]);
        let report = good(&run(&mut command));
        assert_sound(&report, 60);
        assert_verified(&report, 3);
        assert_clean(&corner);
    }
}

#[test]
fn a_replay_over_the_memory_backend_is_sound_under_pressure() {
    let _with_others = shared();
    let corner = Corner::new();
    let arguments = ["replay", "--synthetic", "chat", "--requests", "60", "--ranks", "2"];
    let mut command = ucm_in(&corner, &arguments);
    // Sixteen slots for eight requests at a time.
    command.args(["--concurrency", "8", "--backend", "memory", "--capacity", "65536", "--json"]);
    let report = good(&run(&mut command));
    assert_sound(&report, 60);
    assert_verified(&report, 2);
    let [evictions, reloads] = numbers(&report, ["evictions", "reloads_after_eviction"]);
    assert!(evictions > 0 && reloads > 0);
    assert_clean(&corner);
}

fn write_trace(corner: &Corner, requests: &[TraceRequest]) -> PathBuf {
    let path = corner.dir("trace").join("trace.jsonl");
    let mut lines = String::new();
    for request in requests {
        writeln!(lines, "{}", serde_json::to_string(request).unwrap()).unwrap();
    }
    std::fs::write(&path, lines).unwrap();
    path
}

/// Replays `requests` with one in flight and holds the host hits against the model's.
#[track_caller]
fn assert_like_the_model(what: &str, requests: &[TraceRequest], ranks: u32) {
    let _with_others = shared();
    let corner = Corner::new();
    let trace = write_trace(&corner, requests);
    let unique: HashSet<_> = requests.iter().flat_map(|request| &request.hash_ids).collect();
    // 5 % of the blocks there are.
    let slots = unique.len() as u64 * u64::from(SHARDS_PER_BLOCK) / 20;
    let mut model = ReferenceModel::new(slots as usize, SHARDS_PER_BLOCK);
    let (mut host, mut prefix, mut blocks) = (0, 0, 0);
    for request in requests {
        let outcome = model.request(&request.hash_ids);
        host += outcome.host_hit_blocks;
        prefix += outcome.prefix_hit_blocks;
        blocks += request.hash_ids.len() as u64;
    }
    let mut command = ucm_in(&corner, &["replay", "--json"]);
    command.arg(&trace).args(["--ranks", &ranks.to_string()]);
    command.args(["--capacity", &(slots * SLOT_BYTES).to_string()]);
    let report = good(&run(&mut command));
    assert_sound(&report, requests.len() as u64);
    assert_eq!(numbers(&report, ["blocks", "prefix_hit_blocks"]), [blocks, prefix]);
    let (found, expected) = (fraction(&report, "host_hit_ratio"), host as f64 / blocks as f64);
    println!(
        "{what}, {ranks} ranks, {} requests, {blocks} blocks, {slots} slots: \
         host_hit_ratio {found:.5}, model {expected:.5}, difference {:+.5}",
        requests.len(),
        found - expected,
    );
    assert!(expected > 0.01, "the model has next to no hits: {expected}");
    assert!((found - expected).abs() <= 0.005, "{found} against the model's {expected}");
}

fn chat(requests: u64) -> Vec<TraceRequest> {
    ChatTraffic::new(ChatConfig { seed: 1, requests, ..ChatConfig::default() }).collect()
}

#[test]
fn generated_chat_hits_the_host_cache_as_often_as_the_model_with_one_rank() {
    assert_like_the_model("generated chat", &chat(400), 1);
}

#[test]
fn generated_chat_hits_the_host_cache_as_often_as_the_model_with_four_ranks() {
    assert_like_the_model("generated chat", &chat(1000), 4);
}

#[test]
fn recorded_traffic_hits_the_host_cache_as_often_as_the_model() {
    let trace =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces/conversation_trace.jsonl");
    match TraceReader::open(&trace) {
        Ok(reader) => {
            let requests: Vec<_> = reader.take(400).collect::<Result<_, _>>().unwrap();
            assert_like_the_model("recorded conversations", &requests, 2);
        }
        Err(error) => {
            println!("NO RECORDED TRACE ({error}): generated traffic was used instead");
            assert_like_the_model("generated chat", &chat(1000), 2);
        }
    }
}

/// Replays a file with this content, which must be refused.
#[track_caller]
fn assert_refused(content: &str, says: &[&str]) {
    let _with_others = shared();
    let corner = Corner::new();
    let path = corner.dir("trace").join("trace.jsonl");
    std::fs::write(&path, content).unwrap();
    let output = run(ucm_in(&corner, &["replay", "--json"]).arg(&path));
    refused(&output, 2, says);
    assert_eq!(output.stdout, b"");
    assert_clean(&corner);
}

const GOOD: &str =
    r#"{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}"#;

#[test]
fn a_truncated_trace_is_refused_with_the_line_where_it_ends() {
    let cut = format!("{GOOD}\n{GOOD}\n{}", &GOOD[..30]);
    assert_refused(&cut, &["trace.jsonl", "line 3", "truncated"]);
}

#[test]
fn a_malformed_line_is_refused_with_its_number() {
    let bad = format!("{GOOD}\n{{\"timestamp\": x}}\n{GOOD}\n");
    assert_refused(&bad, &["trace.jsonl", "line 2", "column 15"]);
}

#[test]
fn a_line_without_its_blocks_is_refused_with_its_number_and_the_missing_field() {
    let bad = format!("{}\n", GOOD.replace("hash_ids", "hashes"));
    assert_refused(&bad, &["line 1", "hash_ids"]);
}

#[test]
fn a_limit_stops_before_a_malformed_line() {
    let _with_others = shared();
    let corner = Corner::new();
    let path = corner.dir("trace").join("trace.jsonl");
    std::fs::write(&path, format!("{GOOD}\n{GOOD}\nnot a request\n")).unwrap();
    let mut command = ucm_in(&corner, &["replay", "--limit", "2", "--ranks", "2", "--json"]);
    let report = good(&run(command.arg(&path)));
    assert_eq!(numbers(&report, ["requests", "blocks", "prefix_hit_blocks"]), [2, 4, 2]);
}

#[test]
fn a_trace_that_is_not_there_and_no_trace_at_all_are_refused() {
    let corner = Corner::new();
    let output = run(&mut ucm_in(&corner, &["replay", "no-such-trace.jsonl"]));
    refused(&output, 2, &["no-such-trace.jsonl", "No such file"]);
    let output = run(&mut ucm_in(&corner, &["replay"]));
    refused(&output, 2, &["--synthetic chat"]);
}

#[test]
fn a_backend_directory_that_is_missing_is_refused_with_the_remedy() {
    let _with_others = shared();
    let corner = Corner::new();
    let missing = format!("posix:{}", corner.dir("x").join("missing").display());
    let arguments = ["replay", "--synthetic", "chat", "--requests", "2", "--ranks", "1"];
    let output = run(ucm_in(&corner, &arguments).args(["--backend", &missing]));
    refused(&output, 2, &["missing", "does not exist", "mkdir"]);
    assert_clean(&corner);
}
