//! `ucm inspect ID`: what is in a segment. Read-only, also on a live one.

use std::path::PathBuf;

use serde::Serialize;
use ucm_core::cache::{Audit, Census};
use ucm_core::segment::counters::Counter;
use ucm_core::{Liveness, ParticipantId};
use ucm_posix::{OfdLiveness, SegmentId, SegmentWatcher, ShmDir};

use crate::cli::Failure;
use crate::cli::output;

/// Show slots by state, pins by participant, who lives, and the counters.
///
/// Maps the segment read-only: it takes no place in it and changes nothing.
/// On a live segment the figures are of slightly different moments.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// The segment's id
    id: String,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// Also check that index and slots agree, and list what is wrong; on a
    /// live segment, some of it may be moments
    #[arg(long)]
    audit: bool,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Participant {
    place: u32,
    role: String,
    alive: bool,
    pid: u32,
    device: Option<u32>,
    epoch: u32,
    pins: u64,
}

#[derive(Serialize)]
struct Slots {
    total: u32,
    free: u32,
    claimed: u32,
    inserting: u32,
    loading: u32,
    ready: u32,
    failed: u32,
    prepared: u32,
    quarantined: u32,
    tagged: u32,
}

#[derive(Serialize)]
struct Report {
    id: String,
    nonce: String,
    created_unix_s: u64,
    persistent: bool,
    poisoned: bool,
    shard_bytes: u64,
    shards_per_block: u32,
    slot_stride_bytes: u64,
    reserved_slots: u32,
    control_bytes: u64,
    data_bytes: u64,
    local_rank_size: u32,
    attached_ranks: u32,
    slots: Slots,
    participants: Vec<Participant>,
    counters: std::collections::BTreeMap<String, u64>,
    violations: Option<Vec<String>>,
}

/// Runs it.
///
/// # Errors
/// When there is no such segment, or with `--audit` something is wrong in it.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let dir = ShmDir::new(&arguments.shm_dir);
    let watcher = SegmentWatcher::open(&dir, &SegmentId::new(&arguments.id)?)?;
    let liveness = watcher.liveness();
    let report = look(arguments, &watcher, &liveness);
    print(&report);
    if arguments.json {
        output::json(&report)?;
    }
    match report.violations {
        Some(violations) if !violations.is_empty() => {
            Err(Failure::Wrong(format!("{} violations", violations.len())))
        }
        _ => Ok(()),
    }
}

fn look(arguments: &Arguments, watcher: &SegmentWatcher, liveness: &OfdLiveness) -> Report {
    let plane = watcher.plane();
    let geometry = plane.geometry();
    let shape = geometry.shape;
    let audit = Audit::new(&plane);
    let alive = |id: ParticipantId| liveness.is_held(id);
    let participants = plane
        .participants()
        .filter(|(_, view)| view.live)
        .map(|(id, view)| Participant {
            place: id.index(),
            role: view
                .role
                .map_or_else(|| "unknown".to_owned(), |r| format!("{r:?}").to_lowercase()),
            alive: alive(id),
            pid: view.pid,
            device: (view.device != u32::MAX).then_some(view.device),
            epoch: view.epoch,
            pins: audit.pins_of(id),
        })
        .collect();
    let violations = arguments.audit.then(|| {
        let mut found = Vec::new();
        audit.check(liveness, |violation| found.push(format!("{violation:?}")));
        found
    });
    let counters =
        Counter::ALL.iter().map(|&c| (snake_case(&format!("{c:?}")), plane.count(c))).collect();
    Report {
        id: arguments.id.clone(),
        nonce: format!("{:016x}", plane.nonce()),
        created_unix_s: plane.created_unix_s(),
        persistent: plane.is_persistent(),
        poisoned: plane.is_poisoned(),
        shard_bytes: shape.shard_bytes,
        shards_per_block: shape.shards_per_block,
        slot_stride_bytes: geometry.stride.bytes(),
        reserved_slots: shape.reserved_slots,
        control_bytes: geometry.control_bytes,
        data_bytes: geometry.data_bytes,
        local_rank_size: shape.local_rank_size,
        attached_ranks: plane.attached_ranks(),
        slots: slots(&audit.census()),
        participants,
        counters,
        violations,
    }
}

fn slots(census: &Census) -> Slots {
    let &Census { free, claimed, inserting, loading, ready, failed, prepared, quarantined, tagged } =
        census;
    let total = census.total();
    Slots { total, free, claimed, inserting, loading, ready, failed, prepared, quarantined, tagged }
}

fn snake_case(name: &str) -> String {
    let mut out = String::with_capacity(name.len() + 4);
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.push(letter.to_ascii_lowercase());
    }
    out
}

fn print(report: &Report) {
    println!(
        "segment {} ({}): {} slots of {} bytes, {} data + {} control{}{}",
        report.id,
        report.nonce,
        report.slots.total,
        report.slot_stride_bytes,
        output::bytes(report.data_bytes),
        output::bytes(report.control_bytes),
        if report.persistent { ", persistent" } else { "" },
        if report.poisoned { ", POISONED" } else { "" },
    );
    let s = &report.slots;
    let mut slots = output::table(["state", "slots"]);
    for (name, count) in [
        ("ready", s.ready),
        ("loading", s.loading),
        ("failed", s.failed),
        ("prepared", s.prepared),
        ("claimed or inserting", s.claimed + s.inserting),
        ("quarantined", s.quarantined),
        ("free", s.free),
        ("tagged for eviction (of the above)", s.tagged),
    ] {
        slots.add_row([name.to_owned(), count.to_string()]);
    }
    println!("{slots}");
    let mut who = output::table(["place", "role", "alive", "pid", "device", "epoch", "pins"]);
    for p in &report.participants {
        who.add_row([
            p.place.to_string(),
            p.role.clone(),
            p.alive.to_string(),
            p.pid.to_string(),
            p.device.map_or_else(|| "-".to_owned(), |d| d.to_string()),
            p.epoch.to_string(),
            p.pins.to_string(),
        ]);
    }
    println!("{who}");
    println!("{} of {} ranks attached", report.attached_ranks, report.local_rank_size);
    let mut counters = output::table(["counter", "since the segment was made"]);
    for (name, count) in report.counters.iter().filter(|(_, count)| **count > 0) {
        counters.add_row([name.clone(), count.to_string()]);
    }
    println!("{counters}");
    for violation in report.violations.iter().flatten() {
        println!("violation: {violation}");
    }
}
