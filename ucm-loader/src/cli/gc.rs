//! `ucm gc`: remove segments that nobody uses any more.

use std::path::PathBuf;

use serde::Serialize;
use ucm_posix::ShmDir;
use ucm_posix::gc::{FoundSegment, State, collect, scan};

use crate::cli::Failure;
use crate::cli::output;

/// Remove segments none of whose participants is alive, and worker channels
/// whose two ends are gone.
///
/// Who is alive is asked of the kernel (each participant holds a lock), never
/// of a file's age or name. Persistent segments stay unless --all is given.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Remove persistent segments too
    #[arg(long)]
    all: bool,
    /// Say what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    id: String,
    state: String,
    bytes: u64,
    live_participants: usize,
    persistent: bool,
    action: &'static str,
}

#[derive(Serialize)]
struct Report {
    segments: Vec<Row>,
    removed: usize,
    removed_bytes: u64,
    removed_channels: u32,
    failed: usize,
}

fn row(found: &FoundSegment, action: &'static str) -> Row {
    Row {
        id: found.id.to_string(),
        state: format!("{:?}", found.state).to_lowercase(),
        bytes: found.bytes,
        live_participants: found.live.len(),
        persistent: found.persist,
        action,
    }
}

/// Runs it.
///
/// # Errors
/// When the directory cannot be read, or something could not be removed.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let dir = ShmDir::new(&arguments.shm_dir);
    let mut rows = Vec::new();
    let mut failures = Vec::new();
    let mut removed_channels = 0;
    if arguments.dry_run {
        for found in scan(&dir)? {
            let goes = match found.state {
                State::Dead => !found.persist || arguments.all,
                State::Corrupt | State::OtherBoot | State::Orphan => true,
                _ => false,
            };
            rows.push(row(&found, if goes { "would remove" } else { "keep" }));
        }
    } else {
        let collected = collect(&dir, arguments.all)?;
        rows.extend(collected.removed.iter().map(|found| row(found, "removed")));
        rows.extend(collected.kept.iter().map(|found| row(found, "kept")));
        removed_channels = ucm_posix::channel::collect(&dir)?;
        failures = collected.failed.iter().map(|failed| format!("{failed:?}")).collect();
    }
    let gone = || rows.iter().filter(|row| row.action == "removed");
    let (removed, removed_bytes) = (gone().count(), gone().map(|row| row.bytes).sum());
    let mut table = output::table(["segment", "state", "size", "alive", "persistent", "action"]);
    for row in &rows {
        table.add_row([
            row.id.clone(),
            row.state.clone(),
            output::bytes(row.bytes),
            row.live_participants.to_string(),
            row.persistent.to_string(),
            row.action.to_owned(),
        ]);
    }
    println!("{table}");
    if removed_channels > 0 {
        println!("{removed_channels} worker channels removed whose two ends are gone");
    }
    if arguments.json {
        output::json(&Report {
            segments: rows,
            removed,
            removed_bytes,
            removed_channels,
            failed: failures.len(),
        })?;
    }
    if failures.is_empty() { Ok(()) } else { Err(Failure::Wrong(failures.join("; "))) }
}
