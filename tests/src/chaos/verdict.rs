//! The audit after chaos, and the figures.

use std::sync::Arc;

use serde::Serialize;
use ucm_core::segment::counters::Counter;
use ucm_posix::Segment;

use crate::chaos::Run;
use crate::chaos::keeper::Tally;
use crate::product::{audit_segment, audit_store, compare_slots};

/// The figures; as JSON the last line that is printed.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Figures {
    /// Processes that were killed, from outside or at a crash point.
    pub deaths: u64,
    /// Processes started in the place of dead ones.
    pub restarts: u64,
    /// Processes that stood still for a while.
    pub stops: u64,
    /// Claims of the dead that were undone.
    pub reaped_claims: u64,
    /// Pins of the dead that were given back.
    pub reaped_pins: u64,
    /// Waits that ended because their owner was dead.
    pub owner_deaths_seen: u64,
    /// Tasks of the living that went through.
    pub tasks_ok: u64,
    /// Tasks of the living of which a shard failed.
    pub tasks_failed: u64,
    /// Shards with wrong bytes, on a device, in the cache or in the store.
    pub mismatched_shards: u64,
    /// What the audit found, and processes that hung or ended by themselves.
    pub audit_violations: u64,
    /// The longest task of a living rank while nobody stood still.
    pub longest_stall_ms: u64,
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The figures.
    pub figures: Figures,
    /// Deaths before the process was ready.
    pub deaths_at_start: u64,
    /// The longest task of a living rank while somebody stood still.
    pub longest_behind_stop_ms: u64,
    /// Blocks that the store has.
    pub stored_blocks: u64,
    /// Slots that the cache had filled at the end.
    pub ready_slots: u64,
    /// Everything that is wrong.
    pub findings: Vec<String>,
    /// Why tasks failed, the first few.
    pub reasons: Vec<String>,
}

impl Verdict {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.figures.audit_violations == 0 && self.figures.mismatched_shards == 0
    }
}

/// Everybody has left or is dead.
pub(crate) fn reach(run: &Run, segment: &Arc<Segment>, tallies: &[Tally], stops: u64) -> Verdict {
    let mut findings: Vec<String> = tallies.iter().flat_map(|it| it.violations.clone()).collect();
    let mut wrong_shards = Vec::new();
    audit_segment(segment, &mut findings);
    let seed = run.product.setup.seed;
    let ready_slots = compare_slots(segment, seed, &mut wrong_shards);
    let known = run.traffic.stored();
    let stored_blocks = audit_store(&run.product.setup, &known, &mut findings, &mut wrong_shards);
    let sum = |field: fn(&Tally) -> u64| tallies.iter().map(field).sum::<u64>();
    let longest = |field: fn(&Tally) -> u64| tallies.iter().map(field).max().unwrap_or(0);
    let plane = segment.plane();
    let ns_to_ms = |ns: u64| ns.div_ceil(1_000_000);
    let figures = Figures {
        deaths: sum(|it| it.deaths),
        restarts: sum(|it| it.restarts),
        stops,
        reaped_claims: plane.count(Counter::ReapedClaims) + plane.count(Counter::Quarantined),
        reaped_pins: plane.count(Counter::ReapedPins),
        owner_deaths_seen: plane.count(Counter::OwnerDeathsSeen),
        tasks_ok: sum(|it| it.tasks_ok),
        tasks_failed: sum(|it| it.tasks_failed),
        mismatched_shards: sum(|it| it.mismatched_shards) + wrong_shards.len() as u64,
        audit_violations: findings.len() as u64,
        longest_stall_ms: ns_to_ms(longest(|it| it.longest_ns)),
    };
    findings.extend(wrong_shards);
    Verdict {
        figures,
        deaths_at_start: sum(|it| it.deaths_at_start),
        longest_behind_stop_ms: ns_to_ms(longest(|it| it.longest_behind_stop_ns)),
        stored_blocks,
        ready_slots,
        findings,
        reasons: tallies.iter().flat_map(|it| it.reasons.clone()).collect(),
    }
}
