//! A child process: told lines, listened to, stopped, killed, and always reaped.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use crate::setup::Place;

/// The children that are not reaped yet. Their pids are theirs until then.
pub type Children = Arc<Mutex<Vec<Pid>>>;

/// What became of a line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Heard {
    /// An answer.
    Line(String),
    /// It died, by this signal if by one.
    Died(Option<i32>),
    /// It was stopped.
    Stopped,
}

/// An actor in its process.
pub struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    children: Children,
    deadline: Instant,
}

impl Process {
    /// Starts one. Only from the test's own thread: it dies with that.
    ///
    /// # Panics
    /// When no process can be started.
    pub fn start(program: &Path, place: &Place, children: Children, deadline: Instant) -> Self {
        Self::start_as(&mut Command::new(program), place, children, deadline)
    }

    /// The same by a command that ends in the program.
    ///
    /// # Panics
    /// When no process can be started.
    pub fn start_as(
        command: &mut Command,
        place: &Place,
        children: Children,
        deadline: Instant,
    ) -> Self {
        // Started and listed in one step, so that the watchdog misses none.
        let mut list = children.lock().unwrap_or_else(PoisonError::into_inner);
        let mut child = command
            .args(place.to_arguments())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("an actor can be started");
        list.push(Pid::from_raw(child.id() as i32));
        drop(list);
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, stdin, lines, children, deadline }
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// Tells it a line and does not wait. A dead one does not mind.
    pub fn say(&mut self, line: &str) {
        if let Some(stdin) = &mut self.stdin {
            let _broken_pipe = writeln!(stdin, "{line}");
        }
    }

    /// What comes next: an answer, its death, or its standing still.
    ///
    /// # Panics
    /// When the deadline passes.
    pub fn hear_any(&mut self) -> Heard {
        loop {
            if let Some(heard) = self.hear_within(Duration::from_millis(2)) {
                return heard;
            }
            // The watchdog comes first, with its dump.
            let patience = self.deadline + Duration::from_secs(5);
            assert!(Instant::now() < patience, "actor {} says nothing", self.pid());
        }
    }

    /// What has come already, if anything.
    pub fn hear_now(&mut self) -> Option<Heard> {
        self.hear_within(Duration::ZERO)
    }

    fn hear_within(&mut self, patience: Duration) -> Option<Heard> {
        match self.lines.recv_timeout(patience) {
            Ok(line) => Some(Heard::Line(line)),
            Err(RecvTimeoutError::Disconnected) => Some(Heard::Died(self.reap())),
            Err(RecvTimeoutError::Timeout) => self.just_stopped().then_some(Heard::Stopped),
        }
    }

    /// Its next answer.
    ///
    /// # Panics
    /// When it dies or is stopped instead.
    pub fn hear(&mut self) -> String {
        match self.hear_any() {
            Heard::Line(line) => line,
            other => panic!("actor {}: {other:?} instead of an answer", self.pid()),
        }
    }

    /// Tells it a line and returns the answer.
    pub fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.hear()
    }

    /// Tells it a line; the answer must begin with `answer`.
    ///
    /// # Panics
    /// When it does not.
    pub fn expect(&mut self, line: &str, answer: &str) -> String {
        let heard = self.ask(line);
        assert!(heard.starts_with(answer), "{line}: {heard} instead of {answer}");
        heard
    }

    /// As [`expect`](Self::expect); what follows the answer's first word is a number.
    ///
    /// # Panics
    /// When it is not.
    pub fn number(&mut self, line: &str, answer: &str) -> u32 {
        let heard = self.expect(line, answer);
        number_in(&heard)
    }

    /// Tells it a line of which it may die. `None` once it has, or is stopped.
    pub fn tell(&mut self, line: &str) -> Option<String> {
        self.say(line);
        match self.hear_any() {
            Heard::Line(line) => Some(line),
            Heard::Died(_) | Heard::Stopped => None,
        }
    }

    /// Waits until it is stopped.
    ///
    /// # Panics
    /// When it answers or dies instead.
    pub fn expect_stop(&mut self) {
        let heard = self.hear_any();
        assert_eq!(heard, Heard::Stopped, "actor {}", self.pid());
    }

    /// Waits until it is dead by SIGKILL.
    ///
    /// # Panics
    /// When it answers or is stopped instead.
    pub fn expect_death(&mut self) {
        let heard = self.hear_any();
        assert_eq!(heard, Heard::Died(Some(libc::SIGKILL)), "actor {}", self.pid());
    }

    /// Whether it has been stopped since this was last asked.
    fn just_stopped(&self) -> bool {
        let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG;
        matches!(waitid(Id::Pid(self.pid()), flags), Ok(WaitStatus::Stopped(..)))
    }

    /// Sends a signal to it, if it is not reaped.
    pub fn signal(&self, signal: Signal) {
        let children = self.children.lock().unwrap_or_else(PoisonError::into_inner);
        if children.contains(&self.pid()) {
            let _gone = kill(self.pid(), signal);
        }
    }

    /// SIGSTOP, and waits until it stands still.
    ///
    /// # Panics
    /// When it dies instead.
    pub fn stop(&mut self) {
        self.signal(Signal::SIGSTOP);
        self.expect_stop();
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        self.reap();
    }

    /// Lets it end by itself.
    ///
    /// # Panics
    /// When it fails.
    pub fn finish(mut self) {
        self.stdin = None;
        assert_eq!(self.hear_any(), Heard::Died(None), "actor {} ended badly", self.pid());
    }

    /// Waits for the end; the signal that it died of.
    fn reap(&mut self) -> Option<i32> {
        use std::os::unix::process::ExitStatusExt;
        self.stdin = None;
        let status = self.child.wait().ok();
        let pid = self.pid();
        self.children.lock().unwrap_or_else(PoisonError::into_inner).retain(|&it| it != pid);
        status.and_then(|status| status.signal())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The number that is an answer's second word.
///
/// # Panics
/// When there is none.
pub fn number_in(answer: &str) -> u32 {
    let word = answer.split_whitespace().nth(1);
    word.and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no number in {answer:?}"))
}
