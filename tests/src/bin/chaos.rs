//! Chaos from the command line; `cargo xtask chaos` builds what it needs and starts it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use ucm_tests::chaos::{Options, run};

/// Kill, stop and restart ranks under traffic; then audit everything.
#[derive(Parser)]
struct Arguments {
    /// The `ucm` binary whose ranks die; built with --cfg ucm_crash they also
    /// die at crash points
    #[arg(long)]
    program: PathBuf,
    /// Rank processes
    #[arg(long, default_value_t = 8)]
    ranks: u32,
    /// How long
    #[arg(long, default_value_t = 30)]
    seconds: u64,
    /// Seed of traffic and blows
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print nothing but the last line
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let Arguments { program, ranks, seconds, seed, json } = Arguments::parse();
    let time = Duration::from_secs(seconds);
    let verdict = match run(&Options { program, ranks: ranks.max(1), time, seed }) {
        Ok(verdict) => verdict,
        Err(error) => {
            eprintln!("chaos: {error}");
            return ExitCode::from(2);
        }
    };
    let figures = &verdict.figures;
    if !json {
        println!(
            "{} deaths ({} while starting), {} restarts, {} stops in {seconds} s of {ranks} ranks",
            figures.deaths, verdict.deaths_at_start, figures.restarts, figures.stops
        );
        println!(
            "{} tasks went through, {} did not; {} blocks stored, {} slots filled, all compared",
            figures.tasks_ok, figures.tasks_failed, verdict.stored_blocks, verdict.ready_slots
        );
        println!(
            "longest stall {} ms; behind a stopped process {} ms",
            figures.longest_stall_ms, verdict.longest_behind_stop_ms
        );
        verdict.reasons.iter().take(8).for_each(|reason| println!("failed: {reason}"));
    }
    verdict.findings.iter().take(40).for_each(|finding| eprintln!("WRONG: {finding}"));
    match serde_json::to_string(figures) {
        Ok(line) => println!("{line}"),
        Err(error) => eprintln!("chaos: {error}"),
    }
    if verdict.is_clean() { ExitCode::SUCCESS } else { ExitCode::from(1) }
}
