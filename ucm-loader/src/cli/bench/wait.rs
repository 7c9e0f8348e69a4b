//! `ucm bench wait`: yield-spin against futex, with real rank processes.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::backend::memory::MemoryStore;
use crate::cli::Failure;
use crate::cli::output;
use crate::cli::scratch::Scratch;
use crate::config::{LoaderConfig, WaitMode};
use crate::rank::fleet::Fleet;
use crate::rank::protocol::{Command, Setup};

/// Yield-spin against futex: every rank loads the same shards, one at a time,
/// from a slow backend, so at any moment one rank loads and all the others wait.
///
/// Counts the CPU time that the ranks' transfer threads spend on waiting.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Rank processes
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=31))]
    ranks: u32,
    /// Shards that every rank loads
    #[arg(long, default_value_t = 60)]
    shards: u64,
    /// Latency of one load
    #[arg(long, default_value_t = 5)]
    load_ms: u64,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Variant {
    wait: &'static str,
    wall_ms: f64,
    wall_over_ideal: f64,
    waiter_cpu_s: f64,
    waiter_cpu_share: f64,
    failed_shards: u64,
}

#[derive(Serialize)]
struct Report {
    ranks: u32,
    shards: u64,
    load_ms: u64,
    ideal_ms: u64,
    yield_spin: Variant,
    futex: Variant,
    cpu_ratio: f64,
}

const SHARD_BYTES: u64 = 4096;
const SEED: u64 = 10;
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs it.
///
/// # Errors
/// [`Failure::Wrong`] when a shard failed.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    crate::interrupt::watch()?;
    let yield_spin = measure(arguments, WaitMode::Yield)?;
    let futex = measure(arguments, WaitMode::Futex)?;
    let mut table =
        output::table(["wait", "wall ms", "of ideal", "waiter CPU s", "of a core, per waiter"]);
    for v in [&yield_spin, &futex] {
        table.add_row([
            v.wait.to_owned(),
            format!("{:.1}", v.wall_ms),
            format!("{:.2}", v.wall_over_ideal),
            format!("{:.4}", v.waiter_cpu_s),
            format!("{:.2} %", v.waiter_cpu_share * 100.0),
        ]);
    }
    println!("{table}");
    let failed = yield_spin.failed_shards + futex.failed_shards;
    if arguments.json {
        let cpu_ratio = yield_spin.waiter_cpu_s / futex.waiter_cpu_s.max(1e-6);
        output::json(&Report {
            ranks: arguments.ranks,
            shards: arguments.shards,
            load_ms: arguments.load_ms,
            ideal_ms: arguments.shards * arguments.load_ms,
            cpu_ratio: (cpu_ratio * 10.0).round() / 10.0,
            yield_spin,
            futex,
        })?;
    }
    if failed > 0 { Err(Failure::Wrong(format!("{failed} shards failed"))) } else { Ok(()) }
}

fn measure(arguments: &Arguments, wait_mode: WaitMode) -> Result<Variant, Failure> {
    let name = match wait_mode {
        WaitMode::Yield => "yield-spin",
        WaitMode::Futex => "futex",
    };
    let _alive = output::spinner(format!("{name}: {} ranks", arguments.ranks));
    let scratch = Scratch::new(&arguments.shm_dir, "ucm-bench-")?;
    let blocks: Vec<u64> = (0..arguments.shards).collect();
    let config = LoaderConfig {
        segment_id: scratch.segment_id(),
        shm_dir: scratch.shm_dir(),
        capacity_bytes: (arguments.shards + 1) * SHARD_BYTES * u64::from(arguments.ranks),
        reserved_slots: Some(0),
        shard_bytes: SHARD_BYTES,
        block_bytes: SHARD_BYTES,
        local_rank_size: arguments.ranks,
        backend: "memory:bench".to_owned(),
        memory_backend_bytes: arguments.shards.max(1) * SHARD_BYTES * 2,
        // One after the other, in the same order: one loads, the rest wait.
        claim_window: Some(1),
        lookahead: Some(1),
        rotate: false,
        wait_mode,
        ..LoaderConfig::default()
    };
    let setup = Setup {
        config: LoaderConfig { local_rank_size: 1, ..config.clone() },
        events_dir: None,
        device_shards: arguments.shards,
        seed: SEED,
    };
    let filler = Fleet::start(1, &setup, PATIENCE)?;
    filler.all(|_| Command::Dump { blocks: blocks.clone(), at: 0 })?;
    filler.stop()?;
    let options = crate::backend::open::memory_options(&config.clone().check()?)
        .ok_or_else(|| Failure::Broken("the bench uses the memory backend".to_owned()))?;
    MemoryStore::open(&options)?.set_latency(Duration::from_millis(arguments.load_ms));

    let fleet = Fleet::start(arguments.ranks, &Setup { config, ..setup }, PATIENCE)?;
    let before = fleet.metrics()?;
    let done = fleet.all(|_| Command::Load { blocks: blocks.clone(), at: 0 })?;
    let after = fleet.metrics()?;
    fleet.stop()?;
    let began = done.iter().map(|d| d.began_ns).min().unwrap_or(0);
    let ended = done.iter().map(|d| d.ended_ns).max().unwrap_or(0);
    let wall_ns = ended.saturating_sub(began);
    let waited: Vec<_> = after.iter().zip(&before).map(|(now, then)| now.since(then)).collect();
    let cpu_ns: u64 = waited.iter().map(|m| m.wait_cpu_ns).sum();
    let waiting_ns: u64 = waited.iter().map(|m| m.wait_wall_ns).sum();
    let ideal_ms = (arguments.shards * arguments.load_ms) as f64;
    Ok(Variant {
        wait: name,
        wall_ms: (wall_ns as f64 / 1e4).round() / 100.0,
        wall_over_ideal: (wall_ns as f64 / 1e6 / ideal_ms * 1000.0).round() / 1000.0,
        waiter_cpu_s: output::seconds(cpu_ns),
        waiter_cpu_share: (cpu_ns as f64 / waiting_ns.max(1) as f64 * 1e5).round() / 1e5,
        failed_shards: done.iter().map(|d| d.failed_shards).sum(),
    })
}
