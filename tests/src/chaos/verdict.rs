//! The audit after chaos, and the figures.

use std::collections::HashSet;
use std::sync::Arc;

use serde::Serialize;
use ucm_core::cache::Audit;
use ucm_core::participant::Role;
use ucm_core::segment::counters::Counter;
use ucm_core::slot::word::Status;
use ucm_core::{BlockId, ShardKey};
use ucm_loader::backend::file::{FileOptions, FileStore};
use ucm_loader::backend::threaded::BlockingStore;
use ucm_loader::content;
use ucm_loader::replay::trace::block_id;
use ucm_posix::{Attachment, Segment};

use crate::audit::violations;
use crate::chaos::keeper::Tally;
use crate::chaos::{Run, SHARDS_PER_BLOCK};

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
    let ready_slots = compare_slots(segment, run.setup.seed, &mut wrong_shards);
    let stored_blocks = audit_store(run, &mut findings, &mut wrong_shards);
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

/// No violation, no pin, nothing in the middle of something, nobody's place left.
fn audit_segment(segment: &Arc<Segment>, findings: &mut Vec<String>) {
    match Attachment::join(Arc::clone(segment), Role::Scout, None, None) {
        Ok(scout) => {
            scout.cache().reap_dead();
        }
        Err(error) => findings.push(format!("the auditor cannot join: {error}")),
    }
    findings.extend(violations(segment).iter().map(|violation| format!("{violation:?}")));
    let plane = segment.plane();
    let audit = Audit::new(&plane);
    let (census, pins) = (audit.census(), audit.pins());
    if pins != 0 {
        findings.push(format!("{pins} pins leaked"));
    }
    if census.total() != plane.geometry().shape.slot_count {
        findings.push(format!("slots are missing: {census:?}"));
    }
    if census.claimed + census.inserting + census.loading + census.tagged != 0 {
        findings.push(format!("somebody's work was left: {census:?}"));
    }
    if plane.attached_ranks() != 0 {
        findings.push(format!("{} places were left", plane.attached_ranks()));
    }
}

/// Every READY slot holds what its key demands.
fn compare_slots(segment: &Segment, seed: u64, wrong: &mut Vec<String>) -> u64 {
    let plane = segment.plane();
    let shape = plane.geometry().shape;
    let audit = Audit::new(&plane);
    let mut ready = 0;
    for slot in 0..shape.slot_count {
        let Some((key, Status::Ready)) = audit.slot(slot) else { continue };
        let Some(first) = segment.slot_ptr(slot) else { continue };
        ready += 1;
        // SAFETY: `slot_ptr` is valid for `shard_bytes` while the segment is
        // held, and everybody who could write has left or is dead.
        let bytes =
            unsafe { std::slice::from_raw_parts(first.as_ptr(), shape.shard_bytes as usize) };
        if let Some(at) = content::verify(bytes, seed, &key, 0) {
            wrong.push(format!("slot {slot}, {key:?}: byte {at} is wrong"));
        }
    }
    ready
}

/// What was stored is there whole, nothing half made is visible, nothing was
/// put aside, and what dead writers left is swept by the next opening.
fn audit_store(run: &Run, findings: &mut Vec<String>, wrong: &mut Vec<String>) -> u64 {
    let config = match run.setup.config.clone().check() {
        Ok(config) => config,
        Err(error) => {
            findings.push(error.to_string());
            return 0;
        }
    };
    let root = run.setup.config.backend.trim_start_matches("posix:").to_owned();
    let store = match FileStore::open(&FileOptions::new(&root, config.store_geometry())) {
        Ok(store) => store,
        Err(error) => {
            findings.push(format!("the store does not open: {error}"));
            return 0;
        }
    };
    for (part, what) in [("tmp", "was not swept"), ("bad", "was put aside")] {
        let entries = std::fs::read_dir(store.root().join(part)).into_iter().flatten().flatten();
        findings.extend(entries.map(|entry| format!("{}: {what}", entry.path().display())));
    }
    let mut compare = |block: BlockId, findings: &mut Vec<String>| {
        for shard in 0..SHARDS_PER_BLOCK as u32 {
            let key = ShardKey::new(block, shard);
            let mut bytes = vec![0; config.shard_bytes as usize];
            match store.load(key, &mut bytes) {
                Ok(_) => {
                    if let Some(at) = content::verify(&bytes, run.setup.seed, &key, 0) {
                        wrong.push(format!("stored {key:?}: byte {at} is wrong"));
                    }
                }
                Err(error) => findings.push(format!("stored {key:?}: {error}")),
            }
        }
    };
    let known: HashSet<BlockId> =
        run.traffic.stored().iter().map(|&number| block_id(run.setup.seed, number)).collect();
    known.iter().for_each(|&block| compare(block, findings));
    // Blocks whose writer died after the last step are there too.
    let mut visible = 0;
    for dir in std::fs::read_dir(store.root().join("blocks")).into_iter().flatten().flatten() {
        for entry in std::fs::read_dir(dir.path()).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let id = name.strip_suffix(".kv").and_then(|hex| u128::from_str_radix(hex, 16).ok());
            match id.map(|id| BlockId(id.to_be_bytes())) {
                Some(block) if known.contains(&block) => {}
                Some(block) => compare(block, findings),
                None => findings.push(format!("{name}: not a block")),
            }
            visible += 1;
        }
    }
    visible
}
