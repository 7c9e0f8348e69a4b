//! A rank of the product in its process: told commands, listened to, stopped, killed.
//!
//! It is the tool's own `rank-process` and speaks the tool's own protocol, so
//! what dies here is what is shipped.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command as Program, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ucm_loader::cli::RANK_COMMAND;
use ucm_loader::rank::protocol::{Command, Outcome, Reply, Request, Setup};

/// Nothing takes that long but a hang.
pub const HANG: Duration = Duration::from_secs(60);

/// A pid that is this process's until it is taken out: whoever signals it
/// holds the lock, and it is reaped only after that.
pub type Target = Arc<Mutex<Option<Pid>>>;

/// Sends `signal` to whoever `target` is now; says whether anybody was.
pub fn strike(target: &Target, signal: Signal) -> bool {
    let pid = target.lock().unwrap_or_else(PoisonError::into_inner);
    pid.is_some_and(|pid| kill(pid, signal).is_ok())
}

/// How it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// By SIGKILL.
    Killed,
    /// By itself, with success.
    Left,
    /// In any other way; the signal, or the exit code as a negative number.
    Otherwise(i32),
}

/// What came instead of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Silence {
    /// It is dead.
    Dead(End),
    /// It has said nothing for as long as only a hang takes.
    Hangs,
}

/// See the module.
pub struct RankProcess {
    child: Child,
    input: Option<ChildStdin>,
    replies: Receiver<Reply>,
    target: Target,
    next_id: u64,
}

impl RankProcess {
    /// Starts `program` as `rank`; `crash` is what `UCM_CRASH` says to it.
    /// The first thing to be heard is whether it has started.
    ///
    /// # Errors
    /// When no process can be started.
    pub fn start(
        program: &Path,
        setup: &Setup,
        rank: u32,
        crash: Option<&str>,
        target: &Target,
    ) -> std::io::Result<Self> {
        let mut setup = setup.clone();
        setup.config.rank = rank;
        let mut command = Program::new(program);
        command.arg(RANK_COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.env_remove("UCM_CRASH").env("UCM_LOG", "error");
        if let Some(crash) = crash {
            command.env("UCM_CRASH", crash);
        }
        let mut child = command.spawn()?;
        *target.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Pid::from_raw(child.id() as i32));
        let mut input = child.stdin.take();
        let (sender, replies) = channel();
        if let Some(output) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    let Ok(reply) = serde_json::from_str::<Reply>(&line) else { return };
                    if sender.send(reply).is_err() {
                        return;
                    }
                }
            });
        }
        if let Some(input) = &mut input {
            // It may be dead already; then that is what is heard.
            let _broken_pipe = writeln!(input, "{}", serde_json::to_string(&setup)?);
        }
        Ok(Self { child, input, replies, target: Arc::clone(target), next_id: 1 })
    }

    /// What it says next.
    ///
    /// # Errors
    /// When it says nothing more.
    pub fn hear(&mut self) -> Result<Outcome, Silence> {
        match self.replies.recv_timeout(HANG) {
            Ok(reply) => Ok(reply.outcome),
            Err(RecvTimeoutError::Disconnected) => Err(Silence::Dead(self.reap())),
            Err(RecvTimeoutError::Timeout) => Err(Silence::Hangs),
        }
    }

    /// Tells it to do something and waits for what comes of it.
    ///
    /// # Errors
    /// When it says nothing more.
    pub fn ask(&mut self, command: Command) -> Result<Outcome, Silence> {
        self.tell(command);
        self.hear()
    }

    /// Tells it to do something. A dead one does not mind.
    pub fn tell(&mut self, command: Command) {
        let id = self.next_id;
        self.next_id += 1;
        if let Some(input) = &mut self.input
            && let Ok(line) = serde_json::to_string(&Request { id, command })
        {
            let _broken_pipe = writeln!(input, "{line}").and_then(|()| input.flush());
        }
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(&mut self) -> End {
        strike(&self.target, Signal::SIGKILL);
        self.reap()
    }

    /// Has it leave, and waits for the end.
    ///
    /// # Errors
    /// When it does not come to that.
    pub fn leave(mut self) -> Result<Outcome, Silence> {
        let outcome = self.ask(Command::Stop)?;
        match self.reap() {
            End::Left => Ok(outcome),
            other => Err(Silence::Dead(other)),
        }
    }

    fn reap(&mut self) -> End {
        use std::os::unix::process::ExitStatusExt;
        self.input = None;
        let exited = loop {
            let mut pid = self.target.lock().unwrap_or_else(PoisonError::into_inner);
            if let Ok(Some(status)) = self.child.try_wait() {
                // From here on the pid may be another process's.
                *pid = None;
                break status;
            }
            drop(pid);
            std::thread::sleep(Duration::from_micros(500));
        };
        match (exited.signal(), exited.code()) {
            (Some(libc::SIGKILL), _) => End::Killed,
            (Some(signal), _) => End::Otherwise(signal),
            (None, Some(0)) => End::Left,
            (None, code) => End::Otherwise(-code.unwrap_or(1)),
        }
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        if self.target.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            self.kill();
        }
    }
}
