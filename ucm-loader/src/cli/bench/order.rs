//! `ucm bench order`: natural against rotated order, with real rank processes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::backend::memory::MemoryStore;
use crate::backend::recorder::{EventKind, analyse, read_events};
use crate::cli::Failure;
use crate::cli::output;
use crate::cli::scratch::Scratch;
use crate::config::LoaderConfig;
use crate::rank::fleet::Fleet;
use crate::rank::protocol::{Command, Done, Setup};

/// Natural against rotated order: every rank loads the same shards at the same
/// time from a backend with a fixed latency.
///
/// In lock step (the default: each rank has one shard at a time that is not
/// READY yet) natural order keeps one load in flight, rotated order as many as
/// there are ranks. With --free ranks look ahead as they do in production.
/// Steps and loads in flight are counted from the recorded begin and end of
/// every load.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Rank processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=31))]
    ranks: u32,
    /// Shards that every rank loads
    #[arg(long, default_value_t = 12)]
    shards: u64,
    /// Latency of one load
    #[arg(long, default_value_t = 20)]
    load_ms: u64,
    /// Loads a rank's backend runs at a time
    #[arg(long, default_value_t = 4)]
    backend_workers: u32,
    /// Let ranks look ahead as in production
    #[arg(long)]
    free: bool,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

/// One order's figures.
#[derive(Serialize)]
struct Variant {
    order: &'static str,
    wall_ms: f64,
    ideal_ms: f64,
    wall_over_ideal: f64,
    steps: usize,
    peak_in_flight: u64,
    backend_loads: u64,
    duplicate_backend_loads: u64,
    loads_by_rank: Vec<u64>,
    owner_share_spread: f64,
    failed_shards: u64,
}

#[derive(Serialize)]
struct Report {
    ranks: u32,
    shards: u64,
    load_ms: u64,
    backend_workers: u32,
    lock_step: bool,
    natural: Variant,
    rotated: Variant,
    speedup: f64,
}

const SHARD_BYTES: u64 = 4096;
const SHARDS_PER_BLOCK: u32 = 1;
const SEED: u64 = 12;
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs it.
///
/// # Errors
/// [`Failure::Wrong`] when a shard was loaded twice or failed.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    crate::interrupt::watch()?;
    let natural = measure(arguments, false)?;
    let rotated = measure(arguments, true)?;
    let speedup = (natural.wall_ms / rotated.wall_ms * 100.0).round() / 100.0;
    let mut table = output::table([
        "order",
        "wall ms",
        "ideal ms",
        "ratio",
        "steps",
        "in flight",
        "loads by rank",
    ]);
    for v in [&natural, &rotated] {
        table.add_row([
            v.order.to_owned(),
            format!("{:.1}", v.wall_ms),
            format!("{:.1}", v.ideal_ms),
            format!("{:.2}", v.wall_over_ideal),
            v.steps.to_string(),
            v.peak_in_flight.to_string(),
            format!("{:?}", v.loads_by_rank),
        ]);
    }
    println!("{table}");
    let wrong = [&natural, &rotated].iter().any(|v| {
        v.duplicate_backend_loads > 0 || v.failed_shards > 0 || v.backend_loads != arguments.shards
    });
    if arguments.json {
        output::json(&Report {
            ranks: arguments.ranks,
            shards: arguments.shards,
            load_ms: arguments.load_ms,
            backend_workers: arguments.backend_workers,
            lock_step: !arguments.free,
            natural,
            rotated,
            speedup,
        })?;
    }
    if wrong {
        return Err(Failure::Wrong("a shard failed, or was not loaded exactly once".to_owned()));
    }
    Ok(())
}

fn measure(arguments: &Arguments, rotate: bool) -> Result<Variant, Failure> {
    let order = if rotate { "rotated" } else { "natural" };
    let _alive = output::spinner(format!("{order}: {} ranks", arguments.ranks));
    let scratch = Scratch::new(&arguments.shm_dir, "ucm-bench-")?;
    let blocks: Vec<u64> = (0..arguments.shards).collect();
    let ranks = arguments.ranks;
    let lock_step = !arguments.free;
    let config = LoaderConfig {
        segment_id: scratch.segment_id(),
        shm_dir: scratch.shm_dir(),
        // Ranks hold up to their share of slots at a time: room for all.
        capacity_bytes: (arguments.shards.max(64) * u64::from(ranks) + 64) * SHARD_BYTES,
        reserved_slots: Some(0),
        shard_bytes: SHARD_BYTES,
        block_bytes: SHARD_BYTES * u64::from(SHARDS_PER_BLOCK),
        local_rank_size: ranks,
        backend: "memory:bench".to_owned(),
        memory_backend_bytes: arguments.shards.max(1) * SHARD_BYTES * 2,
        backend_workers: arguments.backend_workers,
        claim_window: lock_step.then_some(1),
        lookahead: lock_step.then_some(1),
        rotate,
        ..LoaderConfig::default()
    };
    // Fill the backend by a rank of a cache that is gone when the next comes.
    let events = scratch.dir("events")?;
    let setup = Setup {
        config: LoaderConfig { local_rank_size: 1, ..config.clone() },
        events_dir: None,
        device_shards: arguments.shards,
        seed: SEED,
    };
    let filler = Fleet::start(1, &setup, PATIENCE)?;
    let filled = filler.all(|_| Command::Dump { blocks: blocks.clone(), at: 0 })?;
    let failed: u64 = filled.iter().map(|done| done.failed_shards).sum();
    filler.stop()?;
    if failed > 0 {
        return Err(Failure::Broken(format!("{failed} shards could not be put into the backend")));
    }
    let store = MemoryStore::open(&memory_options(&config)?)?;
    store.set_latency(Duration::from_millis(arguments.load_ms));

    let setup = Setup { config, events_dir: Some(events.clone()), ..setup };
    let fleet = Fleet::start(ranks, &setup, PATIENCE)?;
    let done = fleet.all(|_| Command::Load { blocks: blocks.clone(), at: 0 })?;
    let checked = fleet.all(|_| Command::Verify { blocks: blocks.clone(), at: 0 })?;
    fleet.stop()?;
    let recorded = read_events(&events)?;
    let analysis = analyse(&recorded);
    let mut by_rank: BTreeMap<u32, u64> = (0..ranks).map(|rank| (rank, 0)).collect();
    for event in recorded.iter().filter(|event| event.kind == EventKind::LoadStart) {
        *by_rank.entry(event.rank).or_default() += 1;
    }
    let loads_by_rank: Vec<u64> = by_rank.into_values().collect();
    let wall_ms = wall_ms(&done);
    let in_parallel = if lock_step {
        if rotate { ranks.into() } else { 1 }
    } else {
        u64::from(ranks * arguments.backend_workers)
    };
    let ideal_ms = (arguments.shards.div_ceil(in_parallel) * arguments.load_ms) as f64;
    Ok(Variant {
        order,
        wall_ms,
        ideal_ms,
        wall_over_ideal: (wall_ms / ideal_ms * 1000.0).round() / 1000.0,
        steps: analysis.steps.len(),
        peak_in_flight: analysis.peak_in_flight,
        backend_loads: analysis.backend_loads,
        duplicate_backend_loads: analysis.duplicate_backend_loads,
        owner_share_spread: spread(&loads_by_rank),
        loads_by_rank,
        failed_shards: done.iter().map(|d| d.failed_shards).sum::<u64>()
            + checked.iter().map(|d| d.mismatched_shards).sum::<u64>(),
    })
}

fn memory_options(config: &LoaderConfig) -> Result<crate::backend::memory::MemoryOptions, Failure> {
    crate::backend::open::memory_options(&config.clone().check()?)
        .ok_or_else(|| Failure::Broken("the bench uses the memory backend".to_owned()))
}

fn wall_ms(done: &[Done]) -> f64 {
    let began = done.iter().map(|d| d.began_ns).min().unwrap_or(0);
    let ended = done.iter().map(|d| d.ended_ns).max().unwrap_or(0);
    (ended.saturating_sub(began) as f64 / 1e4).round() / 100.0
}

/// How far the largest and the smallest share are apart, in parts of the mean.
fn spread(shares: &[u64]) -> f64 {
    let (min, max) = (shares.iter().min(), shares.iter().max());
    let total: u64 = shares.iter().sum();
    match (min, max) {
        (Some(min), Some(max)) if total > 0 => {
            let mean = total as f64 / shares.len() as f64;
            ((max - min) as f64 / mean * 1000.0).round() / 1000.0
        }
        _ => 0.0,
    }
}
