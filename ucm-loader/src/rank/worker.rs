//! The child's side: an engine, a piece of memory that plays its device, a loop.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io::{BufRead, Write};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ucm_core::device::HostDevice;
use ucm_core::{DevicePtr, ShardKey};
use ucm_posix::monotonic_ns;

use crate::backend::recorder::EventLog;
use crate::content;
use crate::engine::{Engine, Parts, SubmitError};
use crate::rank::protocol::{Command, Done, Outcome, Reply, Request, Setup};
use crate::replay::trace::block_id;
use crate::task::{ShardTarget, TaskHandle};

/// How long a rank waits for its backend when it is told to stop.
const STOP_PATIENCE: Duration = Duration::from_secs(30);
/// How many reasons of failures an answer carries.
const REASONS: usize = 4;

/// Memory that plays a device: page-aligned, never touched by two commands at
/// a time (the parent gives each its own range).
struct DeviceMemory {
    base: NonNull<u8>,
    layout: Layout,
    shard_bytes: usize,
}

// SAFETY: plain memory; who may touch which range is the parent's word, as it
// is an engine's user's word on a real device.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    fn new(shards: u64, shard_bytes: u64) -> Result<Self, String> {
        let too_large = || format!("a device of {shards} shards of {shard_bytes} bytes");
        let len = shards.checked_mul(shard_bytes).ok_or_else(too_large)?;
        let len = usize::try_from(len).map_err(|_| too_large())?.max(1);
        let layout = Layout::from_size_align(len, 4096).map_err(|_| too_large())?;
        // SAFETY: at least one byte.
        let base = unsafe { alloc_zeroed(layout) };
        let base =
            NonNull::new(base).ok_or_else(|| format!("out of memory for {}", too_large()))?;
        Ok(Self { base, layout, shard_bytes: shard_bytes as usize })
    }

    fn shards(&self) -> u64 {
        (self.layout.size() / self.shard_bytes) as u64
    }

    /// The bytes of shard `at`, which the current command alone uses.
    #[allow(clippy::mut_from_ref, reason = "device memory: ranges are handed out by the parent")]
    fn shard(&self, at: u64) -> &mut [u8] {
        assert!(at < self.shards(), "checked when the command came");
        // SAFETY: inside the allocation, by the line above.
        let first = unsafe { self.base.as_ptr().add(at as usize * self.shard_bytes) };
        // SAFETY: initialised (zeroed) memory; the range is this command's
        // alone, and no copy is under way in it between tasks.
        unsafe { std::slice::from_raw_parts_mut(first, self.shard_bytes) }
    }

    fn address(&self, at: u64) -> DevicePtr {
        DevicePtr(self.base.as_ptr() as u64 + at * self.shard_bytes as u64)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

struct Rank {
    engine: Engine,
    device: DeviceMemory,
    seed: u64,
    shards_per_block: u32,
}

/// Runs a rank over `input` and `output` until it is told to stop, or `input`
/// ends. Commands run side by side, each answered when it is done.
///
/// # Errors
/// When the streams fail, or the first line is no [`Setup`].
pub fn run(input: impl BufRead, output: impl Write + Send) -> std::io::Result<()> {
    let output = Mutex::new(output);
    let answer = |id: u64, outcome: Outcome| -> std::io::Result<()> {
        let line = serde_json::to_string(&Reply { id, outcome })?;
        let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(output, "{line}")?;
        output.flush()
    };
    let mut lines = input.lines();
    let Some(first) = lines.next() else { return Ok(()) };
    let rank =
        match serde_json::from_str::<Setup>(&first?).map_err(|e| e.to_string()).and_then(start) {
            Ok(rank) => rank,
            Err(reason) => return answer(0, Outcome::Error(reason)),
        };
    answer(0, Outcome::Ready)?;
    let mut stop_id = None;
    std::thread::scope(|scope| -> std::io::Result<()> {
        for line in lines {
            let Request { id, command } = serde_json::from_str(&line?)?;
            if matches!(command, Command::Stop) {
                stop_id = Some(id);
                break;
            }
            let (rank, answer) = (&rank, &answer);
            scope.spawn(move || {
                let outcome = rank.run(&command).unwrap_or_else(Outcome::Error);
                if let Err(error) = answer(id, outcome) {
                    tracing::error!(%error, "the parent does not listen");
                }
            });
        }
        Ok(())
    })?;
    let drained = rank.engine.shutdown(STOP_PATIENCE);
    match stop_id {
        Some(id) => answer(id, Outcome::Stopped { drained }),
        None => Ok(()),
    }
}

fn start(setup: Setup) -> Result<Rank, String> {
    let config = setup.config.check().map_err(|e| e.to_string())?;
    let log = match &setup.events_dir {
        Some(dir) => Some(Arc::new(EventLog::create(dir, config.rank).map_err(|e| e.to_string())?)),
        None => None,
    };
    let backend = crate::backend::open::open(&config, log.as_ref()).map_err(|e| e.to_string())?;
    let device = DeviceMemory::new(setup.device_shards, config.shard_bytes)?;
    let shards_per_block = config.shards_per_block;
    let parts = Parts { backend, device: Arc::new(HostDevice), log };
    let engine = Engine::start(config, parts).map_err(|e| e.to_string())?;
    Ok(Rank { engine, device, seed: setup.seed, shards_per_block })
}

impl Rank {
    fn run(&self, command: &Command) -> Result<Outcome, String> {
        match command {
            Command::Poison => {
                (0..self.device.shards()).for_each(|at| content::poison(self.device.shard(at)));
                Ok(Outcome::Done(Done::default()))
            }
            Command::Load { blocks, at } => self.load(blocks, *at).map(Outcome::Done),
            Command::Dump { blocks, at } => self.dump(blocks, *at).map(Outcome::Done),
            Command::Verify { blocks, at } => {
                self.check_range(blocks, *at)?;
                let began_ns = monotonic_ns();
                let mut done = Done { began_ns, ..Done::default() };
                self.verify(blocks, *at, &mut done);
                done.ended_ns = monotonic_ns();
                Ok(Outcome::Done(done))
            }
            Command::Serve { blocks, at } => {
                self.check_range(blocks, *at)?;
                let end = at + self.shards(blocks).count() as u64;
                (*at..end).for_each(|at| content::poison(self.device.shard(at)));
                let mut done = self.load(blocks, *at)?;
                self.verify(blocks, *at, &mut done);
                Ok(Outcome::Done(done))
            }
            Command::Metrics => Ok(Outcome::Metrics(self.engine.metrics())),
            Command::Stop => Err("stop is the loop's business".to_owned()),
        }
    }

    fn shards<'a>(&'a self, blocks: &'a [u64]) -> impl Iterator<Item = ShardKey> + 'a {
        blocks.iter().flat_map(move |&number| {
            let block = block_id(self.seed, number);
            (0..self.shards_per_block).map(move |shard| ShardKey::new(block, shard))
        })
    }

    fn check_range(&self, blocks: &[u64], at: u64) -> Result<(), String> {
        let wanted = blocks.len() as u64 * u64::from(self.shards_per_block);
        let room = self.device.shards();
        if at.checked_add(wanted).is_some_and(|end| end <= room) {
            Ok(())
        } else {
            Err(format!("{wanted} shards at {at} do not fit on a device of {room}"))
        }
    }

    fn targets(&self, blocks: &[u64], at: u64) -> Vec<ShardTarget> {
        self.shards(blocks)
            .zip(at..)
            .map(|(key, at)| ShardTarget { key, device: self.device.address(at) })
            .collect()
    }

    fn load(&self, blocks: &[u64], at: u64) -> Result<Done, String> {
        self.check_range(blocks, at)?;
        let began_ns = monotonic_ns();
        // SAFETY: the range was checked, and is this command's alone.
        let task = unsafe { self.engine.load(self.targets(blocks, at), None) };
        self.finish(began_ns, task)
    }

    fn dump(&self, blocks: &[u64], at: u64) -> Result<Done, String> {
        self.check_range(blocks, at)?;
        for (key, at) in self.shards(blocks).zip(at..) {
            content::fill(self.device.shard(at), self.seed, &key, 0);
        }
        let began_ns = monotonic_ns();
        // SAFETY: as in `load`.
        let task = unsafe { self.engine.dump(self.targets(blocks, at), None) };
        self.finish(began_ns, task)
    }

    fn finish(&self, began_ns: u64, task: Result<TaskHandle, SubmitError>) -> Result<Done, String> {
        let task = task.map_err(|e| e.to_string())?;
        // The task's own deadline ends every shard; a second as long covers
        // loads that were under way then.
        let patience = self.engine.config().timeout * 2;
        let report = task.wait(patience).map_err(|e| e.to_string())?;
        let reasons = report.failures.iter().take(REASONS);
        Ok(Done {
            began_ns,
            ended_ns: monotonic_ns(),
            hits: report.hits,
            owned: report.owned,
            waited: report.waited,
            failed_shards: report.failures.len() as u64,
            reasons: reasons
                .map(|f| format!("block {} shard {}: {}", f.key.block, f.key.shard, f.error))
                .collect(),
            ..Done::default()
        })
    }

    fn verify(&self, blocks: &[u64], at: u64, done: &mut Done) {
        for (key, at) in self.shards(blocks).zip(at..) {
            let bytes = self.device.shard(at);
            match content::verify(bytes, self.seed, &key, 0) {
                None => done.verified_bytes += bytes.len() as u64,
                Some(offset) => {
                    done.mismatched_shards += 1;
                    if done.reasons.len() < REASONS {
                        done.reasons.push(format!(
                            "block {} shard {}: byte {offset} is wrong",
                            key.block, key.shard
                        ));
                    }
                }
            }
        }
    }
}
