//! `ucm bench`: one thing against its alternative, side by side in one run.

mod attach;
mod channel;
mod index;
mod order;
mod ring;
mod rivals;
mod store;
mod wait;

use crate::cli::Failure;

/// What can be measured.
// Each is documented by its arguments: a line here would hide that from `--help`.
#[allow(missing_docs, reason = "see above")]
#[derive(clap::Subcommand, Debug)]
pub enum Arguments {
    Attach(attach::Arguments),
    Channel(channel::Arguments),
    Index(index::Arguments),
    Order(order::Arguments),
    Ring(ring::Arguments),
    Store(store::Arguments),
    Wait(wait::Arguments),
}

/// Runs one.
///
/// # Errors
/// See [`Failure`].
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    match arguments {
        Arguments::Attach(arguments) => attach::run(arguments),
        Arguments::Channel(arguments) => channel::run(arguments),
        Arguments::Index(arguments) => index::run(arguments),
        Arguments::Order(arguments) => order::run(arguments),
        Arguments::Ring(arguments) => ring::run(arguments),
        Arguments::Store(arguments) => store::run(arguments),
        Arguments::Wait(arguments) => wait::run(arguments),
    }
}
