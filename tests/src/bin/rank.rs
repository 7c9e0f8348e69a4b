//! The product's own command line under a name that this package's tests can find.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    ucm_loader::cli::run(ucm_loader::cli::Cli::parse())
}
