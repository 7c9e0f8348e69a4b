//! `ucm bench channel`: round trips, interrupts, deaths.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use ucm_core::channel::message::token_bytes;
use ucm_core::channel::{Kind, Status, TokenRecord};
use ucm_posix::channel::Spins;
use ucm_posix::{EngineChannel, SegmentId, ShmDir, WorkerChannel, monotonic_ns};

use crate::channel::{Heard, Worker};
use crate::cli::Failure;
use crate::cli::bench::rivals::Pace;
use crate::cli::output;
use crate::cli::scratch::Scratch;
use crate::config::LoaderConfig;
use crate::rank::protocol::{Command, Outcome, Setup};

/// Round trips of a small request through the channel and through a socket pair.
///
/// A request of 64 bytes goes out, a token record comes back, between two
/// processes: both awake (spinning on memory, or on a socket that does not
/// block), and both asleep between (a futex, or a socket that blocks). Then
/// how soon a streaming worker answers an interrupt, and how long it takes to
/// learn of a killed one, read what it left, and have another in its place.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Round trips of each kind in a round
    #[arg(long, default_value_t = 20_000)]
    trips: u32,
    /// Rounds; the kinds take turns
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=101))]
    rounds: u32,
    /// Interrupts, and kills
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    kills: u32,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
    /// The other process: how it answers; not for people
    #[arg(long, hide = true)]
    peer: Option<String>,
}

const REQUEST_BYTES: usize = 64;
const ANSWER_BYTES: usize = size_of::<TokenRecord>();
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Channel,
    Socket,
}

#[derive(Serialize)]
struct Trips {
    p50_ns: u64,
    p99_ns: u64,
}

#[derive(Serialize)]
struct Pair {
    channel: Trips,
    socket_pair: Trips,
    socket_over_channel: f64,
}

#[derive(Serialize)]
struct Micros {
    p50_us: f64,
    max_us: f64,
}

#[derive(Serialize)]
struct Report {
    trips: u32,
    rounds: u32,
    awake: Pair,
    asleep: Pair,
    interrupt: Micros,
    death_learned: Micros,
    tokens_read_after_death: u64,
    restart: Micros,
}

/// Runs it.
///
/// # Errors
/// When a process cannot be started, or an answer is wrong.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    if let Some(peer) = &arguments.peer {
        return answer(peer);
    }
    crate::interrupt::watch()?;
    let scratch = Scratch::new(&arguments.shm_dir, "ucm-bench-")?;
    let kinds =
        [(Way::Channel, true), (Way::Socket, true), (Way::Channel, false), (Way::Socket, false)];
    let mut times: [Vec<Vec<u64>>; 4] = Default::default();
    let bar = output::progress(u64::from(arguments.rounds), "rounds");
    for _ in 0..arguments.rounds {
        for ((way, awake), times) in kinds.iter().zip(&mut times) {
            if crate::interrupt::is_set() {
                return Err(Failure::Broken("interrupted".to_owned()));
            }
            let trips = if *awake { arguments.trips } else { arguments.trips / 4 + 1 };
            let mut round = match way {
                Way::Channel => by_channel(&scratch.shm_dir(), *awake, trips)?,
                Way::Socket => by_socket(*awake, trips)?,
            };
            round.sort_unstable();
            times.push(round);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let [channel_awake, socket_awake, channel_asleep, socket_asleep] = &times;
    let (interrupts, deaths, tokens, restarts) = deaths(&scratch, arguments.kills)?;
    let report = Report {
        trips: arguments.trips,
        rounds: arguments.rounds,
        awake: pair(channel_awake, socket_awake),
        asleep: pair(channel_asleep, socket_asleep),
        interrupt: micros(interrupts),
        death_learned: micros(deaths),
        tokens_read_after_death: tokens,
        restart: micros(restarts),
    };
    print(&report);
    if arguments.json {
        output::json(&report)?;
    }
    Ok(())
}

fn percentile(sorted: &[u64], percent: usize) -> u64 {
    sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).map_or(0, |v| *v)
}

/// Medians of the rounds' percentiles.
fn trips(rounds: &[Vec<u64>]) -> Trips {
    let of = |percent| {
        let mut values: Vec<_> = rounds.iter().map(|round| percentile(round, percent)).collect();
        values.sort_unstable();
        percentile(&values, 50)
    };
    Trips { p50_ns: of(50), p99_ns: of(99) }
}

fn pair(channel: &[Vec<u64>], socket: &[Vec<u64>]) -> Pair {
    let mut ratios: Vec<f64> = channel
        .iter()
        .zip(socket)
        .map(|(channel, socket)| {
            percentile(socket, 50) as f64 / percentile(channel, 50).max(1) as f64
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    let ratio = ratios.get(ratios.len() / 2).copied().unwrap_or(0.0);
    let socket_over_channel = (ratio * 100.0).round() / 100.0;
    Pair { channel: trips(channel), socket_pair: trips(socket), socket_over_channel }
}

fn micros(mut times: Vec<Duration>) -> Micros {
    times.sort_unstable();
    let us = |time: Option<&Duration>| {
        time.map_or(0.0, |time| (time.as_nanos() as f64 / 100.0).round() / 10.0)
    };
    Micros { p50_us: us(times.get(times.len() / 2)), max_us: us(times.last()) }
}

fn spins(awake: bool) -> Spins {
    if awake { Spins::MANY } else { Spins(0) }
}

fn id() -> Result<SegmentId, Failure> {
    Ok(SegmentId::new("trip")?)
}

fn far_ns() -> u64 {
    monotonic_ns() + PATIENCE.as_nanos() as u64
}

fn spawn(peer: &str, stdin: Stdio) -> std::io::Result<Child> {
    Process::new(std::env::current_exe()?)
        .args(["bench", "channel", "--peer", peer])
        .stdin(stdin)
        .stdout(Stdio::null())
        .spawn()
}

/// Asleep, the other side is given the time to fall asleep.
fn between(awake: bool) {
    if !awake {
        std::thread::sleep(Duration::from_micros(60));
    }
}

fn by_channel(dir: &Path, awake: bool, trips: u32) -> Result<Vec<u64>, Failure> {
    let (channel, mut input, mut output) =
        EngineChannel::create(&ShmDir::new(dir), &id()?, spins(awake))?;
    let mut child = spawn(&format!("channel,{awake},{trips},{}", dir.display()), Stdio::null())?;
    if !channel.status().wait_attached(far_ns()) {
        return Err(Failure::Broken("the other process did not attach".to_owned()));
    }
    output.learn_peer();
    let mut times = Vec::with_capacity(trips as usize);
    let mut buffer = [0; 64];
    for trip in 0..trips {
        between(awake);
        let began_ns = monotonic_ns();
        let mut request = [0; REQUEST_BYTES];
        request[..4].copy_from_slice(&trip.to_le_bytes());
        // The worker asks for more when it has answered.
        let mut status = channel.status().get()?;
        while status == Status::ExecInfer {
            status = channel.status().wait_while(status, far_ns())?;
        }
        input.execute(&request)?;
        if !output.wait_readable(1, far_ns())? {
            return Err(Failure::Broken("no answer".to_owned()));
        }
        let Some(frame) = output.try_read_frame(&mut buffer)? else {
            return Err(Failure::Wrong("half a frame".to_owned()));
        };
        times.push(monotonic_ns() - began_ns);
        if frame.tag != u64::from(trip) || frame.payload_bytes != ANSWER_BYTES {
            return Err(Failure::Wrong(format!("trip {trip} has another's answer")));
        }
    }
    child.wait()?;
    Ok(times)
}

fn by_socket(awake: bool, trips: u32) -> Result<Vec<u64>, Failure> {
    let (mut ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(awake)?;
    theirs.set_nonblocking(awake)?;
    let mut child = spawn(&format!("socket,{awake},{trips},"), Stdio::from(OwnedFd::from(theirs)))?;
    // Whether it is there shows with the first trip, which is not counted.
    let mut times = Vec::with_capacity(trips as usize);
    for trip in 0..trips {
        between(awake);
        let began_ns = monotonic_ns();
        let mut request = [0; REQUEST_BYTES];
        request[..4].copy_from_slice(&trip.to_le_bytes());
        ours.write_all(&request)?;
        let mut answer = [0; ANSWER_BYTES];
        read(&mut ours, &mut answer)?;
        if trip > 0 {
            times.push(monotonic_ns() - began_ns);
        }
        if answer[..4] != trip.to_le_bytes() {
            return Err(Failure::Wrong(format!("trip {trip} has another's answer")));
        }
    }
    child.wait()?;
    Ok(times)
}

/// Reads all of `out`, spinning where the socket does not block.
fn read(socket: &mut UnixStream, out: &mut [u8]) -> Result<(), Failure> {
    let mut pace = Pace::new(PATIENCE);
    let mut at = 0;
    while at < out.len() {
        match socket.read(&mut out[at..]) {
            Ok(0) => return Err(Failure::Broken("the other process has gone".to_owned())),
            Ok(count) => at += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => pace.wait()?,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The other process.
fn answer(peer: &str) -> Result<(), Failure> {
    let parts: Vec<_> = peer.splitn(4, ',').collect();
    let [way, awake, trips, dir] = parts[..] else {
        return Err(Failure::Broken(format!("peer {peer}")));
    };
    let (awake, trips): (bool, u32) = (awake.parse()?, trips.parse()?);
    if way == "socket" {
        let mut socket = UnixStream::from(rustix::io::dup(std::io::stdin())?);
        for _ in 0..trips {
            let mut request = [0; REQUEST_BYTES];
            read(&mut socket, &mut request)?;
            socket.write_all(&request[..ANSWER_BYTES])?;
        }
        return Ok(());
    }
    let (channel, mut input, mut output) =
        WorkerChannel::attach(&ShmDir::new(dir), &id()?, spins(awake))?;
    let mut seen = Status::Idle;
    for _ in 0..trips {
        let status = channel.status().wait_while(seen, far_ns())?;
        if status != Status::ExecInfer {
            return Err(Failure::Wrong(format!("asked for {status:?}")));
        }
        let mut request = [0; REQUEST_BYTES];
        input.read(&mut request)?;
        let [a, b, c, d, ..] = request;
        let id = u32::from_le_bytes([a, b, c, d]);
        let token = TokenRecord { id, ..TokenRecord::default() };
        output.send_frame(Kind::Tokens, id.into(), false, token_bytes(&[token]), far_ns())?;
        channel.status().request_data()?;
        seen = Status::ReqData;
    }
    Ok(())
}

type Deaths = (Vec<Duration>, Vec<Duration>, u64, Vec<Duration>);

/// Interrupts a streaming worker, kills it, reads what it left, restarts it.
fn deaths(scratch: &Scratch, kills: u32) -> Result<Deaths, Failure> {
    let (mut interrupts, mut deaths, mut restarts) = (Vec::new(), Vec::new(), Vec::new());
    let mut tokens_after = 0;
    let dir = ShmDir::new(scratch.shm_dir());
    let worker = Worker::start(&std::env::current_exe()?, &dir, &SegmentId::new("worker")?)?;
    let config = LoaderConfig {
        segment_id: scratch.segment_id(),
        shm_dir: scratch.shm_dir(),
        capacity_bytes: 64 * 4096,
        reserved_slots: Some(0),
        shard_bytes: 4096,
        block_bytes: 4096,
        local_rank_size: 1,
        backend: "memory:bench".to_owned(),
        memory_backend_bytes: 1 << 20,
        ..LoaderConfig::default()
    };
    let setup = Setup { config, events_dir: None, device_shards: 16, seed: 1 };
    for _ in 0..kills {
        let answers = worker.load_weights(&setup, PATIENCE)?;
        match answers.recv_timeout(PATIENCE) {
            Ok(Heard::Outcome(Outcome::Ready)) => {}
            other => return Err(Failure::Broken(format!("the worker says {other:?}"))),
        }
        let slow = Command::Generate { tokens: u32::MAX, pause_us: 1000 };
        let answers = worker.send(&slow, 1, PATIENCE)?;
        let _first = answers.recv_timeout(PATIENCE);
        interrupts.push(worker.interrupt(PATIENCE)?);

        let quick = Command::Generate { tokens: u32::MAX, pause_us: 20 };
        let answers = worker.send(&quick, 1, PATIENCE)?;
        let _first = answers.recv_timeout(PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
        let pid = nix::unistd::Pid::from_raw(worker.pid() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL)?;
        let killed = Instant::now();
        // Everything that it sent, and then that there is nothing more.
        while let Ok(heard) = answers.recv_timeout(PATIENCE) {
            if let Heard::Tokens { tokens, .. } = heard {
                tokens_after += tokens.len() as u64;
            }
        }
        deaths.push(killed.elapsed());
        restarts.push(worker.restart()?.took);
    }
    Ok((interrupts, deaths, tokens_after, restarts))
}

fn print(report: &Report) {
    let mut table =
        output::table(["round trip", "channel p50 / p99 ns", "socket pair p50 / p99 ns", "ratio"]);
    for (name, pair) in [("both awake", &report.awake), ("both asleep", &report.asleep)] {
        let Pair { channel, socket_pair, socket_over_channel } = pair;
        table.add_row([
            name.to_owned(),
            format!("{} / {}", channel.p50_ns, channel.p99_ns),
            format!("{} / {}", socket_pair.p50_ns, socket_pair.p99_ns),
            format!("{socket_over_channel:.2}"),
        ]);
    }
    println!("{table}");
    let mut table = output::table(["", "p50 us", "max us"]);
    for (name, times) in [
        ("interrupt answered", &report.interrupt),
        ("death learned, stream read to its end", &report.death_learned),
        ("restarted and attached", &report.restart),
    ] {
        let row = [name.to_owned(), format!("{:.1}", times.p50_us), format!("{:.1}", times.max_us)];
        table.add_row(row);
    }
    println!("{table}");
}
