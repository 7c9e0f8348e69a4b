//! The command line tool, one file per subcommand.

pub mod bench;
pub mod demo;
pub mod doctor;
pub mod gc;
pub mod inspect;
pub mod output;
pub mod rank;
pub mod replay;
pub mod scratch;
pub mod store;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What a rank process is started with; not for people.
pub const RANK_COMMAND: &str = "rank-process";

/// UCM: one host-memory KV cache for every rank of a node.
#[derive(Parser, Debug)]
#[command(
    name = "ucm",
    version,
    about,
    long_about = "\
UCM shares one host-memory KV cache among the rank processes of a node: one \
copy of the bytes, one backend load per shard, whatever the number of ranks.

Start with `ucm demo`: it needs no configuration, runs real processes over \
real shared memory and real files, and verifies every byte."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

// What each does is said by its arguments' own documentation; a line here would
// hide it from `--help`.
#[derive(Subcommand, Debug)]
enum Command {
    Demo(demo::Arguments),
    Replay(replay::Arguments),
    /// Measure one thing against its alternative, side by side in one run
    #[command(subcommand)]
    Bench(bench::Arguments),
    Inspect(inspect::Arguments),
    Doctor(doctor::Arguments),
    Gc(gc::Arguments),
    /// Look after a store of block files: what it holds, whether it is right, its size
    #[command(subcommand)]
    Store(store::Arguments),
    Rank(rank::Arguments),
    /// One rank of a run, driven by its parent
    #[command(name = RANK_COMMAND, hide = true)]
    RankProcess,
}

/// Why a subcommand did not end well. Its message is all the user sees.
#[derive(Debug)]
pub enum Failure {
    /// The run went through, and what it found is wrong: exit code 1.
    Wrong(String),
    /// It could not be run: exit code 2.
    Broken(String),
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Broken(error.to_string())
    }
}

/// Runs what the command line asks for.
pub fn run(cli: Cli) -> ExitCode {
    let result = match cli.command {
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Gc(arguments) => gc::run(&arguments),
        Command::Store(arguments) => store::run(&arguments),
        Command::Rank(arguments) => rank::run(&arguments),
        Command::RankProcess => rank_process(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Wrong(reason)) => {
            eprintln!("ucm: {reason}");
            ExitCode::from(1)
        }
        // Whatever came of it: a rank that the same signal ended, for example.
        Err(Failure::Broken(reason)) if crate::interrupt::is_set() => {
            eprintln!("ucm: interrupted ({reason})");
            ExitCode::from(130)
        }
        Err(Failure::Broken(reason)) => {
            eprintln!("ucm: {reason}");
            ExitCode::from(2)
        }
    }
}

fn rank_process() -> Result<(), Failure> {
    crate::interrupt::ignore()?;
    crate::crash::arm_from_env();
    crate::rank::worker::run(std::io::stdin().lock(), std::io::stdout())?;
    Ok(())
}
