//! `ucm rank`: one rank, driven through its channel.

use std::path::PathBuf;

use ucm_posix::{SegmentId, ShmDir};

use crate::cli::Failure;

/// Serve one worker channel: load, dump, look up and stream as its engine asks.
///
/// The engine makes the channel (a file ucm.ID.chan in the shared-memory
/// directory) and asks for everything through it; what the rank's segment and
/// backend are comes with the request to load weights. It ends when it is told
/// to, or when its engine is gone.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// The channel's id
    #[arg(long, value_name = "ID")]
    channel: String,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
}

/// Runs it.
///
/// # Errors
/// When there is no such channel, or its engine breaks the protocol.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    crate::interrupt::ignore()?;
    crate::crash::arm_from_env();
    let id = SegmentId::new(&arguments.channel)?;
    crate::rank::serve::run(&ShmDir::new(&arguments.shm_dir), &id)?;
    Ok(())
}
