//! Alive, busy, hung or dead: what can be said of a worker, and by whom.
//!
//! *Dead* is the kernel's word alone: nobody holds the worker's byte. Whether
//! a living one goes forward is told by its heartbeat, counted in time that
//! the watchdog itself has seen pass: each look adds what `CLOCK_MONOTONIC` says
//! has passed since the look before, but never more than two periods. That
//! clock stands still while the machine is suspended and knows no steps; and
//! a watchdog that was stopped, or a virtual machine that was paused, sees a
//! gap, which counts as one look and not as the worker's silence. So *hung*
//! means: silent while others were seen to run. It kills nobody.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ucm_core::channel::Status;
use ucm_posix::{EngineChannel, monotonic_ns};

/// What a worker is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Health {
    /// It beats, and has nothing to do.
    Alive,
    /// It beats, and works.
    Busy,
    /// It is there, and has not beaten for its limit.
    Hung {
        /// For how long it has been seen silent.
        silent_ns: u64,
    },
    /// It is gone.
    Dead,
}

/// For how long a worker may be silent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// While it loads or unloads weights, which is one long step.
    pub weights: Duration,
    /// At any other time; it beats four times a second.
    pub other: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { weights: Duration::from_secs(180), other: Duration::from_secs(2) }
    }
}

/// What was seen of one worker so far. Pure: whoever looks says what there is.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    limits: Limits,
    period_ns: u64,
    /// The last look, and the heartbeat then.
    seen: Option<(u64, u64)>,
    silent_ns: u64,
}

impl Watch {
    /// Nothing yet, to be looked at every `period`.
    pub fn new(limits: Limits, period: Duration) -> Self {
        let period_ns = period.as_nanos() as u64;
        Self { limits, period_ns, seen: None, silent_ns: 0 }
    }

    /// One look: the time on a clock that does not count suspensions, whether
    /// the kernel says it is there, how often it has beaten, what it does.
    pub fn look(&mut self, now_ns: u64, alive: bool, heartbeat: u64, status: Status) -> Health {
        if !alive {
            // Whoever comes next begins anew.
            self.seen = None;
            self.silent_ns = 0;
            return Health::Dead;
        }
        match self.seen {
            Some((then_ns, before)) if before == heartbeat => {
                let passed_ns = now_ns.saturating_sub(then_ns);
                self.silent_ns += passed_ns.min(self.period_ns * 2);
            }
            _ => self.silent_ns = 0,
        }
        self.seen = Some((now_ns, heartbeat));
        let limit = match status {
            Status::LoadWeights | Status::UnloadWeights => self.limits.weights,
            _ => self.limits.other,
        };
        if self.silent_ns >= limit.as_nanos() as u64 {
            return Health::Hung { silent_ns: self.silent_ns };
        }
        match status {
            Status::Idle | Status::ReqData | Status::Done | Status::Error => Health::Alive,
            _ => Health::Busy,
        }
    }
}

/// A thread that looks at one worker again and again.
pub struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    health: Mutex<Health>,
    stop: AtomicBool,
}

impl Watchdog {
    /// Begins to look, every `period`; `tell` hears of every change, the first
    /// look's finding included.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn start(
        channel: EngineChannel,
        limits: Limits,
        period: Duration,
        tell: impl Fn(Health) + Send + 'static,
    ) -> std::io::Result<Self> {
        let shared =
            Arc::new(Shared { health: Mutex::new(Health::Alive), stop: AtomicBool::new(false) });
        let ours = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("ucm_watchdog".to_owned()).spawn(move || {
                let mut watch = Watch::new(limits, period);
                let mut kind = None;
                while !ours.stop.load(Ordering::Acquire) {
                    // A status that is none is a broken peer's: whoever talks to it
                    // will say so. Here it is no work.
                    let status = channel.status().get().unwrap_or(Status::Error);
                    let alive = channel.is_worker_alive();
                    let heartbeat = channel.status().heartbeat();
                    let health = watch.look(monotonic_ns(), alive, heartbeat, status);
                    *ours.health.lock().unwrap_or_else(PoisonError::into_inner) = health;
                    if kind.replace(std::mem::discriminant(&health))
                        != Some(std::mem::discriminant(&health))
                    {
                        tell(health);
                    }
                    std::thread::park_timeout(period);
                }
            })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// What the last look has found.
    pub fn health(&self) -> Health {
        *self.shared.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _panicked = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const PERIOD: Duration = Duration::from_millis(100);
    const TICK: u64 = 100_000_000;

    fn silent_for(watch: &mut Watch, from_ns: u64, ticks: u64) -> Health {
        let mut health = Health::Dead;
        for tick in 0..=ticks {
            health = watch.look(from_ns + tick * TICK, true, 7, Status::ExecInfer);
        }
        health
    }

    #[test]
    fn a_silent_worker_is_hung_when_its_limit_is_over_and_alive_with_its_next_beat() {
        let mut watch = Watch::new(Limits::default(), PERIOD);
        assert_eq!(silent_for(&mut watch, 0, 19), Health::Busy);
        assert_eq!(silent_for(&mut watch, 2 * SECOND, 0), Health::Hung { silent_ns: 2 * SECOND });
        assert_eq!(watch.look(3 * SECOND, true, 8, Status::ReqData), Health::Alive);
        assert_eq!(watch.look(3 * SECOND, true, 9, Status::Streaming), Health::Busy);
    }

    #[test]
    fn a_gap_in_the_watchdogs_own_time_is_nobodys_silence() {
        // It was stopped for an hour, or the machine was, or a clock stepped.
        let mut watch = Watch::new(Limits::default(), PERIOD);
        silent_for(&mut watch, 0, 10);
        for hour in 1..4 {
            let health = watch.look(hour * 3600 * SECOND, true, 7, Status::ExecInfer);
            assert_eq!(health, Health::Busy, "after {hour} hours");
        }
        // Backwards, too.
        assert_eq!(watch.look(5, true, 7, Status::ExecInfer), Health::Busy);
    }

    #[test]
    fn loading_weights_may_take_its_time_and_death_is_the_kernels_word_alone() {
        let mut watch = Watch::new(Limits::default(), PERIOD);
        for tick in 0..600 {
            assert_eq!(watch.look(tick * TICK, true, 1, Status::LoadWeights), Health::Busy);
        }
        assert_eq!(watch.look(61 * SECOND, false, 2, Status::LoadWeights), Health::Dead);
        assert_eq!(watch.look(62 * SECOND, true, 2, Status::Idle), Health::Alive);
    }
}
