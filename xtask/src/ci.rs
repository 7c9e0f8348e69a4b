//! `cargo xtask ci`: everything that must hold of a commit.
//!
//! All steps run, also after one has failed. What needs something that cannot
//! be had here (a target, a nightly toolchain) is *skipped*, loudly, and never
//! counts as passed. The last line is `N passed, N failed, N skipped`.

use std::io;
use std::process::Command;
use std::time::Instant;

/// Options of `cargo xtask ci`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Only steps whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Seeds that Miri explores (the short form is for the gate)
    #[arg(long, default_value_t = 2)]
    miri_seeds: u32,
    /// Mutants to try, from the front of the list; the whole list is `cargo xtask mutants`
    #[arg(long, default_value_t = 8)]
    mutants: usize,
}

enum Outcome {
    Passed,
    Failed,
    Skipped(String),
}

struct Step {
    name: &'static str,
    run: fn(&Arguments) -> io::Result<Outcome>,
}

/// What the core must also compile for: no OS, and 32 bits.
const BARE_TARGETS: [&str; 2] = ["x86_64-unknown-none", "thumbv7em-none-eabihf"];

/// How long ranks die in the gate.
const CHAOS_SECONDS: u64 = 10;

/// How long each fuzz target runs in the gate.
const FUZZ_SECONDS: u64 = 5;

const STEPS: [Step; 13] = [
    Step { name: "format", run: |_| cargo(&["fmt", "--all", "--check"]) },
    Step {
        name: "clippy",
        run: |_| cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    },
    Step {
        name: "features",
        run: |_| cargo(&["check", "--package", "ucm-loader", "--features", "cuda,rocm"]),
    },
    Step { name: "bare targets", run: |_| bare_targets() },
    Step { name: "docs", run: |_| docs() },
    Step { name: "tidy", run: |_| Ok(passed(crate::tidy::run()?)) },
    Step {
        name: "tests",
        run: |_| cargo(&["test", "--workspace", "--no-fail-fast", "--profile", "ci"]),
    },
    Step { name: "loom", run: |_| loom() },
    Step { name: "crash points", run: |_| crash_points() },
    Step { name: "chaos", run: |_| Ok(passed(crate::chaos::run_for(CHAOS_SECONDS)?)) },
    Step {
        name: "fuzz",
        run: |_| {
            Ok(match crate::fuzz::run_for(FUZZ_SECONDS)? {
                crate::fuzz::Outcome::Clean => Outcome::Passed,
                crate::fuzz::Outcome::Found => Outcome::Failed,
                crate::fuzz::Outcome::Skipped(why) => Outcome::Skipped(why.to_owned()),
            })
        },
    },
    Step { name: "miri", run: miri },
    Step {
        name: "mutants",
        run: |arguments| Ok(passed(crate::mutants::run_first(arguments.mutants)?)),
    },
];

/// Runs the steps; true when none failed.
pub fn run(arguments: &Arguments) -> io::Result<bool> {
    let wanted = |step: &&Step| arguments.only.as_ref().is_none_or(|only| step.name.contains(only));
    let mut lines = Vec::new();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for step in STEPS.iter().filter(wanted) {
        println!("\n== {}", step.name);
        let began = Instant::now();
        let outcome = (step.run)(arguments)?;
        let seconds = began.elapsed().as_secs_f64();
        let verdict = match outcome {
            Outcome::Passed => {
                passed += 1;
                "passed".to_owned()
            }
            Outcome::Failed => {
                failed += 1;
                "FAILED".to_owned()
            }
            Outcome::Skipped(why) => {
                skipped += 1;
                format!("SKIPPED: {why}")
            }
        };
        println!("== {}: {verdict} ({seconds:.1} s)", step.name);
        lines.push(format!("{:14} {seconds:7.1} s  {verdict}", step.name));
    }
    println!("\n{}", lines.join("\n"));
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    Ok(failed == 0)
}

fn passed(ok: bool) -> Outcome {
    if ok { Outcome::Passed } else { Outcome::Failed }
}

fn command(program: &str, arguments: &[&str]) -> io::Result<Command> {
    let mut command = Command::new(program);
    command.current_dir(crate::workspace_root()?).args(arguments);
    Ok(command)
}

fn cargo(arguments: &[&str]) -> io::Result<Outcome> {
    Ok(passed(command("cargo", arguments)?.status()?.success()))
}

/// With `flags` for the compiler, and so a build folder of its own.
fn cargo_with(flags: &str, folder: &str, arguments: &[&str]) -> io::Result<Outcome> {
    let target = crate::workspace_root()?.join("target").join(folder);
    let mut command = command("cargo", arguments)?;
    command.env("RUSTFLAGS", flags).env("CARGO_TARGET_DIR", target);
    Ok(passed(command.status()?.success()))
}

fn docs() -> io::Result<Outcome> {
    let mut command = command("cargo", &["doc", "--workspace", "--no-deps", "--quiet"])?;
    command.env("RUSTDOCFLAGS", "-D warnings");
    Ok(passed(command.status()?.success()))
}

fn bare_targets() -> io::Result<Outcome> {
    for target in BARE_TARGETS {
        // Fails without a network; fine if the target is there already.
        let added = command("rustup", &["target", "add", target])?.status();
        if !added.is_ok_and(|status| status.success()) {
            return Ok(Outcome::Skipped(format!("the target {target} cannot be installed here")));
        }
        let build = ["build", "--package", "ucm-core", "--target", target];
        if let Outcome::Failed = cargo(&build)? {
            return Ok(Outcome::Failed);
        }
    }
    Ok(Outcome::Passed)
}

fn loom() -> io::Result<Outcome> {
    let test = ["test", "--package", "ucm-core", "--release", "--test", "loom"];
    cargo_with("--cfg ucm_loom", "loom", &test)
}

fn crash_points() -> io::Result<Outcome> {
    let directed = ["test", "--package", "ucm-core", "--profile", "ci", "--test", "directed"];
    if let Outcome::Failed = cargo_with("--cfg ucm_crash", "crash", &directed)? {
        return Ok(Outcome::Failed);
    }
    let test = [
        "test",
        "--package",
        "ucm-tests",
        "--profile",
        "ci",
        "--test",
        "crash_points",
        "--",
        "--test-threads",
        "2",
        "--nocapture",
    ];
    cargo_with("--cfg ucm_crash", "crash", &test)
}

fn miri(arguments: &Arguments) -> io::Result<Outcome> {
    let components = ["component", "add", "--toolchain", "nightly", "miri", "rust-src"];
    if !command("rustup", &components)?.status().is_ok_and(|status| status.success()) {
        return Ok(Outcome::Skipped(
            "Miri needs a nightly toolchain, and there is none".to_owned(),
        ));
    }
    let mut test = command(
        "cargo",
        &[
            "+nightly",
            "miri",
            "test",
            "--package",
            "ucm-core",
            "--test",
            "threads",
            "--test",
            "cache",
            "--test",
            "channel",
        ],
    )?;
    let seeds = arguments.miri_seeds;
    test.env(
        "MIRIFLAGS",
        format!("-Zmiri-many-seeds=0..{seeds} -Zmiri-disable-isolation -Zmiri-ignore-leaks"),
    );
    test.env("CARGO_TARGET_DIR", crate::workspace_root()?.join("target/miri"));
    Ok(passed(test.status()?.success()))
}
