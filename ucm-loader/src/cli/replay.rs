//! `ucm replay`: real requests through real rank processes, every byte checked.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;
use ucm_core::key::BlockId;
use ucm_core::limits::MAX_SHARD_BYTES;
use ucm_core::segment::geometry::SlotStride;
use ucm_posix::Segment;

use crate::backend::recorder::{LoadAnalysis, analyse, read_events};
use crate::backend::traits::Backend;
use crate::cli::Failure;
use crate::cli::output;
use crate::cli::scratch::Scratch;
use crate::config::LoaderConfig;
use crate::engine::prefix;
use crate::rank::fleet::{Fleet, FleetError};
use crate::rank::protocol::{Command, Done, Setup};
use crate::replay::synthetic::{ChatConfig, ChatTraffic};
use crate::replay::trace::{TraceReader, block_id};

/// Replay requests through N rank processes that share one cache.
///
/// The format is Mooncake's: one JSON object a line with `timestamp` (ms),
/// `input_length`, `output_length` (tokens) and `hash_ids` (one per block of
/// 512 tokens; equal ids are equal prefixes). For each request: the longest
/// prefix over cache and backend is looked up, every rank loads those blocks
/// and compares every byte, and the rest is generated and dumped, each block
/// by one rank. Timestamps are not waited for.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// The trace; without one, --synthetic
    trace: Option<PathBuf>,
    /// Generate the traffic instead
    #[arg(long, conflicts_with = "trace")]
    synthetic: Option<Traffic>,
    /// Rank processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=31))]
    ranks: u32,
    /// Bytes of a block
    #[arg(long, default_value_t = 16_384)]
    block_bytes: u64,
    /// Shards of a block
    #[arg(long, default_value_t = 4)]
    shards_per_block: u32,
    /// Bytes of host cache; by default 5 % of what the trace's blocks take
    #[arg(long)]
    capacity: Option<u64>,
    /// `memory`, or `posix:DIR` (an empty directory); by default block files
    /// in a temporary directory
    #[arg(long)]
    backend: Option<String>,
    /// Requests in flight at a time
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    concurrency: u32,
    /// Only the first K requests
    #[arg(long)]
    limit: Option<usize>,
    /// Requests to generate (with --synthetic)
    #[arg(long, default_value_t = 1000)]
    requests: u64,
    /// Seed of the generated traffic, and of block ids and contents
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

/// Traffic that can be generated.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Traffic {
    /// Multi-turn chat: sessions that come back with a longer prompt, system
    /// prompts of Zipf popularity
    Chat,
}

#[derive(Serialize)]
struct LoadTimes {
    p50: u64,
    p99: u64,
}

#[derive(Serialize)]
struct Report {
    requests: usize,
    blocks: u64,
    prefix_hit_blocks: u64,
    host_hit_blocks: u64,
    host_hit_ratio: f64,
    backend_loads: u64,
    unique_loaded: u64,
    reloads_after_eviction: u64,
    duplicate_backend_loads: u64,
    evictions: u64,
    load_us: LoadTimes,
    verified_bytes: u64,
    mismatched_shards: u64,
    failed_shards: u64,
    leaked_pins: u64,
    wall_s: f64,
}

const PATIENCE: Duration = Duration::from_secs(300);
/// Blocks a request's lane on a device has room for; longer requests are
/// served in pieces.
const LANE_BLOCKS: usize = 256;

/// Runs it.
///
/// # Errors
/// [`Failure::Wrong`] when a byte or a count is not as it must be.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    crate::interrupt::watch()?;
    let requests = read_requests(arguments)?;
    let scratch = Scratch::new(&arguments.shm_dir, "ucm-replay-")?;
    let replay = Replay::start(arguments, &scratch, &requests)?;
    let began = Instant::now();
    replay.serve_all(&requests)?;
    let wall = began.elapsed();
    let report = replay.finish(&requests, wall)?;
    print(&report);
    if arguments.json {
        output::json(&report)?;
    }
    report.verdict()
}

fn read_requests(arguments: &Arguments) -> Result<Vec<Vec<u64>>, Failure> {
    let limit = arguments.limit.unwrap_or(usize::MAX);
    match (&arguments.trace, arguments.synthetic) {
        (Some(path), _) => TraceReader::open(path)
            .map_err(|error| Failure::Broken(format!("{}: {error}", path.display())))?
            .take(limit)
            .map(|request| request.map(|request| request.hash_ids))
            .collect::<Result<_, _>>()
            .map_err(|error| Failure::Broken(format!("{}, {error}", path.display()))),
        (None, Some(Traffic::Chat)) => {
            let config = ChatConfig {
                seed: arguments.seed,
                requests: arguments.requests,
                ..ChatConfig::default()
            };
            Ok(ChatTraffic::new(config).take(limit).map(|request| request.hash_ids).collect())
        }
        (None, None) => {
            Err(Failure::Broken("name a trace file, or generate traffic: --synthetic chat".into()))
        }
    }
}

#[derive(Default)]
struct Tally {
    prefix_hit_blocks: u64,
    host_hit_blocks: u64,
    verified_bytes: u64,
    mismatched_shards: u64,
    failed_shards: u64,
    load_ns: Vec<u64>,
    reasons: Vec<String>,
}

impl Tally {
    fn add(&mut self, done: &Done) {
        self.verified_bytes += done.verified_bytes;
        self.mismatched_shards += done.mismatched_shards;
        self.failed_shards += done.failed_shards;
        self.reasons.extend(done.reasons.iter().take(4).cloned());
    }
}

struct Replay<'a> {
    arguments: &'a Arguments,
    fleet: Fleet,
    /// The scheduler's view: the control plane, and what the backend has.
    segment: Segment,
    backend: Arc<dyn Backend>,
    events: PathBuf,
    /// Blocks that some request is dumping: a scheduler does not have the
    /// same prefix computed twice at a time.
    dumping: Mutex<HashSet<u64>>,
    tally: Mutex<Tally>,
}

impl<'a> Replay<'a> {
    fn start(
        arguments: &'a Arguments,
        scratch: &Scratch,
        requests: &[Vec<u64>],
    ) -> Result<Self, Failure> {
        let unique = requests.iter().flatten().collect::<HashSet<_>>().len() as u64;
        let config = config(arguments, scratch, unique)?;
        let checked = config.clone().check()?;
        let events = scratch.dir("events")?;
        let lanes = u64::from(arguments.concurrency);
        let lane_shards = LANE_BLOCKS as u64 * u64::from(arguments.shards_per_block);
        let setup = Setup {
            config,
            events_dir: Some(events.clone()),
            device_shards: lanes * lane_shards,
            seed: arguments.seed,
        };
        let fleet = {
            let _alive = output::spinner(format!("start: {} ranks", arguments.ranks));
            Fleet::start(arguments.ranks, &setup, PATIENCE)?
        };
        Ok(Self {
            arguments,
            fleet,
            segment: scratch.segment()?,
            backend: crate::backend::open::open(&checked, None)?,
            events,
            dumping: Mutex::default(),
            tally: Mutex::default(),
        })
    }

    fn serve_all(&self, requests: &[Vec<u64>]) -> Result<(), Failure> {
        let bar = output::progress(requests.len() as u64, "requests");
        let next = AtomicUsize::new(0);
        let lane = |number: u64| -> Result<(), Failure> {
            while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.serve(request, number)?;
                bar.inc(1);
            }
            Ok(())
        };
        let result = std::thread::scope(|scope| {
            let lanes: Vec<_> = (0..u64::from(self.arguments.concurrency))
                .map(|number| scope.spawn(move || lane(number)))
                .collect();
            let mut result = Ok(());
            for handle in lanes {
                match handle.join() {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => {
                        // The others find nothing more to do.
                        next.store(requests.len(), Ordering::Relaxed);
                        result = Err(error);
                    }
                    Err(_) => result = Err(Failure::Broken("a replay thread panicked".into())),
                }
            }
            result
        });
        bar.finish_and_clear();
        result
    }

    /// One request, as a scheduler and its workers would.
    fn serve(&self, request: &[u64], lane: u64) -> Result<(), Failure> {
        let ids: Vec<BlockId> =
            request.iter().map(|&number| block_id(self.arguments.seed, number)).collect();
        let found = prefix(&self.segment.plane(), &*self.backend, &ids)?;
        let (known, new) = request.split_at(found.found_blocks);
        {
            let mut tally = lock(&self.tally);
            tally.prefix_hit_blocks += found.found_blocks as u64;
            tally.host_hit_blocks += found.ready_blocks as u64;
        }
        let at = lane * LANE_BLOCKS as u64 * u64::from(self.arguments.shards_per_block);
        for piece in known.chunks(LANE_BLOCKS) {
            let done = self.fleet.all(|_| Command::Serve { blocks: piece.to_vec(), at })?;
            let mut tally = lock(&self.tally);
            for done in done {
                tally.add(&done);
                tally.load_ns.push(done.ended_ns - done.began_ns);
            }
        }
        let mine: Vec<u64> = {
            let mut dumping = lock(&self.dumping);
            new.iter().copied().filter(|&number| dumping.insert(number)).collect()
        };
        let result = mine.chunks(LANE_BLOCKS).try_for_each(|piece| self.dump(piece, at));
        let mut dumping = lock(&self.dumping);
        mine.iter().for_each(|number| {
            dumping.remove(number);
        });
        Ok(result?)
    }

    /// Dumps `blocks`, each by one rank.
    fn dump(&self, blocks: &[u64], at: u64) -> Result<(), FleetError> {
        let ranks = self.arguments.ranks as usize;
        let done = self.fleet.all(|rank| Command::Dump {
            blocks: blocks.iter().copied().skip(rank as usize).step_by(ranks).collect(),
            at,
        })?;
        let mut tally = lock(&self.tally);
        done.iter().for_each(|done| tally.add(done));
        Ok(())
    }

    fn finish(self, requests: &[Vec<u64>], wall: Duration) -> Result<Report, Failure> {
        let leaked_pins = Scratch::leaked_pins(&self.segment);
        drop(self.segment);
        self.fleet.stop()?;
        let _alive = output::spinner("counting what the backend recorded".to_owned());
        let analysis = analyse(&read_events(&self.events)?);
        let LoadAnalysis {
            backend_loads,
            unique_loaded,
            reloads_after_eviction,
            duplicate_backend_loads,
            evictions,
            ..
        } = analysis;
        let mut tally = self.tally.into_inner().unwrap_or_else(PoisonError::into_inner);
        for reason in tally.reasons.iter().take(4) {
            eprintln!("  {reason}");
        }
        tally.load_ns.sort_unstable();
        let blocks: u64 = requests.iter().map(|request| request.len() as u64).sum();
        let ratio = tally.host_hit_blocks as f64 / blocks.max(1) as f64;
        Ok(Report {
            requests: requests.len(),
            blocks,
            prefix_hit_blocks: tally.prefix_hit_blocks,
            host_hit_blocks: tally.host_hit_blocks,
            host_hit_ratio: (ratio * 1e5).round() / 1e5,
            backend_loads,
            unique_loaded,
            reloads_after_eviction,
            duplicate_backend_loads,
            evictions,
            load_us: LoadTimes {
                p50: percentile(&tally.load_ns, 50) / 1000,
                p99: percentile(&tally.load_ns, 99) / 1000,
            },
            verified_bytes: tally.verified_bytes,
            mismatched_shards: tally.mismatched_shards,
            failed_shards: tally.failed_shards,
            leaked_pins,
            wall_s: output::seconds(wall.as_nanos() as u64),
        })
    }
}

fn config(
    arguments: &Arguments,
    scratch: &Scratch,
    unique_blocks: u64,
) -> Result<LoaderConfig, Failure> {
    let Arguments { block_bytes, shards_per_block, ranks, .. } = *arguments;
    if shards_per_block == 0 || !block_bytes.is_multiple_of(shards_per_block.into()) {
        return Err(Failure::Broken(format!(
            "--block-bytes {block_bytes} is not a multiple of --shards-per-block {shards_per_block}"
        )));
    }
    let shard_bytes = block_bytes / u64::from(shards_per_block);
    // What is too large for a shard is refused later.
    let slot_bytes = SlotStride::for_shard(shard_bytes.min(MAX_SHARD_BYTES)).bytes();
    let block_slots = slot_bytes.saturating_mul(shards_per_block.into());
    let footprint = unique_blocks.saturating_mul(block_slots);
    let least = block_slots.saturating_mul(ranks.into());
    let backend = match arguments.backend.as_deref() {
        Some("memory") => "memory:replay".to_owned(),
        Some(named) => named.to_owned(),
        None => format!("posix:{}", scratch.dir("store")?.display()),
    };
    Ok(LoaderConfig {
        segment_id: scratch.segment_id(),
        shm_dir: scratch.shm_dir(),
        capacity_bytes: arguments.capacity.unwrap_or((footprint / 20).max(least)),
        reserved_slots: Some(0),
        shard_bytes,
        block_bytes,
        local_rank_size: ranks,
        backend,
        memory_backend_bytes: (unique_blocks + 1).saturating_mul(block_bytes),
        fsync: crate::backend::file::store::Fsync::None,
        ..LoaderConfig::default()
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The value below which `percent` of the sorted values lie; 0 of none.
fn percentile(sorted: &[u64], percent: usize) -> u64 {
    sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).map_or(0, |v| *v)
}

fn print(report: &Report) {
    let mut table = output::table(["", ""]);
    for (name, value) in [
        ("requests", report.requests.to_string()),
        ("blocks asked for", report.blocks.to_string()),
        ("known prefix blocks", report.prefix_hit_blocks.to_string()),
        ("of those in host memory", report.host_hit_blocks.to_string()),
        ("host hit ratio", format!("{:.4}", report.host_hit_ratio)),
        ("backend loads (shards)", report.backend_loads.to_string()),
        ("reloads after eviction", report.reloads_after_eviction.to_string()),
        ("duplicate loads", report.duplicate_backend_loads.to_string()),
        ("evictions", report.evictions.to_string()),
        (
            "load of a request, p50 / p99 us",
            format!("{} / {}", report.load_us.p50, report.load_us.p99),
        ),
        ("verified", output::bytes(report.verified_bytes)),
        ("mismatched shards", report.mismatched_shards.to_string()),
        ("wall s", format!("{:.1}", report.wall_s)),
    ] {
        table.add_row([name.to_owned(), value]);
    }
    println!("{table}");
}

impl Report {
    fn verdict(&self) -> Result<(), Failure> {
        let wrong: Vec<String> = [
            ("mismatched_shards", self.mismatched_shards),
            ("failed_shards", self.failed_shards),
            ("duplicate_backend_loads", self.duplicate_backend_loads),
            ("leaked_pins", self.leaked_pins),
        ]
        .into_iter()
        .filter(|(_, count)| *count > 0)
        .map(|(what, count)| format!("{what} is {count}, must be 0"))
        .collect();
        if wrong.is_empty() { Ok(()) } else { Err(Failure::Wrong(wrong.join("; "))) }
    }
}
