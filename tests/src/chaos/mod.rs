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
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::product::Product;
use crate::rank_process::Target;
use crate::rng::Rng;
use blows::Stops;
use keeper::{Keeper, Tally};
use traffic::Traffic;
pub use verdict::Verdict;

/// Fewer than the traffic's blocks need, so that much is evicted and loaded again.
const SLOTS: u64 = 2048;

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
    pub(crate) product: Product,
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

/// Runs chaos and says what came of it.
///
/// # Errors
/// When it cannot be set up, in words.
pub fn run(options: &Options) -> Result<Verdict, String> {
    let product = Product::new(options.program.clone(), options.ranks, SLOTS, options.seed)?;
    // Held from the beginning, so that it is one segment from first to last.
    let segment = product.segment()?;
    let mut rng = Rng::new(options.seed);
    let run = Run {
        product,
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
