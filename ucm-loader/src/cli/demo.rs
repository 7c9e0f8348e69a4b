//! `ucm demo`: dump, cold load and hot load with N rank processes, every byte checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use comfy_table::Table;
use serde::Serialize;
use ucm_core::limits::MAX_SHARD_BYTES;
use ucm_core::segment::geometry::SlotStride;

use crate::backend::file::{FileOptions, FileStore};
use crate::backend::recorder::{analyse, read_events};
use crate::cli::Failure;
use crate::cli::output::{self, gb_per_s, seconds};
use crate::cli::scratch::Scratch;
use crate::config::LoaderConfig;
use crate::rank::fleet::Fleet;
use crate::rank::protocol::{Command, Done, Setup};
use crate::replay::trace::block_id;

/// Run N rank processes over one shared cache and verify every byte.
///
/// Three phases over the same shards: dump (generated KV, each block by one
/// rank, into files), cold load (every rank loads everything, the cache is
/// empty), hot load (again, now from the cache). Device memory is poisoned
/// before each load and compared afterwards. Needs about
/// shards x shard-bytes of /dev/shm, as much disk, and as much memory for
/// each rank's device.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Rank processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=31))]
    ranks: u32,
    /// Shards in all; a multiple of --shards-per-block
    #[arg(long, default_value_t = 2048)]
    shards: u64,
    /// Shards of a block (one file)
    #[arg(long, default_value_t = 8)]
    shards_per_block: u32,
    /// Bytes of a shard
    #[arg(long, default_value_t = 262_144)]
    shard_bytes: u64,
    /// Flip one stored byte behind the cache's back: the run must fail
    #[arg(long)]
    corrupt_one: bool,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct DumpPhase {
    wall_s: f64,
    stored_shards: u64,
    d2h_bytes: u64,
    gb_per_s: f64,
}

#[derive(Serialize)]
struct LoadPhase {
    wall_s: f64,
    backend_loads: u64,
    h2d_bytes: u64,
    gb_per_s: f64,
    peak_backend_in_flight: u64,
    waiter_cpu_s: f64,
    failed_shards: u64,
}

#[derive(Serialize)]
struct Phases {
    dump: DumpPhase,
    cold: LoadPhase,
    hot: LoadPhase,
}

#[derive(Serialize)]
struct Report {
    ranks: u32,
    shards: u64,
    shard_bytes: u64,
    phases: Phases,
    verified_bytes: u64,
    mismatched_shards: u64,
    leaked_pins: u64,
    leftover_files: u64,
}

const SEED: u64 = 0x7563_6D00;
const PATIENCE: Duration = Duration::from_secs(600);

/// Runs the demo.
///
/// # Errors
/// [`Failure::Wrong`] when a byte, a count or a left-over is not as it must be.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    crate::interrupt::watch()?;
    let scratch = Scratch::new(&arguments.shm_dir, "ucm-demo-")?;
    let demo = Demo::new(arguments, &scratch)?;
    let dump = demo.dump()?;
    if arguments.corrupt_one {
        demo.corrupt_one()?;
    }
    let (cold, hot, checked, leaked_pins) = demo.load()?;
    let report = Report {
        ranks: arguments.ranks,
        shards: arguments.shards,
        shard_bytes: arguments.shard_bytes,
        phases: Phases { dump, cold, hot },
        verified_bytes: checked.verified_bytes,
        mismatched_shards: checked.mismatched_shards,
        leaked_pins,
        leftover_files: scratch.remove(),
    };
    println!("{}", report.table());
    let verified = output::bytes(report.verified_bytes);
    println!("{verified} compared and right, {} shards wrong", report.mismatched_shards);
    if arguments.json {
        output::json(&report)?;
    }
    report.verdict(&checked.reasons)
}

struct Demo<'a> {
    arguments: &'a Arguments,
    scratch: &'a Scratch,
    store: PathBuf,
    blocks: Vec<u64>,
}

impl<'a> Demo<'a> {
    fn new(arguments: &'a Arguments, scratch: &'a Scratch) -> Result<Self, Failure> {
        let Arguments { shards, shards_per_block, .. } = *arguments;
        if shards == 0 || shards_per_block == 0 || !shards.is_multiple_of(shards_per_block.into()) {
            return Err(Failure::Broken(format!(
                "--shards {shards} is not a positive multiple of --shards-per-block {shards_per_block}"
            )));
        }
        let mut demo =
            Self { arguments, scratch, store: scratch.dir("store")?, blocks: Vec::new() };
        // Before anything is as large as the arguments say.
        demo.config().check()?;
        demo.blocks = (0..shards / u64::from(shards_per_block)).collect();
        Ok(demo)
    }

    fn config(&self) -> LoaderConfig {
        let Arguments { ranks, shards, shards_per_block, shard_bytes, .. } = *self.arguments;
        // Room for everything, and for the quarantine of nobody. What is too
        // large for a shard is refused later.
        let slot_bytes = SlotStride::for_shard(shard_bytes.min(MAX_SHARD_BYTES)).bytes();
        LoaderConfig {
            segment_id: self.scratch.segment_id(),
            shm_dir: self.scratch.shm_dir(),
            capacity_bytes: shards.max(u64::from(ranks)).saturating_mul(slot_bytes),
            reserved_slots: Some(0),
            shard_bytes,
            block_bytes: shard_bytes.saturating_mul(shards_per_block.into()),
            local_rank_size: ranks,
            backend: format!("posix:{}", self.store.display()),
            fsync: crate::backend::file::store::Fsync::None,
            ..LoaderConfig::default()
        }
    }

    fn setup(&self, events: &Path) -> Setup {
        Setup {
            config: self.config(),
            events_dir: Some(events.to_owned()),
            device_shards: self.arguments.shards,
            seed: SEED,
        }
    }

    /// Every block generated and dumped by one rank, round robin.
    fn dump(&self) -> Result<DumpPhase, Failure> {
        let events = self.scratch.dir("dump-events")?;
        let _alive = output::spinner(format!("dump: {} ranks", self.arguments.ranks));
        let ranks = self.arguments.ranks;
        // A rank's device holds no more than its own blocks here.
        let share = self.blocks.len().div_ceil(ranks as usize) as u64;
        let device_shards = share * u64::from(self.arguments.shards_per_block);
        let setup = Setup { device_shards, ..self.setup(&events) };
        let fleet = Fleet::start(ranks, &setup, PATIENCE)?;
        let done = fleet.all(|rank| Command::Dump {
            blocks: self
                .blocks
                .iter()
                .copied()
                .skip(rank as usize)
                .step_by(ranks as usize)
                .collect(),
            at: 0,
        })?;
        if let Some(reason) = done.iter().flat_map(|done| &done.reasons).next() {
            return Err(Failure::Broken(format!("the dump failed: {reason}")));
        }
        let metrics = fleet.metrics()?;
        fleet.stop()?;
        let (wall_ns, d2h_bytes) = (wall_ns(&done), metrics.iter().map(|m| m.d2h_bytes).sum());
        Ok(DumpPhase {
            wall_s: seconds(wall_ns),
            stored_shards: metrics.iter().map(|m| m.stored).sum(),
            d2h_bytes,
            gb_per_s: gb_per_s(d2h_bytes, wall_ns),
        })
    }

    /// Flips one bit of the first shard of the block in the middle.
    fn corrupt_one(&self) -> Result<(), Failure> {
        let config = self.config().check()?;
        let store = FileStore::open(&FileOptions::new(&self.store, config.store_geometry()))?;
        let block = block_id(SEED, self.blocks[self.blocks.len() / 2]);
        let path = store.block_path(&block);
        let mut bytes = std::fs::read(&path)?;
        let at = store.shard_offset(0) as usize + self.arguments.shard_bytes as usize / 2;
        bytes[at] ^= 1;
        std::fs::write(&path, bytes)?;
        eprintln!("flipped one bit of {}", path.display());
        Ok(())
    }

    /// Cold and hot, by the same processes; then what the segment still holds.
    fn load(&self) -> Result<(LoadPhase, LoadPhase, Done, u64), Failure> {
        let events = self.scratch.dir("load-events")?;
        let fleet = {
            let _alive = output::spinner(format!("start: {} ranks", self.arguments.ranks));
            Fleet::start(self.arguments.ranks, &self.setup(&events), PATIENCE)?
        };
        let mut checked = Done::default();
        let mut phase = |name: &str| {
            let _alive = output::spinner(format!("{name}: {} ranks", self.arguments.ranks));
            self.load_phase(&fleet, &events, &mut checked)
        };
        let (cold, hot) = (phase("cold load")?, phase("hot load")?);
        let segment = self.scratch.segment()?;
        let leaked_pins = Scratch::leaked_pins(&segment);
        drop(segment);
        fleet.stop()?;
        Ok((cold, hot, checked, leaked_pins))
    }

    fn load_phase(
        &self,
        fleet: &Fleet,
        events: &Path,
        checked: &mut Done,
    ) -> Result<LoadPhase, Failure> {
        fleet.all(|_| Command::Poison)?;
        let metrics_before = fleet.metrics()?;
        let everything = |_| Command::Load { blocks: self.blocks.clone(), at: 0 };
        let done = fleet.all(everything)?;
        let metrics: Vec<_> = fleet
            .metrics()?
            .iter()
            .zip(&metrics_before)
            .map(|(now, then)| now.since(then))
            .collect();
        let seen = fleet.all(|_| Command::Verify { blocks: self.blocks.clone(), at: 0 })?;
        for part in done.iter().chain(&seen) {
            checked.verified_bytes += part.verified_bytes;
            checked.mismatched_shards += part.mismatched_shards;
            checked.reasons.extend(part.reasons.iter().cloned());
        }
        // Counted from what the backend recorded, in this phase alone.
        let began_ns = done.iter().map(|done| done.began_ns).min().unwrap_or(0);
        let recorded = read_events(events)?;
        let of_phase: Vec<_> =
            recorded.into_iter().filter(|event| event.time_ns >= began_ns).collect();
        let analysis = analyse(&of_phase);
        let (wall_ns, h2d_bytes) = (wall_ns(&done), metrics.iter().map(|m| m.h2d_bytes).sum());
        Ok(LoadPhase {
            wall_s: seconds(wall_ns),
            backend_loads: analysis.backend_loads,
            h2d_bytes,
            gb_per_s: gb_per_s(h2d_bytes, wall_ns),
            peak_backend_in_flight: analysis.peak_in_flight,
            waiter_cpu_s: seconds(metrics.iter().map(|m| m.wait_cpu_ns).sum()),
            failed_shards: done.iter().map(|done| done.failed_shards).sum(),
        })
    }
}

/// From the first rank's start to the last one's end.
fn wall_ns(done: &[Done]) -> u64 {
    let began = done.iter().map(|done| done.began_ns).min().unwrap_or(0);
    done.iter().map(|done| done.ended_ns).max().unwrap_or(0).saturating_sub(began)
}

impl Report {
    fn table(&self) -> Table {
        let mut table = output::table([
            "phase",
            "wall s",
            "GB/s",
            "backend loads",
            "in flight",
            "copied",
            "waiter CPU s",
        ]);
        let Phases { dump, cold, hot } = &self.phases;
        table.add_row([
            "dump".to_owned(),
            format!("{:.3}", dump.wall_s),
            format!("{:.2}", dump.gb_per_s),
            "-".to_owned(),
            "-".to_owned(),
            output::bytes(dump.d2h_bytes),
            "-".to_owned(),
        ]);
        for (name, phase) in [("cold", cold), ("hot", hot)] {
            table.add_row([
                name.to_owned(),
                format!("{:.3}", phase.wall_s),
                format!("{:.2}", phase.gb_per_s),
                phase.backend_loads.to_string(),
                phase.peak_backend_in_flight.to_string(),
                output::bytes(phase.h2d_bytes),
                format!("{:.4}", phase.waiter_cpu_s),
            ]);
        }
        table
    }

    /// What must hold of every run.
    fn verdict(&self, reasons: &[String]) -> Result<(), Failure> {
        let must_verify = 2 * u64::from(self.ranks) * self.shards * self.shard_bytes;
        let mut wrong = Vec::new();
        let mut expect = |what: &str, found: u64, expected: u64| {
            if found != expected {
                wrong.push(format!("{what} is {found}, must be {expected}"));
            }
        };
        expect("mismatched_shards", self.mismatched_shards, 0);
        expect("verified_bytes", self.verified_bytes, must_verify);
        expect("cold.backend_loads", self.phases.cold.backend_loads, self.shards);
        expect("hot.backend_loads", self.phases.hot.backend_loads, 0);
        expect("leaked_pins", self.leaked_pins, 0);
        expect("leftover_files", self.leftover_files, 0);
        if wrong.is_empty() {
            return Ok(());
        }
        for reason in reasons.iter().take(4) {
            eprintln!("  {reason}");
        }
        Err(Failure::Wrong(wrong.join("; ")))
    }
}
