//! Blows from outside: SIGKILL, and SIGSTOP with SIGCONT a while later.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use ucm_posix::monotonic_ns;

use crate::chaos::Run;
use crate::rank_process::strike;
use crate::rng::Rng;

/// When somebody stood still.
#[derive(Default)]
pub struct Stops(Mutex<Vec<(u64, u64)>>);

impl Stops {
    fn lock(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, now_ns: u64) {
        self.lock().push((now_ns, u64::MAX));
    }

    fn end(&self, now_ns: u64) {
        if let Some(last) = self.lock().last_mut() {
            last.1 = now_ns;
        }
    }

    /// Whether anybody stood still at any time between the two.
    pub fn overlap(&self, began_ns: u64, ended_ns: u64) -> bool {
        // The newest are at the end.
        let stops = self.lock();
        stops.iter().rev().any(|&(from_ns, to_ns)| from_ns <= ended_ns && began_ns <= to_ns)
    }
}

/// Strikes until the run is over; nobody is left standing still. Returns how
/// many were stopped.
pub(crate) fn rain(run: &Run, seed: u64) -> u64 {
    let mut rng = Rng::new(seed);
    let mut stops = 0;
    while !run.is_over() {
        std::thread::sleep(Duration::from_millis(8 + rng.below(24)));
        let target = &run.targets[rng.below(run.targets.len() as u64) as usize];
        if !rng.one_in(6) {
            strike(target, Signal::SIGKILL);
            continue;
        }
        run.stops.begin(monotonic_ns());
        if strike(target, Signal::SIGSTOP) {
            stops += 1;
            let still = Duration::from_millis(5 + rng.below(150));
            std::thread::sleep(still / 2);
            // Others die meanwhile, and now and then the stopped one itself.
            let other = &run.targets[rng.below(run.targets.len() as u64) as usize];
            strike(other, Signal::SIGKILL);
            std::thread::sleep(still / 2);
            // To whoever has its place by now; a running one does not mind.
            strike(target, Signal::SIGCONT);
        }
        run.stops.end(monotonic_ns());
    }
    stops
}
