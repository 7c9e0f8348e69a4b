//! `ucm store`: what a store of block files holds, whether it is right, and less of it.

use std::path::PathBuf;

use clap::Subcommand;
use serde::Serialize;

use crate::backend::file::collect::{Collected, Limits, collect};
use crate::backend::file::upkeep::{Usage, Verified, geometry, usage, verify};
use crate::cli::Failure;
use crate::cli::output;

/// What can be done.
#[derive(Subcommand, Debug)]
pub enum Arguments {
    /// Say what a store holds and what it takes
    Du(Du),
    /// Read every block and compare all checksums; changes nothing
    Verify(Verify),
    /// Remove the coldest blocks until the store takes no more than a limit
    Gc(Gc),
}

/// Which store.
#[derive(clap::Args, Debug)]
pub struct Du {
    /// The store's directory
    dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

/// Which store.
#[derive(clap::Args, Debug)]
pub struct Verify {
    /// The store's directory
    dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

/// Which store, and how much of it.
#[derive(clap::Args, Debug)]
pub struct Gc {
    /// The store's directory
    dir: PathBuf,
    /// What its blocks may take, in bytes
    #[arg(long)]
    limit_bytes: u64,
    /// Blocks to remove at most
    #[arg(long)]
    batch: Option<usize>,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Held {
    shard_bytes: u64,
    shards_per_block: u32,
    content_tag: String,
    #[serde(flatten)]
    usage: Usage,
}

#[derive(Serialize)]
struct Row {
    path: String,
    problem: String,
}

#[derive(Serialize)]
struct Report {
    files: u64,
    bytes: u64,
    unchecked_shards: u64,
    wrong: usize,
    findings: Vec<Row>,
}

/// Runs it.
///
/// # Errors
/// [`Failure::Wrong`] when a verification found something.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    match arguments {
        Arguments::Du(arguments) => du(arguments),
        Arguments::Verify(arguments) => run_verify(arguments),
        Arguments::Gc(arguments) => gc(arguments),
    }
}

fn du(arguments: &Du) -> Result<(), Failure> {
    let geometry = geometry(&arguments.dir)?;
    let usage = usage(&arguments.dir)?;
    println!("{}: {geometry}", arguments.dir.display());
    let mut table = output::table(["what", "files", "size"]);
    for (what, files, bytes) in [
        ("blocks", usage.blocks, usage.block_bytes),
        ("unfinished", usage.unfinished, usage.unfinished_bytes),
        ("put aside as bad", usage.bad, usage.bad_bytes),
    ] {
        table.add_row([what.to_owned(), files.to_string(), output::bytes(bytes)]);
    }
    println!("{table}");
    if usage.foreign > 0 {
        println!("{} files among the blocks are none", usage.foreign);
    }
    if arguments.json {
        output::json(&Held {
            shard_bytes: geometry.shard_bytes,
            shards_per_block: geometry.shards_per_block,
            content_tag: format!("{:#018x}", geometry.content_tag),
            usage,
        })?;
    }
    Ok(())
}

fn run_verify(arguments: &Verify) -> Result<(), Failure> {
    let geometry = geometry(&arguments.dir)?;
    let bar = output::progress(0, "blocks");
    let verified = verify(&arguments.dir, &geometry, |done, count| {
        bar.set_length(count);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    let Verified { files, bytes, unchecked_shards, findings } = verified;
    for finding in &findings {
        println!("{}: {}", finding.path.display(), finding.problem);
    }
    let wrong = findings.len();
    println!("{files} files, {} compared, {wrong} findings", output::bytes(bytes));
    if arguments.json {
        let row = |finding: &crate::backend::file::upkeep::Finding| Row {
            path: finding.path.display().to_string(),
            problem: finding.problem.to_string(),
        };
        let findings = findings.iter().map(row).collect();
        output::json(&Report { files, bytes, unchecked_shards, wrong, findings })?;
    }
    if wrong == 0 { Ok(()) } else { Err(Failure::Wrong(format!("{wrong} findings"))) }
}

fn gc(arguments: &Gc) -> Result<(), Failure> {
    // Refuses what is no store before anything is made in it.
    geometry(&arguments.dir)?;
    let batch = arguments.batch.unwrap_or(usize::MAX);
    let limit_bytes = arguments.limit_bytes;
    let limits = Limits { limit_bytes, trigger_percent: 100, target_percent: 100, batch };
    let collected = collect(&arguments.dir, &limits)?;
    let Collected { busy, before_bytes, after_bytes, removed_blocks } = collected;
    if busy {
        println!("somebody else is collecting; nothing was done");
    } else {
        let (before, after) = (output::bytes(before_bytes), output::bytes(after_bytes));
        println!("{removed_blocks} blocks removed: {before} before, {after} now");
    }
    if arguments.json {
        output::json(&collected)?;
    }
    Ok(())
}
