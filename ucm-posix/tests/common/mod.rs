//! Child processes that act on command, for tests that need real ones.
#![allow(dead_code, clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ucm_core::segment::geometry::CacheShape;
use ucm_posix::{SegmentId, SegmentOptions, ShmDir};

/// What a child's lines begin with; the test harness prints others.
const MARK: &str = "@ ";
/// Only a hang takes this long; nothing is measured by it.
const WATCHDOG: Duration = Duration::from_secs(120);

/// A second process running the `child_process` test of the same binary.
pub struct Actor {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Actor {
    /// Starts `action` in a process of its own.
    pub fn start(action: &str, dir: &Path, arguments: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_process", "--nocapture", "--test-threads=1"])
            .env("UCM_TEST_ACTION", action)
            .env("UCM_TEST_DIR", dir)
            .env("UCM_TEST_ARGUMENTS", arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The harness may have begun a line of its own.
                if let Some((_, said)) = line.split_once(MARK) {
                    let _ = sender.send(said.to_string());
                }
            }
        });
        let stdin = child.stdin.take();
        Self { child, stdin, lines }
    }

    /// The next thing it says.
    pub fn hear(&self) -> String {
        self.lines.recv_timeout(WATCHDOG).expect("the child says nothing more")
    }

    /// The next thing it says, which must be this.
    pub fn expect(&self, said: &str) {
        assert_eq!(self.hear(), said);
    }

    /// Lets it go on.
    pub fn say(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// SIGKILL, and wait for the end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Lets it end by itself.
    pub fn finish(mut self) {
        self.stdin = None;
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.kill();
    }
}

/// In the child: what to do, where, and with what.
pub fn assignment() -> Option<(String, ShmDir, String)> {
    let action = std::env::var("UCM_TEST_ACTION").ok()?;
    let dir = ShmDir::new(std::env::var_os("UCM_TEST_DIR")?);
    Some((action, dir, std::env::var("UCM_TEST_ARGUMENTS").unwrap_or_default()))
}

/// In the child: says a line.
pub fn say(line: impl std::fmt::Display) {
    println!("\n{MARK}{line}");
}

/// In the child: waits for a line, or for the end.
pub fn hear() -> Option<String> {
    let mut line = String::new();
    let count = std::io::stdin().read_line(&mut line).unwrap();
    (count > 0).then(|| line.trim().to_string())
}

/// Looks again until it is so; a hang fails the test.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !so() {
        assert!(start.elapsed() < WATCHDOG, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn scratch() -> (tempfile::TempDir, ShmDir) {
    let temp = tempfile::tempdir_in("/dev/shm").unwrap();
    let dir = ShmDir::new(temp.path());
    (temp, dir)
}

pub fn shape() -> CacheShape {
    CacheShape {
        slot_count: 64,
        reserved_slots: 8,
        shard_bytes: 4096,
        shards_per_block: 4,
        local_rank_size: 8,
        participants: 32,
        content_tag: 7,
    }
}

pub fn options(dir: &ShmDir) -> SegmentOptions {
    let id = SegmentId::new("test").unwrap();
    SegmentOptions { dir: dir.clone(), ..SegmentOptions::new(id, shape()) }
}

/// The names in the directory, sorted.
pub fn names(dir: &ShmDir) -> Vec<String> {
    let entries = std::fs::read_dir(&dir.path).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A tmpfs of a given size, unmounted when dropped.
pub struct SmallTmpfs {
    pub dir: ShmDir,
    _temp: tempfile::TempDir,
}

impl SmallTmpfs {
    /// `None`, loudly, where mounting is not permitted.
    pub fn mount(size: &str) -> Option<Self> {
        let temp = tempfile::tempdir().unwrap();
        let options = format!("size={size},mode=700");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "ucm-test"])
            .arg(temp.path())
            .status()
            .is_ok_and(|status| status.success());
        if !mounted {
            eprintln!("SKIPPED: mounting a tmpfs is not permitted here, so nothing was tested");
            return None;
        }
        Some(Self { dir: ShmDir::new(temp.path()), _temp: temp })
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.dir.path).status();
    }
}
