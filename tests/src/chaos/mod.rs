//! Traffic on ranks that are killed, stopped and restarted all the time, and an audit after it.
//!
//! Each rank is a process of the product ([`crate::rank_process`]), kept by a
//! thread that starts it, has it serve chat traffic ([`traffic`]) and starts
//! it again when it is dead ([`keeper`]). Blows come from outside ([`blows`])
//! and from inside: every process also dies at a random passing of a random
//! crash point of any layer. At the end everybody leaves, the dead are reaped,
//! and everything that is left is checked ([`verdict`]).
//!
//! The random numbers are seeded; when which process gets how far is not, so a
//! seed repeats a mix, not a run.

pub mod blows;
pub mod keeper;
pub mod traffic;
pub mod verdict;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ucm_loader::LoaderConfig;
use ucm_loader::backend::file::store::Fsync;
use ucm_loader::rank::protocol::Setup;
use ucm_posix::Segment;

use crate::rank_process::Target;
use crate::rng::Rng;
use blows::Stops;
use keeper::{Keeper, Tally};
use traffic::Traffic;
pub use verdict::Verdict;

/// A shard is small: deaths a second are what counts here, not bytes.
const SHARD_BYTES: u64 = 4096;
/// Shards of a block.
pub const SHARDS_PER_BLOCK: u64 = 4;
/// Fewer than the traffic's blocks need, so that much is evicted and loaded again.
const SLOTS: u64 = 2048;
/// Shorter than a hang, much longer than any stall that may be.
const TIMEOUT_MS: u64 = 4_000;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// The product.
    pub program: PathBuf,
    /// How many ranks.
    pub ranks: u32,
    /// For how long.
    pub time: Duration,
    /// Of all random numbers.
    pub seed: u64,
}

/// What all threads of a run share.
pub(crate) struct Run {
    pub(crate) program: PathBuf,
    pub(crate) setup: Setup,
    pub(crate) traffic: Traffic,
    pub(crate) stops: Stops,
    pub(crate) targets: Vec<Target>,
    over: AtomicBool,
}

impl Run {
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }
}

fn setup(options: &Options, shm: &TempDir, store: &TempDir) -> Setup {
    let config = LoaderConfig {
        segment_id: "chaos".to_owned(),
        shm_dir: shm.path().to_owned(),
        capacity_bytes: SLOTS * SHARD_BYTES,
        shard_bytes: SHARD_BYTES,
        block_bytes: SHARDS_PER_BLOCK * SHARD_BYTES,
        local_rank_size: options.ranks,
        backend: format!("posix:{}", store.path().display()),
        backend_workers: 2,
        claim_window: Some(4),
        running_queue_depth: 4096,
        timeout_ms: TIMEOUT_MS,
        // The backend's IO ends with its process: the lock byte, which is what
        // says that it is dead, goes after its last thread.
        io_quarantine_ms: Some(TIMEOUT_MS),
        fsync: Fsync::None,
        ..LoaderConfig::default()
    };
    let device_shards = 2 * traffic::MAX_BLOCKS as u64 * SHARDS_PER_BLOCK;
    Setup { config, events_dir: None, device_shards, seed: options.seed }
}

/// Runs chaos and says what came of it.
///
/// # Errors
/// When it cannot be set up, in words.
pub fn run(options: &Options) -> Result<Verdict, String> {
    let temp = |parent: PathBuf| {
        let made = tempfile::Builder::new().prefix("ucm-chaos-").tempdir_in(&parent);
        made.map_err(|error| format!("a directory in {}: {error}", parent.display()))
    };
    let (shm, store) = (temp("/dev/shm".into())?, temp(std::env::temp_dir())?);
    let setup = setup(options, &shm, &store);
    let config = setup.config.clone().check().map_err(|error| error.to_string())?;
    let segment_options = config.segment_options().map_err(|error| error.to_string())?;
    // Held from the beginning, so that it is one segment from first to last.
    let segment = Segment::open_or_create(&segment_options).map_err(|error| error.to_string())?;
    let segment = Arc::new(segment);
    let mut rng = Rng::new(options.seed);
    let run = Run {
        program: options.program.clone(),
        setup,
        traffic: Traffic::new(options.seed, options.ranks),
        stops: Stops::default(),
        targets: (0..options.ranks).map(|_| Target::default()).collect(),
        over: AtomicBool::new(false),
    };
    let began = Instant::now();
    let (tallies, stops) = std::thread::scope(|scope| {
        let keepers: Vec<_> = (0..options.ranks)
            .map(|rank| {
                let (run, seed) = (&run, rng.number());
                scope.spawn(move || Keeper::new(run, rank, seed).keep())
            })
            .collect();
        let seed = rng.number();
        let striker = scope.spawn({
            let run = &run;
            move || blows::rain(run, seed)
        });
        while began.elapsed() < options.time && !keepers.iter().any(|it| it.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        run.over.store(true, Ordering::SeqCst);
        let stops = striker.join().unwrap_or_default();
        let tallies: Vec<Tally> =
            keepers.into_iter().filter_map(|keeper| keeper.join().ok()).collect();
        (tallies, stops)
    });
    if tallies.len() != options.ranks as usize {
        return Err("a keeper of a rank panicked; see above".to_owned());
    }
    Ok(verdict::reach(&run, &segment, &tallies, stops))
}
