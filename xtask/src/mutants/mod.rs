//! `cargo xtask mutants`: does a test fail when an ordering is weakened or a step dropped?
//!
//! Each mutant of [`list`] is one textual change, made in a scratch copy of
//! the workspace under `target/mutants`, where the named test is run. A mutant
//! is *caught* when that test fails, *missed* when it passes. A change whose
//! text is no longer found, or that does not compile, is an error: the list
//! must follow the code.

mod hostile;
mod list;

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use list::{MUTANTS, Mutant, Suite};

/// All lists, one after the other.
fn mutants() -> impl Iterator<Item = &'static Mutant> {
    MUTANTS.iter().chain(hostile::MUTANTS)
}

/// Options of `cargo xtask mutants`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Only mutants whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Only the first N: a short form
    #[arg(long)]
    limit: Option<usize>,
    /// List them and run nothing
    #[arg(long)]
    list: bool,
}

/// Far longer than any suite takes.
const HANG: Duration = Duration::from_secs(120);

enum Verdict {
    Caught,
    Missed,
}

/// The short form: the first `limit` of the list.
pub fn run_first(limit: usize) -> io::Result<bool> {
    run(&Arguments { only: None, limit: Some(limit), list: false })
}

/// Runs the mutants; true when none was missed.
pub fn run(arguments: &Arguments) -> io::Result<bool> {
    let wanted: Vec<&Mutant> = mutants()
        .filter(|mutant| arguments.only.as_ref().is_none_or(|only| mutant.name.contains(only)))
        .take(arguments.limit.unwrap_or(usize::MAX))
        .collect();
    if arguments.list {
        wanted.iter().for_each(|mutant| println!("{:32} {}", mutant.name, mutant.file));
        return Ok(true);
    }
    let scratch = Scratch::new()?;
    // A test that fails anyway would catch everything.
    for suite in Suite::ALL {
        if wanted.iter().any(|mutant| mutant.suite == suite) && !scratch.passes(suite, None)? {
            return Err(io::Error::other(format!("{suite:?} fails without any mutant")));
        }
    }
    let (mut caught, mut missed) = (0, 0);
    for (at, mutant) in wanted.iter().enumerate() {
        let began = Instant::now();
        let verdict = scratch.judge(mutant)?;
        let word = match verdict {
            Verdict::Caught => "caught",
            Verdict::Missed => "MISSED",
        };
        let seconds = began.elapsed().as_secs_f64();
        println!("[{}/{}] {word} {} ({seconds:.1} s)", at + 1, wanted.len(), mutant.name);
        match verdict {
            Verdict::Caught => caught += 1,
            Verdict::Missed => missed += 1,
        }
    }
    println!("{caught} caught, {missed} missed");
    Ok(missed == 0)
}

/// Whether every mutant's text is where the list says, exactly once; what is
/// not goes to `report`. Needs no build, so `tidy` asks.
pub fn check_list(mut report: impl FnMut(String)) -> io::Result<()> {
    let root = crate::workspace_root()?;
    for mutant in mutants() {
        let text = fs::read_to_string(root.join(mutant.file)).unwrap_or_default();
        let places = text.matches(mutant.from).count();
        if places != 1 {
            report(format!(
                "{}: the text of mutant {:?} is there {places} times",
                mutant.file, mutant.name
            ));
        }
    }
    Ok(())
}

/// A copy of the sources with build folders of its own.
struct Scratch {
    root: PathBuf,
    target: PathBuf,
}

impl Scratch {
    fn new() -> io::Result<Self> {
        let workspace = crate::workspace_root()?;
        let base = workspace.join("target/mutants");
        let root = base.join("src");
        if root.exists() {
            fs::remove_dir_all(&root)?;
        }
        for crate_dir in
            ["ucm-core", "ucm-posix", "ucm-cuda", "ucm-rocm", "ucm-loader", "xtask", "tests"]
        {
            copy_tree(&workspace.join(crate_dir), &root.join(crate_dir))?;
        }
        for file in ["Cargo.toml", "Cargo.lock"] {
            fs::copy(workspace.join(file), root.join(file))?;
        }
        Ok(Self { root, target: base.join("build") })
    }

    fn judge(&self, mutant: &Mutant) -> io::Result<Verdict> {
        let path = self.root.join(mutant.file);
        let original = fs::read_to_string(&path)?;
        if original.matches(mutant.from).count() != 1 {
            return Err(io::Error::other(format!(
                "{}: its text must be in {} exactly once: {:?}",
                mutant.name, mutant.file, mutant.from
            )));
        }
        fs::write(&path, original.replacen(mutant.from, mutant.to, 1))?;
        let passes = self.passes(mutant.suite, Some(mutant));
        fs::write(&path, original)?;
        Ok(if passes? { Verdict::Missed } else { Verdict::Caught })
    }

    /// Builds the suite (which must work) and runs it.
    fn passes(&self, suite: Suite, mutant: Option<&Mutant>) -> io::Result<bool> {
        let mut build = self.cargo(suite);
        build.arg("--no-run");
        if !build.status()?.success() {
            let what = mutant.map_or("the unchanged code", |mutant| mutant.name);
            return Err(io::Error::other(format!("{what} does not compile for {suite:?}")));
        }
        let mut test = self.cargo(suite);
        if let Some(test_name) = mutant.and_then(|mutant| mutant.test) {
            test.arg(test_name);
        }
        test.args(["--", "--test-threads", "1"]);
        // A test that hangs has noticed too.
        passes_within(&mut test, HANG)
    }

    fn cargo(&self, suite: Suite) -> Command {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(&self.root).arg("test").args(suite.arguments());
        cargo.env("CARGO_TARGET_DIR", self.target.join(format!("{suite:?}")));
        cargo.env("RUSTFLAGS", suite.rustflags());
        cargo.env("RUST_BACKTRACE", "0");
        cargo.stdout(Stdio::null()).stderr(Stdio::null());
        cargo
    }
}

/// Runs `command` in a process group of its own, so that all of it can be ended.
fn passes_within(command: &mut Command, limit: Duration) -> io::Result<bool> {
    let mut child = command.process_group(0).spawn()?;
    let began = Instant::now();
    while began.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let group = format!("-{}", child.id());
    Command::new("kill").args(["-KILL", "--", &group]).status()?;
    child.wait()?;
    Ok(false)
}

fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            if entry.file_name() != "target" {
                copy_tree(&entry.path(), &target)?;
            }
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
