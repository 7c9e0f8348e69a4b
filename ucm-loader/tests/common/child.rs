//! Real processes: the tool itself, and ranks that are driven over their standard streams.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use serde_json::Value;
use ucm_loader::LoaderConfig;
use ucm_loader::rank::protocol::{self, Done, Outcome, Reply, Request, Setup};

use super::{SEED, WATCHDOG};

/// The tool with these arguments.
pub fn ucm(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ucm"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs it to its end; killed, and the test with it, when it hangs.
#[track_caller]
pub fn run(command: &mut Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    end(child)
}

/// Waits for a child's end and what it said.
#[track_caller]
pub fn end(mut child: Child) -> Output {
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let stdout = std::thread::spawn(move || {
        let mut said = Vec::new();
        out.read_to_end(&mut said).map(|_| said)
    });
    let stderr = std::thread::spawn(move || {
        let mut said = Vec::new();
        err.read_to_end(&mut said).map(|_| said)
    });
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() > WATCHDOG {
            child.kill().unwrap();
            panic!("the tool hangs");
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    let (stdout, stderr) = (stdout.join().unwrap().unwrap(), stderr.join().unwrap().unwrap());
    Output { status, stdout, stderr }
}

/// What it wrote to standard error.
pub fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The last line of its output, which must be one JSON object.
#[track_caller]
pub fn report(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stdout);
    let last = said.lines().last().unwrap_or_else(|| panic!("said nothing: {}", words(output)));
    let value: Value = serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {last}"));
    assert!(value.is_object());
    value
}

/// It ended well, with a report.
#[track_caller]
pub fn good(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", words(output));
    report(output)
}

/// It ended with this code, saying all of these.
#[track_caller]
pub fn refused(output: &Output, code: i32, says: &[&str]) {
    let words = words(output);
    assert_eq!(output.status.code(), Some(code), "{words}");
    for part in says {
        assert!(words.contains(part), "{part:?} is not in: {words}");
    }
}

/// A rank process. Killed when dropped.
pub struct RankProcess {
    child: Child,
    input: ChildStdin,
    replies: Receiver<Reply>,
    next_id: u64,
}

impl RankProcess {
    /// Starts rank `rank`, which may refuse.
    pub fn try_start(
        config: &LoaderConfig,
        rank: u32,
        events: Option<PathBuf>,
    ) -> Result<Self, String> {
        let mut child = Command::new(env!("CARGO_BIN_EXE_ucm"))
            .arg(ucm_loader::cli::RANK_COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, replies) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The test may be over.
                let _ended = sender.send(serde_json::from_str(&line).unwrap());
            }
        });
        let input = child.stdin.take().unwrap();
        let mut process = Self { child, input, replies, next_id: 1 };
        let config = LoaderConfig { rank, ..config.clone() };
        let setup = Setup { config, events_dir: events, device_shards: 512, seed: SEED };
        process.say(&setup);
        match process.hear().outcome {
            Outcome::Ready => Ok(process),
            Outcome::Error(reason) => Err(reason),
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    pub fn start(config: &LoaderConfig, rank: u32) -> Self {
        Self::try_start(config, rank, None).unwrap()
    }

    fn say(&mut self, what: &impl serde::Serialize) {
        writeln!(self.input, "{}", serde_json::to_string(what).unwrap()).unwrap();
        self.input.flush().unwrap();
    }

    #[track_caller]
    fn hear(&self) -> Reply {
        self.replies.recv_timeout(WATCHDOG).expect("the rank says nothing more")
    }

    /// Lets it begin something.
    pub fn begin(&mut self, command: protocol::Command) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.say(&Request { id, command });
        id
    }

    /// Lets it do something, and waits for the end.
    #[track_caller]
    pub fn ask(&mut self, command: protocol::Command) -> Done {
        self.begin(command);
        self.finish()
    }

    /// Waits for the end of what it began last.
    #[track_caller]
    pub fn finish(&self) -> Done {
        let reply = self.hear();
        assert_eq!(reply.id + 1, self.next_id);
        match reply.outcome {
            Outcome::Done(done) => done,
            other => panic!("{other:?}"),
        }
    }

    /// Threads of its backend that are inside the store's latency: asleep in
    /// the kernel on a clock, and so past the point where they read it.
    pub fn loads_asleep(&self) -> usize {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{}/task", self.pid())) else { return 0 };
        let nanosleep = format!("{} ", libc::SYS_clock_nanosleep);
        let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        threads
            .map(|thread| thread.unwrap().path())
            .filter(|thread| read(thread.join("comm")).starts_with("ucm_io"))
            .filter(|thread| read(thread.join("syscall")).starts_with(&nanosleep))
            .count()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Lets it leave by itself.
    #[track_caller]
    pub fn leave(mut self) {
        self.begin(protocol::Command::Stop);
        assert!(matches!(self.hear().outcome, Outcome::Stopped { drained: true }));
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        // Already gone after `kill` and `leave`.
        let _gone = (self.child.kill(), self.child.wait());
    }
}
