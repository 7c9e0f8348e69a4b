//! `cargo xtask chaos`: kill, stop and restart the product's ranks under traffic, then audit everything.
//!
//! Builds `ucm` and the driver (`tests/src/chaos`) with the crash points in, in
//! a build folder of their own, and starts the driver. What it prints is the
//! driver's; the last line is JSON.

use std::io;
use std::path::PathBuf;
use std::process::Command;

/// Options of `cargo xtask chaos`.
#[derive(clap::Args)]
pub struct Arguments {
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

/// The short form: eight ranks for so many seconds.
pub fn run_for(seconds: u64) -> io::Result<bool> {
    run(&Arguments { ranks: 8, seconds, seed: 1, json: false })
}

/// Runs chaos; true when nothing was wrong.
pub fn run(arguments: &Arguments) -> io::Result<bool> {
    let folder = build()?;
    let mut driver = Command::new(folder.join("chaos"));
    driver.arg("--program").arg(folder.join("ucm"));
    driver.args(["--ranks", &arguments.ranks.to_string()]);
    driver.args(["--seconds", &arguments.seconds.to_string()]);
    driver.args(["--seed", &arguments.seed.to_string()]);
    if arguments.json {
        driver.arg("--json");
    }
    let status = driver.status()?;
    match status.code() {
        Some(0) => Ok(true),
        Some(1) => Ok(false),
        _ => Err(io::Error::other(format!("the driver ended with {status}"))),
    }
}

/// Builds both programs with the crash points in; returns where they are. The
/// folder is the one of the crash-point tests, which build the same.
fn build() -> io::Result<PathBuf> {
    let root = crate::workspace_root()?;
    let target = root.join("target/crash");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .current_dir(&root)
        .args(["build", "--quiet", "--profile", "ci"])
        .args(["--package", "ucm-loader", "--package", "ucm-tests", "--bins"])
        .env("RUSTFLAGS", "--cfg ucm_crash")
        .env("CARGO_TARGET_DIR", &target)
        .status()?;
    if built.success() {
        Ok(target.join("ci"))
    } else {
        Err(io::Error::other("the programs do not build with --cfg ucm_crash"))
    }
}
