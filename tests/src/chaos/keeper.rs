//! The keeper of one rank: starts its process, gives it work, starts it again when it is dead.

use ucm_loader::rank::protocol::{Command, Done, Outcome};
use ucm_posix::monotonic_ns;

use crate::chaos::Run;
use crate::chaos::traffic::{MAX_BLOCKS, Part};
use crate::product::SHARDS_PER_BLOCK;
use crate::rank_process::{End, Silence};
use crate::rng::Rng;

/// What one keeper has counted.
#[derive(Clone, Default, Debug)]
pub struct Tally {
    /// Processes that were killed, from outside or at a crash point.
    pub deaths: u64,
    /// Of those, while they were starting.
    pub deaths_at_start: u64,
    /// Processes started in the place of a dead one.
    pub restarts: u64,
    /// Tasks that went through.
    pub tasks_ok: u64,
    /// Tasks of which a shard failed, or that were refused.
    pub tasks_failed: u64,
    /// Shards with wrong bytes.
    pub mismatched_shards: u64,
    /// The longest task while nobody stood still.
    pub longest_ns: u64,
    /// The longest task while somebody stood still.
    pub longest_behind_stop_ns: u64,
    /// What must not be: a process that ended by itself or hangs.
    pub violations: Vec<String>,
    /// Why tasks failed, the first few.
    pub reasons: Vec<String>,
}

/// Reasons that are kept.
const REASONS: usize = 4;

/// See the module.
pub(crate) struct Keeper<'a> {
    run: &'a Run,
    rank: u32,
    rng: Rng,
    tally: Tally,
}

impl<'a> Keeper<'a> {
    pub(crate) fn new(run: &'a Run, rank: u32, seed: u64) -> Self {
        Self { run, rank, rng: Rng::new(seed), tally: Tally::default() }
    }

    /// Until the run is over, or something is wrong.
    pub(crate) fn keep(mut self) -> Tally {
        let mut first = true;
        while !self.run.is_over() && self.tally.violations.is_empty() {
            self.tally.restarts += u64::from(!std::mem::take(&mut first));
            match self.life() {
                Ok(()) => {}
                Err(Silence::Dead(End::Killed)) => self.tally.deaths += 1,
                Err(Silence::Dead(end)) => {
                    let what = format!("rank {} ended by itself: {end:?}", self.rank);
                    self.tally.violations.push(what);
                }
                Err(Silence::Hangs) => {
                    let what = format!("rank {} hangs", self.rank);
                    self.tally.violations.push(what);
                }
            }
        }
        self.tally
    }

    /// One process, from its start to its end.
    fn life(&mut self) -> Result<(), Silence> {
        let run = self.run;
        // Some die soon and some late, at whatever point that is.
        let one_in = 1 << (5 + self.rng.below(10));
        let crash = format!("*:{one_in}:{}", self.rng.number() >> 1);
        let target = &run.targets[self.rank as usize];
        let mut process = match run.product.begin(self.rank, Some(&crash), target) {
            Ok(process) => process,
            Err(error) => {
                self.tally.violations.push(format!("no process: {error}"));
                return Ok(());
            }
        };
        match process.hear() {
            Ok(Outcome::Ready) => {}
            Ok(other) => {
                self.tally.violations.push(format!("rank {} did not start: {other:?}", self.rank));
                return Ok(());
            }
            Err(silence) => {
                self.tally.deaths_at_start += u64::from(silence == Silence::Dead(End::Killed));
                return Err(silence);
            }
        }
        let mut number = run.traffic.newest();
        while !run.is_over() {
            let Part { load, dump } = run.traffic.part(number, self.rank);
            if !load.is_empty() {
                let outcome = process.ask(Command::Serve { blocks: load, at: 0 })?;
                self.note(outcome);
            }
            if !dump.is_empty() {
                let at = MAX_BLOCKS as u64 * SHARDS_PER_BLOCK;
                let outcome = process.ask(Command::Dump { blocks: dump.clone(), at })?;
                if self.note(outcome) {
                    run.traffic.store(&dump);
                }
            }
            number += 1;
        }
        process.leave().map(|_drained| ())
    }

    /// Whether the task went through.
    fn note(&mut self, outcome: Outcome) -> bool {
        let tally = &mut self.tally;
        let done = match outcome {
            Outcome::Done(done) => done,
            other => {
                tally.tasks_failed += 1;
                tally.reasons.push(format!("{other:?}"));
                return false;
            }
        };
        let Done { began_ns, ended_ns, failed_shards, mismatched_shards, reasons, .. } = done;
        // A shard that failed is still poison on the device; the rest is wrong.
        tally.mismatched_shards += mismatched_shards.saturating_sub(failed_shards);
        if tally.reasons.len() < REASONS {
            tally.reasons.extend(reasons);
        }
        let took_ns = ended_ns.min(monotonic_ns()).saturating_sub(began_ns);
        let longest = if self.run.stops.overlap(began_ns, ended_ns) {
            &mut tally.longest_behind_stop_ns
        } else {
            &mut tally.longest_ns
        };
        *longest = took_ns.max(*longest);
        if failed_shards == 0 {
            tally.tasks_ok += 1;
        } else {
            tally.tasks_failed += 1;
        }
        failed_shards == 0
    }
}
