//! `cargo xtask`: the workspace's chores, one file each.

mod mutants;

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
    /// Weaken one ordering or drop one step at a time, and see a test turn red
    Mutants(mutants::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Mutants(arguments) => mutants::run(&arguments),
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
