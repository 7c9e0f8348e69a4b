//! `cargo xtask`: the workspace's chores, one file each.

mod chaos;
mod ci;
mod fuzz;
mod mutants;
mod tidy;

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The workspace's chores")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Kill, stop and restart ranks under traffic, then audit everything
    Chaos(chaos::Arguments),
    /// Everything that must hold of a commit, one named step each; all of them, then a summary
    Ci(ci::Arguments),
    /// Every fuzz target under libFuzzer for a few seconds
    Fuzz(fuzz::Arguments),
    /// Weaken one ordering or drop one step at a time, and see a test turn red
    Mutants(mutants::Arguments),
    /// The house rules that a compiler does not check
    Tidy,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Chaos(arguments) => chaos::run(&arguments),
        Task::Ci(arguments) => ci::run(&arguments),
        Task::Fuzz(arguments) => fuzz::run(&arguments),
        Task::Mutants(arguments) => mutants::run(&arguments),
        Task::Tidy => tidy::run(),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::from(2)
        }
    }
}

fn workspace_root() -> io::Result<PathBuf> {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(Path::to_path_buf)
        .ok_or_else(|| io::Error::other("xtask lies outside a workspace"))
}
