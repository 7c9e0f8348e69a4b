//! The parent's side: N rank processes, started, driven and ended together.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command as Process, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::rank::protocol::{Command, Done, Outcome, Reply, Request, Setup};

/// Why a fleet could not do something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// A process could not be started.
    #[error("rank {rank} could not be started: {error}")]
    Spawn {
        /// Which rank.
        rank: u32,
        /// Why.
        error: std::io::Error,
    },
    /// A rank refused a command, or its setup.
    #[error("rank {rank}: {reason}")]
    Rank {
        /// Which rank.
        rank: u32,
        /// Its words.
        reason: String,
    },
    /// A rank ended without being told to.
    #[error("rank {rank} ended unexpectedly")]
    Gone {
        /// Which rank.
        rank: u32,
    },
    /// No answer in time.
    #[error("rank {rank} did not answer within {seconds} s")]
    Silent {
        /// Which rank.
        rank: u32,
        /// How long was waited.
        seconds: u64,
    },
    /// The user interrupted the run.
    #[error("interrupted")]
    Interrupted,
}

/// How long a rank may take to start: it may be the one that makes the
/// segment and reserves every page of it.
const START_PATIENCE: Duration = Duration::from_secs(120);
/// A wait looks this often whether the user has interrupted it.
const SLICE: Duration = Duration::from_millis(100);

type Waiting = Arc<Mutex<HashMap<u64, Sender<Outcome>>>>;

/// One rank process. Killed when dropped.
struct Rank {
    number: u32,
    child: Child,
    input: Mutex<Option<ChildStdin>>,
    /// Who waits for which answer; emptied when the process ends.
    waiting: Waiting,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // Its input ends, so it leaves by itself; killed if that takes long.
        self.input.lock().unwrap_or_else(PoisonError::into_inner).take();
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Ok(None) => {
                    let _gone = self.child.kill();
                    let _reaped = self.child.wait();
                    return;
                }
                _ => return,
            }
        }
    }
}

/// An answer that has not come yet.
pub struct Awaited {
    rank: u32,
    answer: Receiver<Outcome>,
}

/// Rank processes `0..n` of one cache.
pub struct Fleet {
    ranks: Vec<Rank>,
    next_id: Mutex<u64>,
    patience: Duration,
}

impl Fleet {
    /// Starts `ranks` processes of this program, each with `setup` under its
    /// own rank number. All of them have joined when this returns. `patience`
    /// is how long any later command may take.
    ///
    /// # Errors
    /// See [`FleetError`].
    pub fn start(ranks: u32, setup: &Setup, patience: Duration) -> Result<Self, FleetError> {
        let program =
            std::env::current_exe().map_err(|error| FleetError::Spawn { rank: 0, error })?;
        let mut fleet = Self { ranks: Vec::new(), next_id: Mutex::new(1), patience };
        let mut started = Vec::new();
        for number in 0..ranks {
            let (rank, ready) = Rank::spawn(&program, number, setup)?;
            fleet.ranks.push(rank);
            started.push(ready);
        }
        for ready in started {
            match ready.wait(START_PATIENCE)? {
                (_, Outcome::Ready) => {}
                (rank, other) => return Err(unexpected(rank, other)),
            }
        }
        Ok(fleet)
    }

    /// How many ranks there are.
    pub fn len(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Sends `command` to rank `rank`.
    ///
    /// # Errors
    /// [`FleetError::Gone`].
    pub fn send(&self, rank: u32, command: Command) -> Result<Awaited, FleetError> {
        let gone = FleetError::Gone { rank };
        let Some(process) = self.ranks.get(rank as usize) else { return Err(gone) };
        let id = {
            let mut next = self.next_id.lock().unwrap_or_else(PoisonError::into_inner);
            *next += 1;
            *next
        };
        process.send(id, command).ok_or(gone)
    }

    /// Waits for an answer of figures.
    ///
    /// # Errors
    /// See [`FleetError`].
    pub fn done(&self, awaited: Awaited) -> Result<Done, FleetError> {
        match awaited.wait(self.patience)? {
            (_, Outcome::Done(done)) => Ok(done),
            (rank, other) => Err(unexpected(rank, other)),
        }
    }

    /// Has every rank do what `command` says for it, all at the same time.
    ///
    /// # Errors
    /// The first rank's that did not.
    pub fn all(&self, command: impl Fn(u32) -> Command) -> Result<Vec<Done>, FleetError> {
        let sent: Vec<_> =
            (0..self.len()).map(|rank| self.send(rank, command(rank))).collect::<Result<_, _>>()?;
        sent.into_iter().map(|awaited| self.done(awaited)).collect()
    }

    /// The counters of every rank.
    ///
    /// # Errors
    /// See [`FleetError`].
    pub fn metrics(&self) -> Result<Vec<crate::metrics::MetricsSnapshot>, FleetError> {
        (0..self.len())
            .map(|rank| match self.send(rank, Command::Metrics)?.wait(self.patience)? {
                (_, Outcome::Metrics(metrics)) => Ok(metrics),
                (rank, other) => Err(unexpected(rank, other)),
            })
            .collect()
    }

    /// Has every rank end its work and leave.
    ///
    /// # Errors
    /// See [`FleetError`]; whoever did not leave is killed.
    pub fn stop(self) -> Result<(), FleetError> {
        let sent: Vec<_> =
            (0..self.len()).map(|rank| self.send(rank, Command::Stop)).collect::<Result<_, _>>()?;
        for awaited in sent {
            match awaited.wait(self.patience)? {
                (_, Outcome::Stopped { drained: true }) => {}
                (rank, Outcome::Stopped { drained: false }) => {
                    let reason = "its backend still had work when it left".to_owned();
                    return Err(FleetError::Rank { rank, reason });
                }
                (rank, other) => return Err(unexpected(rank, other)),
            }
        }
        Ok(())
    }
}

fn unexpected(rank: u32, outcome: Outcome) -> FleetError {
    let reason = match outcome {
        Outcome::Error(reason) => reason,
        other => format!("answered {other:?}"),
    };
    FleetError::Rank { rank, reason }
}

impl Awaited {
    fn wait(self, patience: Duration) -> Result<(u32, Outcome), FleetError> {
        let rank = self.rank;
        let began = Instant::now();
        loop {
            if crate::interrupt::is_set() {
                return Err(FleetError::Interrupted);
            }
            match self.answer.recv_timeout(SLICE) {
                Ok(outcome) => return Ok((rank, outcome)),
                Err(RecvTimeoutError::Disconnected) => return Err(FleetError::Gone { rank }),
                Err(RecvTimeoutError::Timeout) if began.elapsed() >= patience => {
                    return Err(FleetError::Silent { rank, seconds: patience.as_secs() });
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl Rank {
    fn spawn(program: &PathBuf, number: u32, setup: &Setup) -> Result<(Self, Awaited), FleetError> {
        let spawn_error = |error| FleetError::Spawn { rank: number, error };
        let mut child = Process::new(program)
            .arg(crate::cli::RANK_COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(spawn_error)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(FleetError::Gone { rank: number });
        };
        let waiting: Waiting = Arc::default();
        let rank =
            Self { number, child, input: Mutex::new(Some(input)), waiting: Arc::clone(&waiting) };
        let (tell, answer) = channel();
        lock(&waiting).insert(0, tell);
        std::thread::Builder::new()
            .name(format!("ucm_rank_{number}"))
            .spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    let Ok(Reply { id, outcome }) = serde_json::from_str(&line) else {
                        tracing::error!(rank = number, line, "not an answer");
                        break;
                    };
                    if let Some(tell) = lock(&waiting).remove(&id) {
                        // Whoever asked may have given up.
                        let _given_up = tell.send(outcome);
                    }
                }
                // Everybody who still waits learns that nothing will come.
                lock(&waiting).clear();
            })
            .map_err(spawn_error)?;
        let mut setup = setup.clone();
        setup.config.rank = number;
        let line = serde_json::to_string(&setup).map_err(|e| spawn_error(e.into()))?;
        rank.write(&line).ok_or(FleetError::Gone { rank: number })?;
        Ok((rank, Awaited { rank: number, answer }))
    }

    fn write(&self, line: &str) -> Option<()> {
        let mut input = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        let input = input.as_mut()?;
        writeln!(input, "{line}").and_then(|()| input.flush()).ok()
    }

    fn send(&self, id: u64, command: Command) -> Option<Awaited> {
        let (tell, answer) = channel();
        lock(&self.waiting).insert(id, tell);
        let line = serde_json::to_string(&Request { id, command }).ok()?;
        self.write(&line)?;
        Some(Awaited { rank: self.number, answer })
    }
}

fn lock(waiting: &Waiting) -> std::sync::MutexGuard<'_, HashMap<u64, Sender<Outcome>>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}
