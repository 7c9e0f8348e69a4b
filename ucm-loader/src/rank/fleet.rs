//! The parent's side: N rank processes, started, driven and ended together.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use ucm_posix::ShmDir;

use crate::channel::client::{Answers, ClientError, channel_id};
use crate::channel::{Health, Heard, Limits, Watchdog, Worker};
use crate::rank::protocol::{Command, Done, Outcome, Setup};

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
    /// A rank's channel could not be made, or refused a message.
    #[error("rank {rank}: {error}")]
    Channel {
        /// Which rank.
        rank: u32,
        /// Why.
        error: ClientError,
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
/// How often the watchdogs look.
const WATCH_PERIOD: Duration = Duration::from_millis(250);

fn of_client(rank: u32, error: ClientError) -> FleetError {
    match error {
        ClientError::Dead => FleetError::Gone { rank },
        ClientError::Spawn(error) => FleetError::Spawn { rank, error },
        ClientError::Slow { waited_ms, .. } => {
            FleetError::Silent { rank, seconds: waited_ms / 1000 }
        }
        error => FleetError::Channel { rank, error },
    }
}

/// One rank process. Ended when dropped.
struct Rank {
    // Before `worker`: it looks at the channel.
    watchdog: Watchdog,
    worker: Worker,
}

/// An answer that has not come yet.
pub struct Awaited {
    rank: u32,
    answers: Answers,
}

/// Rank processes `0..n` of one cache.
pub struct Fleet {
    ranks: Vec<Rank>,
    seed: u64,
    patience: Duration,
}

impl Fleet {
    /// Starts `ranks` processes of this program, each with `setup` under its
    /// own rank number, and each behind a channel of its own in the setup's
    /// shared-memory directory. All of them have joined when this returns.
    /// `patience` is how long any later command may take.
    ///
    /// # Errors
    /// See [`FleetError`].
    pub fn start(ranks: u32, setup: &Setup, patience: Duration) -> Result<Self, FleetError> {
        let program =
            std::env::current_exe().map_err(|error| FleetError::Spawn { rank: 0, error })?;
        let dir = ShmDir::new(&setup.config.shm_dir);
        let mut fleet = Self { ranks: Vec::new(), seed: setup.seed, patience };
        for rank in 0..ranks {
            let id = channel_id("rank")
                .map_err(|error| FleetError::Rank { rank, reason: error.to_string() })?;
            let worker =
                Worker::start(&program, &dir, &id).map_err(|error| of_client(rank, error))?;
            let tell = move |health| match health {
                Health::Hung { silent_ns } => {
                    tracing::warn!(rank, silent_ms = silent_ns / 1_000_000, "a rank hangs");
                }
                health => tracing::debug!(rank, ?health, "a rank's health"),
            };
            let watchdog =
                Watchdog::start(worker.channel().clone(), Limits::default(), WATCH_PERIOD, tell)
                    .map_err(|error| FleetError::Spawn { rank, error })?;
            fleet.ranks.push(Rank { watchdog, worker });
        }
        // All are asked before any is waited for: they start side by side.
        let mut started = Vec::new();
        for (rank, process) in (0..).zip(&fleet.ranks) {
            let mut setup = setup.clone();
            setup.config.rank = rank;
            let answers = process.worker.load_weights(&setup, START_PATIENCE);
            started.push(Awaited { rank, answers: answers.map_err(|e| of_client(rank, e))? });
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

    /// What rank `rank`'s watchdog says.
    pub fn health(&self, rank: u32) -> Option<Health> {
        self.ranks.get(rank as usize).map(|rank| rank.watchdog.health())
    }

    /// Sends `command` to rank `rank`.
    ///
    /// # Errors
    /// See [`FleetError`].
    pub fn send(&self, rank: u32, command: Command) -> Result<Awaited, FleetError> {
        let Some(process) = self.ranks.get(rank as usize) else {
            return Err(FleetError::Gone { rank });
        };
        let answers = process.worker.send(&command, self.seed, self.patience);
        Ok(Awaited { rank, answers: answers.map_err(|error| of_client(rank, error))? })
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
            match self.answers.recv_timeout(SLICE) {
                Ok(Heard::Outcome(outcome)) => return Ok((rank, outcome)),
                // Not asked for here.
                Ok(Heard::Tokens { .. }) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(FleetError::Gone { rank }),
                Err(RecvTimeoutError::Timeout) if began.elapsed() >= patience => {
                    return Err(FleetError::Silent { rank, seconds: patience.as_secs() });
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}
