//! What a rank process does, whoever asks and however: an engine and its device.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ucm_core::channel::SubmissionKind;
use ucm_core::device::HostDevice;
use ucm_core::{BlockId, ShardKey};
use ucm_posix::monotonic_ns;

use crate::backend::recorder::EventLog;
use crate::content;
use crate::engine::{Engine, Parts, SubmitError};
use crate::rank::device::DeviceMemory;
use crate::rank::protocol::{Command, Done, Outcome, Setup};
use crate::replay::trace::block_id;
use crate::task::{ShardTarget, TaskHandle, TaskOptions};

/// How long a rank waits for its backend when it is told to stop.
const STOP_PATIENCE: Duration = Duration::from_secs(30);
/// How many reasons of failures an answer carries.
const REASONS: usize = 4;

/// One thing to do, with its blocks named by their ids.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Work {
    /// A submission.
    Blocks { kind: SubmissionKind, blocks: Vec<BlockId>, at: u64 },
    /// Fill the device with poison.
    Poison,
    /// The counters.
    Metrics,
}

impl Work {
    /// What a command means. `None` for those that are the transport's business.
    pub(crate) fn of(command: &Command, seed: u64) -> Option<Self> {
        let (kind, blocks, at) = match command {
            Command::Load { blocks, at } => (SubmissionKind::Load, blocks, *at),
            Command::Dump { blocks, at } => (SubmissionKind::Dump, blocks, *at),
            Command::Verify { blocks, at } => (SubmissionKind::Verify, blocks, *at),
            Command::Serve { blocks, at } => (SubmissionKind::Serve, blocks, *at),
            Command::Lookup { blocks } => (SubmissionKind::Lookup, blocks, 0),
            Command::Poison => return Some(Self::Poison),
            Command::Metrics => return Some(Self::Metrics),
            Command::Generate { .. } | Command::Stop => return None,
        };
        let blocks = blocks.iter().map(|&number| block_id(seed, number)).collect();
        Some(Self::Blocks { kind, blocks, at })
    }
}

/// A started rank.
pub(crate) struct Rank {
    engine: Engine,
    device: DeviceMemory,
    seed: u64,
    shards_per_block: u32,
    /// Tasks under way, which an interrupt cancels.
    running: Mutex<Vec<(u64, TaskHandle)>>,
}

impl Rank {
    /// Starts the engine that `setup` describes.
    pub(crate) fn start(setup: Setup) -> Result<Self, String> {
        let config = setup.config.check().map_err(|e| e.to_string())?;
        let log = match &setup.events_dir {
            Some(dir) => {
                Some(Arc::new(EventLog::create(dir, config.rank).map_err(|e| e.to_string())?))
            }
            None => None,
        };
        let backend =
            crate::backend::open::open(&config, log.as_ref()).map_err(|e| e.to_string())?;
        let device = DeviceMemory::new(setup.device_shards, config.shard_bytes)?;
        let shards_per_block = config.shards_per_block;
        let parts = Parts { backend, device: Arc::new(HostDevice), log };
        let engine = Engine::start(config, parts).map_err(|e| e.to_string())?;
        Ok(Self { engine, device, seed: setup.seed, shards_per_block, running: Mutex::default() })
    }

    /// The seed of block ids and contents.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Ends everything; whether the backend had ended its work.
    pub(crate) fn shutdown(self) -> bool {
        self.engine.shutdown(STOP_PATIENCE)
    }

    /// Begins no more shards of what is under way. Each task still ends, and is
    /// answered, by itself.
    pub(crate) fn cancel_all(&self) {
        self.running().iter().for_each(|(_, task)| task.cancel());
    }

    fn running(&self) -> MutexGuard<'_, Vec<(u64, TaskHandle)>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does it, and waits for its end.
    pub(crate) fn run(&self, work: &Work) -> Outcome {
        match work {
            Work::Poison => {
                (0..self.device.shards()).for_each(|at| content::poison(self.device.shard(at)));
                Outcome::Done(Done::default())
            }
            Work::Metrics => Outcome::Metrics(self.engine.metrics()),
            Work::Blocks { kind, blocks, at } => {
                self.blocks(*kind, blocks, *at).map_or_else(Outcome::Error, Outcome::Done)
            }
        }
    }

    fn blocks(&self, kind: SubmissionKind, blocks: &[BlockId], at: u64) -> Result<Done, String> {
        if kind == SubmissionKind::Lookup {
            return self.lookup(blocks);
        }
        self.check_range(blocks, at)?;
        match kind {
            SubmissionKind::Load => self.load(blocks, at),
            SubmissionKind::Dump => self.dump(blocks, at),
            SubmissionKind::Verify => {
                let began_ns = monotonic_ns();
                let mut done = Done { began_ns, ..Done::default() };
                self.verify(blocks, at, &mut done);
                done.ended_ns = monotonic_ns();
                Ok(done)
            }
            SubmissionKind::Serve | SubmissionKind::Lookup => {
                let end = at + self.shards(blocks).count() as u64;
                (at..end).for_each(|at| content::poison(self.device.shard(at)));
                let mut done = self.load(blocks, at)?;
                self.verify(blocks, at, &mut done);
                Ok(done)
            }
        }
    }

    fn shards<'a>(&'a self, blocks: &'a [BlockId]) -> impl Iterator<Item = ShardKey> + 'a {
        blocks.iter().flat_map(move |&block| {
            (0..self.shards_per_block).map(move |shard| ShardKey::new(block, shard))
        })
    }

    fn check_range(&self, blocks: &[BlockId], at: u64) -> Result<(), String> {
        let wanted = blocks.len() as u64 * u64::from(self.shards_per_block);
        let room = self.device.shards();
        if at.checked_add(wanted).is_some_and(|end| end <= room) {
            Ok(())
        } else {
            Err(format!("{wanted} shards at {at} do not fit on a device of {room}"))
        }
    }

    fn targets(&self, blocks: &[BlockId], at: u64) -> Vec<ShardTarget> {
        self.shards(blocks)
            .zip(at..)
            .map(|(key, at)| ShardTarget { key, device: self.device.address(at) })
            .collect()
    }

    fn lookup(&self, blocks: &[BlockId]) -> Result<Done, String> {
        let began_ns = monotonic_ns();
        let prefix = self.engine.prefix(blocks).map_err(|e| e.to_string())?;
        Ok(Done {
            began_ns,
            ended_ns: monotonic_ns(),
            ready_blocks: prefix.ready_blocks as u64,
            found_blocks: prefix.found_blocks as u64,
            ..Done::default()
        })
    }

    fn load(&self, blocks: &[BlockId], at: u64) -> Result<Done, String> {
        let began_ns = monotonic_ns();
        // SAFETY: the range was checked, and is this command's alone.
        let task = unsafe { self.engine.load(self.targets(blocks, at), &TaskOptions::default()) };
        self.finish(began_ns, task)
    }

    fn dump(&self, blocks: &[BlockId], at: u64) -> Result<Done, String> {
        for (key, at) in self.shards(blocks).zip(at..) {
            content::fill(self.device.shard(at), self.seed, &key, 0);
        }
        let began_ns = monotonic_ns();
        // SAFETY: as in `load`.
        let task = unsafe { self.engine.dump(self.targets(blocks, at), &TaskOptions::default()) };
        self.finish(began_ns, task)
    }

    fn finish(&self, began_ns: u64, task: Result<TaskHandle, SubmitError>) -> Result<Done, String> {
        let task = task.map_err(|e| e.to_string())?;
        // Known by when it began, and where its state is: no two are alike.
        let name = Arc::as_ptr(&task.state) as u64;
        let twin = TaskHandle { state: Arc::clone(&task.state), nudge: Arc::clone(&task.nudge) };
        self.running().push((name, twin));
        // The task's own deadline ends every shard; a second as long covers
        // loads that were under way then.
        let patience = self.engine.config().timeout * 2;
        let report = task.wait(patience).map_err(|e| e.to_string());
        self.running().retain(|(other, _)| *other != name);
        let report = report?;
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

    fn verify(&self, blocks: &[BlockId], at: u64, done: &mut Done) {
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
