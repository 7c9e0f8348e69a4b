//! `ucm doctor`: what is wrong with this machine, what it will cost, what mends it.

use std::path::PathBuf;

use serde::Serialize;
use ucm_posix::ShmDir;

use crate::cli::Failure;
use crate::cli::output;
use crate::doctor::{Finding, Level, Needs, examine};

/// Look at this machine: what is wrong, what it will cost, the command that mends it.
///
/// Exit code 0: nothing will fail (what is merely slow is listed); 1: something will.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Bytes of host cache that are going to be asked for
    #[arg(long, default_value_t = 1 << 30)]
    capacity: u64,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    bad: usize,
    slow: usize,
    findings: Vec<Finding>,
}

/// Runs it.
///
/// # Errors
/// [`Failure::Wrong`] when something will fail.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let dir = ShmDir::new(&arguments.shm_dir);
    let findings = examine(&Needs { dir, capacity_bytes: arguments.capacity });
    let mut table = output::table(["check", "", "found", "cost", "remedy"]);
    for finding in &findings {
        let level = match finding.level {
            Level::Ok => "ok",
            Level::Slow => "slow",
            Level::Bad => "BAD",
        };
        table.add_row([finding.check, level, &finding.found, &finding.cost, &finding.remedy]);
    }
    println!("{table}");
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (bad, slow) = (count(Level::Bad), count(Level::Slow));
    if arguments.json {
        output::json(&Report { bad, slow, findings })?;
    }
    if bad > 0 {
        Err(Failure::Wrong(format!("{bad} of the checks will make something fail")))
    } else {
        Ok(())
    }
}
