//! `cargo xtask fuzz`: every fuzz target under libFuzzer for a few seconds.
//!
//! Needs cargo-fuzz and a nightly toolchain; without them nothing is fuzzed,
//! and that is said loudly. The same targets run over the corpus and over
//! random inputs in the ordinary tests (`tests/tests/fuzz.rs`).

use std::fs;
use std::io;
use std::process::{Command, Stdio};

/// Options of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub struct Arguments {
    /// How long each target runs
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Only targets whose name contains this
    #[arg(long)]
    only: Option<String>,
}

/// What a run came to.
pub enum Outcome {
    /// No finding.
    Clean,
    /// A target has panicked, or the build failed.
    Found,
    /// Nothing was run.
    Skipped(&'static str),
}

/// All targets for so many seconds each.
pub fn run_for(seconds: u64) -> io::Result<Outcome> {
    fuzz(&Arguments { seconds, only: None })
}

/// Runs the targets; true when nothing was found.
pub fn run(arguments: &Arguments) -> io::Result<bool> {
    Ok(match fuzz(arguments)? {
        Outcome::Clean => true,
        Outcome::Found => false,
        Outcome::Skipped(why) => {
            println!("SKIPPED: {why}; nothing was fuzzed");
            true
        }
    })
}

fn fuzz(arguments: &Arguments) -> io::Result<Outcome> {
    let root = crate::workspace_root()?;
    let cargo = |arguments: &[&str]| {
        let mut cargo = Command::new("cargo");
        // The toolchain that runs this task is not the one that fuzzes.
        cargo.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").current_dir(&root);
        cargo.arg("+nightly").args(arguments);
        cargo
    };
    let works = |arguments: &[&str]| {
        let mut cargo = cargo(arguments);
        let status = cargo.stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if !works(&["--version"]) {
        return Ok(Outcome::Skipped("there is no nightly toolchain"));
    }
    if !works(&["fuzz", "--version"]) {
        return Ok(Outcome::Skipped("cargo-fuzz is not installed (cargo install cargo-fuzz)"));
    }
    let mut targets = Vec::new();
    for entry in fs::read_dir(root.join("fuzz/fuzz_targets"))? {
        let name = entry?.file_name().to_string_lossy().trim_end_matches(".rs").to_owned();
        if arguments.only.as_ref().is_none_or(|only| name.contains(only)) {
            targets.push(name);
        }
    }
    targets.sort();
    for target in &targets {
        println!("-- {target}");
        // What is found on the way goes here; the corpus is what was chosen.
        let scratch = root.join("target/fuzz-corpus").join(target);
        fs::create_dir_all(&scratch)?;
        let status = cargo(&["fuzz", "run", "--target-dir", "target/fuzz", target])
            .arg(&scratch)
            .arg(root.join("fuzz/corpus").join(target))
            .args(["--", "-print_final_stats=1", "-timeout=20"])
            .arg(format!("-max_total_time={}", arguments.seconds))
            .status()?;
        if !status.success() {
            println!("{target}: a finding, or it does not build");
            return Ok(Outcome::Found);
        }
    }
    println!("{} targets, {} s each, no finding", targets.len(), arguments.seconds);
    Ok(Outcome::Clean)
}
