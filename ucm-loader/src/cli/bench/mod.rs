//! `ucm bench`: one thing against its alternative, side by side in one run.

mod index;
mod order;
mod wait;

use crate::cli::Failure;

/// What can be measured.
// Each is documented by its arguments: a line here would hide that from `--help`.
#[allow(missing_docs, reason = "see above")]
#[derive(clap::Subcommand, Debug)]
pub enum Arguments {
    Index(index::Arguments),
    Order(order::Arguments),
    Wait(wait::Arguments),
}

/// Runs one.
///
/// # Errors
/// See [`Failure`].
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    match arguments {
        Arguments::Index(arguments) => index::run(arguments),
        Arguments::Order(arguments) => order::run(arguments),
        Arguments::Wait(arguments) => wait::run(arguments),
    }
}
