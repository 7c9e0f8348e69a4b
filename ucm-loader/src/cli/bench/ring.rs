//! `ucm bench ring`: the channel's ring against others, between two processes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::Serialize;
use ucm_posix::channel::{EngineOutput, Spins};
use ucm_posix::{EngineChannel, SegmentId, ShmDir, WorkerChannel, monotonic_ns};

use crate::cli::Failure;
use crate::cli::bench::rivals::{self, OneLine, Pace};
use crate::cli::output;
use crate::cli::scratch::Scratch;

/// The channel's ring against the one-line layout it replaces, rtrb and heapless.
///
/// Messages of 8 B, 64 B and 4 KiB, published one by one and in batches of 128,
/// and a stream of 64 B writes. Ours, one-line and heapless run between two
/// processes over a shared mapping; rtrb lives on the heap, so between two
/// threads. All take turns, round after round; figures are medians, ratios
/// medians of the rounds' ratios.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Rounds
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=101))]
    rounds: u32,
    /// Messages of 8 bytes in a round; fewer of the longer ones
    #[arg(long, default_value_t = 2_000_000)]
    messages: u64,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
    /// The other process: what it sends; not for people
    #[arg(long, hide = true)]
    peer: Option<String>,
}

/// Messages of a batch.
pub(crate) const BATCH: usize = 128;
/// A stream publishes when so much is written, or the ring is full.
const STREAM_PUBLISH_BYTES: u32 = 4096;
/// What a stream's reader takes at a time.
const STREAM_READ_BYTES: usize = 16 << 10;
/// Only a hang takes this long.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Contender {
    Ours,
    OneLine,
    Rtrb,
    Heapless,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    contender: Contender,
    size: usize,
    /// Messages of a batch; 0 is a stream.
    batch: usize,
}

impl Case {
    fn name(self) -> &'static str {
        match (self.contender, self.batch) {
            (Contender::Ours, 0) => "stream",
            (Contender::OneLine, 0) => "one_line_stream",
            (Contender::Ours, 1) => "ours",
            (Contender::Ours, _) => "ours_batched",
            (Contender::OneLine, _) => "one_line",
            (Contender::Rtrb, 1) => "rtrb",
            (Contender::Rtrb, _) => "rtrb_batched",
            (Contender::Heapless, _) => "heapless",
        }
    }

    fn count(self, messages: u64) -> u64 {
        let count = match self.size {
            0..64 => messages,
            64..4096 => messages / 2,
            _ => messages / 20,
        };
        count.max(BATCH as u64).next_multiple_of(BATCH as u64)
    }

    /// For the peer: contender, size, batch, count, directory.
    fn spec(self, count: u64, dir: &Path) -> String {
        let Self { contender, size, batch } = self;
        format!("{contender:?},{size},{batch},{count},{}", dir.display())
    }

    fn parse(spec: &str) -> Option<(Self, u64, PathBuf)> {
        let mut parts = spec.splitn(5, ',');
        let contender = match parts.next()? {
            "Ours" => Contender::Ours,
            "OneLine" => Contender::OneLine,
            "Heapless" => Contender::Heapless,
            _ => return None,
        };
        let (size, batch) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let count = parts.next()?.parse().ok()?;
        Some((Self { contender, size, batch }, count, parts.next()?.into()))
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for size in [8, 64, 4096] {
        for (contender, batch) in [
            (Contender::Ours, 1),
            (Contender::Ours, BATCH),
            (Contender::OneLine, 1),
            (Contender::Rtrb, 1),
            (Contender::Rtrb, BATCH),
            (Contender::Heapless, 1),
        ] {
            if rivals::has_others() || matches!(contender, Contender::Ours | Contender::OneLine) {
                cases.push(Case { contender, size, batch });
            }
        }
    }
    for contender in [Contender::Ours, Contender::OneLine] {
        cases.push(Case { contender, size: 64, batch: 0 });
    }
    cases
}

#[derive(Serialize)]
struct Figure {
    name: &'static str,
    message_bytes: usize,
    between: &'static str,
    ns_per_message: f64,
    best_ns_per_message: f64,
    gb_per_s: f64,
}

#[derive(Serialize)]
struct Ratio {
    name: String,
    ratio: f64,
    at_least: f64,
}

#[derive(Serialize)]
struct Report {
    rounds: u32,
    figures: Vec<Figure>,
    ratios: Vec<Ratio>,
}

/// Runs it.
///
/// # Errors
/// When a peer cannot be started, or bytes did not arrive as they were sent.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    if let Some(spec) = &arguments.peer {
        let parsed = Case::parse(spec).ok_or_else(|| Failure::Broken(format!("peer {spec}")))?;
        return send(parsed.0, parsed.1, &parsed.2);
    }
    crate::interrupt::watch()?;
    let scratch = Scratch::new(&arguments.shm_dir, "ucm-bench-")?;
    let cases = cases();
    // [case][round], nanoseconds per message.
    let mut times = vec![Vec::new(); cases.len()];
    let bar = output::progress(u64::from(arguments.rounds), "rounds");
    for _ in 0..arguments.rounds {
        for (case, times) in cases.iter().zip(&mut times) {
            if crate::interrupt::is_set() {
                return Err(Failure::Broken("interrupted".to_owned()));
            }
            let count = case.count(arguments.messages);
            times.push(measure(*case, count, &scratch.shm_dir())? as f64 / count as f64);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let report = report(arguments.rounds, &cases, &times);
    print(&report);
    if arguments.json {
        output::json(&report)?;
    }
    Ok(())
}

fn measure(case: Case, count: u64, dir: &Path) -> Result<u64, Failure> {
    if case.contender == Contender::Rtrb {
        return rivals::rtrb(case.size, case.batch, count);
    }
    let program = std::env::current_exe()?;
    let spawn = || {
        Command::new(&program)
            .args(["bench", "ring", "--peer", &case.spec(count, dir)])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
    };
    let (elapsed_ns, mut child) = match case.contender {
        Contender::Ours => ours(case, count, dir, spawn)?,
        Contender::OneLine => {
            let ring = OneLine::create(&file(dir))?;
            let child = spawn()?;
            (ring.receive(case.size, case.batch == 0, count)?, child)
        }
        _ => rivals::heapless_receive(&file(dir), case.size, count, spawn)?,
    };
    let status = child.wait()?;
    if !status.success() {
        return Err(Failure::Broken(format!("the sending process ended with {status}")));
    }
    Ok(elapsed_ns)
}

fn file(dir: &Path) -> PathBuf {
    dir.join("ring")
}

fn channel_id() -> Result<SegmentId, Failure> {
    Ok(SegmentId::new("ring")?)
}

fn far_ns() -> u64 {
    monotonic_ns() + PATIENCE.as_nanos() as u64
}

/// Our end that reads: the engine's, as it is.
fn ours(
    case: Case,
    count: u64,
    dir: &Path,
    spawn: impl Fn() -> std::io::Result<Child>,
) -> Result<(u64, Child), Failure> {
    let id = channel_id()?;
    let (channel, mut input, mut output) =
        EngineChannel::create(&ShmDir::new(dir), &id, Spins::MANY)?;
    let child = spawn()?;
    if !channel.status().wait_attached(far_ns()) {
        return Err(Failure::Broken("the sending process did not attach".to_owned()));
    }
    output.learn_peer();
    input.execute(b"go")?;
    let deadline_ns = far_ns();
    let began_ns = monotonic_ns();
    if case.batch == 0 {
        let mut left = count * case.size as u64;
        let mut buffer = vec![0; STREAM_READ_BYTES];
        while left > 0 {
            match output.read_some(&mut buffer)? {
                0 => {
                    if !output.wait_readable(1, deadline_ns)? {
                        return Err(Failure::Broken("the other side of a ring hangs".to_owned()));
                    }
                }
                read => left -= read as u64,
            }
        }
    } else {
        let receive = match case.size {
            8 => receive_messages::<8>,
            64 => receive_messages::<64>,
            _ => receive_messages::<4096>,
        };
        receive(&mut output, count, deadline_ns)?;
    }
    Ok((monotonic_ns() - began_ns, child))
}

/// Reads `count` messages, which must be numbered in order.
fn receive_messages<const N: usize>(
    output: &mut EngineOutput,
    count: u64,
    deadline_ns: u64,
) -> Result<(), Failure> {
    let mut message = [0; N];
    for number in 0..count {
        while !output.try_read(&mut message)? {
            // Its own way of waiting, as the engine's reader has it.
            if !output.wait_readable(N, deadline_ns)? {
                return Err(Failure::Broken("the other side of a ring hangs".to_owned()));
            }
        }
        rivals::check(&message, number)?;
    }
    Ok(())
}

/// The other process.
fn send(case: Case, count: u64, dir: &Path) -> Result<(), Failure> {
    match case.contender {
        Contender::OneLine => {
            OneLine::open(&file(dir))?.send(case.size, count)?;
            Ok(())
        }
        Contender::Heapless => rivals::heapless_send(&file(dir), case.size, count),
        _ => match case.size {
            8 => send_ours::<8>(case, count, dir),
            64 => send_ours::<64>(case, count, dir),
            _ => send_ours::<4096>(case, count, dir),
        },
    }
}

fn send_ours<const N: usize>(case: Case, count: u64, dir: &Path) -> Result<(), Failure> {
    let (channel, _input, mut output) =
        WorkerChannel::attach(&ShmDir::new(dir), &channel_id()?, Spins::MANY)?;
    channel.status().wait_while(ucm_core::channel::Status::Idle, far_ns())?;
    let mut pace = Pace::new(PATIENCE);
    let mut message = [0; N];
    for number in 0..count {
        rivals::number(&mut message, number);
        while let Err(error) = output.try_write(&message) {
            if error != ucm_core::channel::WriteError::Full {
                return Err(error.into());
            }
            output.publish();
            pace.wait()?;
        }
        pace.went_on();
        match case.batch {
            0 => {
                if output.unpublished_bytes() >= STREAM_PUBLISH_BYTES {
                    output.publish();
                }
            }
            1 => output.publish(),
            batch => {
                if (number + 1).is_multiple_of(batch as u64) {
                    output.publish();
                }
            }
        }
    }
    output.publish();
    Ok(())
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn report(rounds: u32, cases: &[Case], times: &[Vec<f64>]) -> Report {
    let figures = cases.iter().zip(times).map(|(case, times)| {
        let ns = median(times.iter().copied());
        Figure {
            name: case.name(),
            message_bytes: case.size,
            between: if case.contender == Contender::Rtrb { "threads" } else { "processes" },
            ns_per_message: (ns * 100.0).round() / 100.0,
            best_ns_per_message: (times.iter().copied().fold(f64::MAX, f64::min) * 100.0).round()
                / 100.0,
            gb_per_s: (case.size as f64 / ns * 1000.0).round() / 1000.0,
        }
    });
    let figures = figures.collect();
    let of = |name: &str, size: usize| {
        cases.iter().position(|case| case.name() == name && case.size == size).map(|at| &times[at])
    };
    let mut ratios = Vec::new();
    let mut ratio = |slow: &str, fast: &str, size: usize, at_least: f64| {
        if let (Some(slow_times), Some(fast_times)) = (of(slow, size), of(fast, size)) {
            let ratio = median(slow_times.iter().zip(fast_times).map(|(slow, fast)| slow / fast));
            ratios.push(Ratio {
                name: format!("{fast} over {slow}, {size} B"),
                ratio: (ratio * 100.0).round() / 100.0,
                at_least,
            });
        }
    };
    for size in [8, 64, 4096] {
        ratio("one_line", "ours", size, if size < 4096 { 2.0 } else { 0.0 });
        ratio("one_line", "ours_batched", size, if size == 64 { 5.0 } else { 0.0 });
        ratio("rtrb", "ours", size, 0.95);
        ratio("rtrb_batched", "ours_batched", size, 0.95);
        ratio("heapless", "ours", size, 0.0);
    }
    ratio("one_line_stream", "stream", 64, 2.5);
    Report { rounds, figures, ratios }
}

fn print(report: &Report) {
    let mut table = output::table(["ring", "bytes", "between", "ns/message", "best", "GB/s"]);
    for figure in &report.figures {
        table.add_row([
            figure.name.to_owned(),
            figure.message_bytes.to_string(),
            figure.between.to_owned(),
            format!("{:.1}", figure.ns_per_message),
            format!("{:.1}", figure.best_ns_per_message),
            format!("{:.2}", figure.gb_per_s),
        ]);
    }
    println!("{table}");
    let mut table = output::table(["ratio", "", "wanted"]);
    for ratio in &report.ratios {
        let wanted =
            if ratio.at_least > 0.0 { format!("{}", ratio.at_least) } else { String::new() };
        table.add_row([ratio.name.clone(), format!("{:.2}", ratio.ratio), wanted]);
    }
    println!("{table}");
}
