//! `ucm bench`: one thing against its alternative, side by side in one run.

mod order;
mod wait;

use crate::cli::Failure;

/// What can be measured.
#[derive(clap::Subcommand, Debug)]
pub enum Arguments {
    /// Natural against rotated order: how many loads are in flight at a time
    Order(order::Arguments),
    /// Yield-spin against futex: what waiting costs
    Wait(wait::Arguments),
}

/// Runs one.
///
/// # Errors
/// See [`Failure`].
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    match arguments {
        Arguments::Order(arguments) => order::run(arguments),
        Arguments::Wait(arguments) => wait::run(arguments),
    }
}
