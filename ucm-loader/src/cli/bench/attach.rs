//! `ucm bench attach`: making, attaching, joining and reaping, by the number of slots.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use ucm_core::cache::ReapOutcome;
use ucm_core::participant::ParticipantId;
use ucm_core::{BlockId, CacheShape, Got, Role, ShardKey};
use ucm_posix::{Attachment, Segment, SegmentId, SegmentOptions, ShmDir, monotonic_ns};

use crate::cli::scratch::Scratch;
use crate::cli::{Failure, output};

/// Making a segment, attaching to it, joining it, also in the place of a killed
/// rank, and reaping that rank. Medians over several rounds.
///
/// The killed rank is a process of its own; it dies with loads and pins in hand.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Slots
    #[arg(long, default_value_t = 1_000_000)]
    slots: u32,
    /// Slots the killed rank has pinned; half of them it was loading
    #[arg(long, default_value_t = 4096)]
    held: u32,
    /// Rounds
    #[arg(long, default_value_t = 7)]
    rounds: u32,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
    /// Be the rank that is killed, in this directory
    #[arg(long, hide = true)]
    victim: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report {
    slots: u32,
    held: u32,
    control_mib: f64,
    create_ms: f64,
    attach_ms: f64,
    join_ms: f64,
    join_after_crash_ms: f64,
    reap_ms: f64,
    leave_ms: f64,
}

/// The rank that dies, and the one that looks on.
const VICTIM: u32 = 0;
const SURVIVOR: u32 = 1;

fn broken(error: impl std::fmt::Display) -> Failure {
    Failure::Broken(error.to_string())
}

fn options(arguments: &Arguments, dir: &Path) -> Result<SegmentOptions, Failure> {
    let shape = CacheShape {
        slot_count: arguments.slots,
        reserved_slots: 0,
        shard_bytes: 8,
        shards_per_block: 1,
        local_rank_size: 8,
        participants: 32,
        content_tag: 0,
    };
    let options = SegmentOptions::new(SegmentId::new("bench")?, shape);
    Ok(SegmentOptions { dir: ShmDir::new(dir), io_quarantine_ns: 1, ..options })
}

fn join(segment: &Arc<Segment>, rank: u32) -> Result<Attachment, Failure> {
    Attachment::join(Arc::clone(segment), Role::Rank, Some(rank), None).map_err(broken)
}

/// Joins, takes what it is to die with, says so, and waits for the end.
fn be_victim(arguments: &Arguments, dir: &Path) -> Result<(), Failure> {
    let segment = Arc::new(Segment::open_or_create(&options(arguments, dir)?)?);
    let rank = join(&segment, VICTIM)?;
    for number in 0..u64::from(arguments.held) {
        let key = ShardKey::new(BlockId::from_words(number + 1, 7), 0);
        let got = rank.cache().get(&key, monotonic_ns() + 1_000_000_000).map_err(broken)?;
        // Half of them published and pinned, half still loading; none given back.
        let _held = match got {
            Got::Owner(loading) if number % 2 == 0 => {
                Got::Hit(rank.cache().publish(loading, 8, 0).map_err(broken)?)
            }
            other => other,
        };
    }
    println!("held");
    std::thread::sleep(std::time::Duration::from_secs(600));
    Ok(())
}

/// Starts the victim, waits until it holds everything, and kills it.
fn kill_one(arguments: &Arguments, dir: &Path) -> Result<(), Failure> {
    let mut child: Child = Command::new(std::env::current_exe()?)
        .args(["bench", "attach", "--slots", &arguments.slots.to_string()])
        .args(["--held", &arguments.held.to_string(), "--victim"])
        .arg(dir)
        .stdout(Stdio::piped())
        .spawn()?;
    let said = child.stdout.take().map(|out| BufReader::new(out).lines().next());
    child.kill()?;
    child.wait()?;
    match said {
        Some(Some(Ok(line))) if line == "held" => Ok(()),
        _ => Err(Failure::Broken("the rank that was to be killed did not get so far".to_owned())),
    }
}

/// Runs it.
///
/// # Errors
/// When a segment cannot be made, or a process not started.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    if let Some(dir) = &arguments.victim {
        return be_victim(arguments, dir);
    }
    crate::interrupt::watch()?;
    let mut figures: [Vec<f64>; 6] = Default::default();
    let mut control_mib = 0.0;
    for _ in 0..arguments.rounds.max(1) {
        if crate::interrupt::is_set() {
            return Err(Failure::Broken("interrupted".to_owned()));
        }
        let scratch = Scratch::new(&arguments.shm_dir, "ucm-bench-")?;
        let options = options(arguments, &scratch.shm_dir())?;
        let mut note = |figure: usize, began: Instant| {
            figures[figure].push(began.elapsed().as_secs_f64() * 1e3);
        };
        let began = Instant::now();
        let segment = Arc::new(Segment::open_or_create(&options)?);
        note(0, began);
        control_mib = segment.control_bytes() as f64 / f64::from(1 << 20);
        let began = Instant::now();
        let again = Segment::open_or_create(&options)?;
        note(1, began);
        drop(again);
        let began = Instant::now();
        let survivor = join(&segment, SURVIVOR)?;
        note(2, began);
        kill_one(arguments, &scratch.shm_dir())?;
        let began = Instant::now();
        let successor = join(&segment, VICTIM)?;
        note(3, began);
        let began = Instant::now();
        successor.leave();
        note(5, began);
        kill_one(arguments, &scratch.shm_dir())?;
        let victim = ParticipantId::new(VICTIM).ok_or_else(|| broken("no such rank"))?;
        let began = Instant::now();
        let outcome = survivor.cache().reap(victim);
        note(4, began);
        if outcome != ReapOutcome::Reaped {
            return Err(Failure::Wrong(format!("the killed rank was not reaped: {outcome:?}")));
        }
    }
    let median = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let [create_ms, attach_ms, join_ms, join_after_crash_ms, reap_ms, leave_ms] =
        figures.each_mut().map(median);
    let report = Report {
        slots: arguments.slots,
        held: arguments.held,
        control_mib,
        create_ms,
        attach_ms,
        join_ms,
        join_after_crash_ms,
        reap_ms,
        leave_ms,
    };
    if arguments.json {
        return Ok(output::json(&report)?);
    }
    println!("{} slots, control plane {control_mib:.0} MiB, ms:", report.slots);
    println!(
        "  create {create_ms:.2}, attach {attach_ms:.2}, join {join_ms:.2}, leave {leave_ms:.2}"
    );
    println!(
        "  after a rank that held {} slots was killed: join in its place {join_after_crash_ms:.2}, \
         reap {reap_ms:.2}",
        report.held
    );
    Ok(())
}
