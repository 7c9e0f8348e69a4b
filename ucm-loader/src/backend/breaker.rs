//! A breaker: a backend that keeps failing is not asked any more, until a probe says it works.
//!
//! *Closed*: everything goes through, and the outcome of the last requests is
//! remembered. When half of them failed the breaker *opens*: every request is
//! a miss at once, so a broken disk or a hung mount costs the ranks nothing.
//! After a pause a probe (write, read back, compare, delete) runs on a thread
//! of its own, which may hang without harm. When it succeeds the breaker is
//! *half open*: one request at a time goes through; the first that succeeds
//! closes it, the first that fails opens it again.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ucm_core::key::BlockId;

use super::error::BackendError;
use super::traits::{Backend, LoadRequest, SharedMemory, StoreRequest};

/// Outcomes that are remembered.
const WINDOW: u32 = 32;
/// Outcomes without which nothing is concluded.
const LEAST: u32 = 8;

/// Whether a backend is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Health {
    /// It works.
    Closed,
    /// It does not; everything is a miss.
    Open,
    /// A probe has succeeded; one request at a time finds out.
    HalfOpen,
}

/// Finds out whether the backend works, by using it.
pub type Probe = Arc<dyn Fn() -> Result<(), BackendError> + Send + Sync>;

struct State {
    health: Health,
    /// The last outcomes, a bit each; set: it failed.
    failures: u32,
    outcomes: u32,
    /// Half open: a request is finding out.
    trying: bool,
    opened: u64,
    stopping: bool,
}

struct Inner {
    backend: Arc<dyn Backend>,
    probe: Probe,
    pause: Duration,
    state: Mutex<State>,
    /// Ends a probe thread's pause early.
    stopped: Condvar,
}

/// A backend behind a breaker.
pub struct Breaker {
    inner: Arc<Inner>,
}

impl Breaker {
    /// Watches over `backend`. Between two probes it waits for `pause`.
    pub fn new(backend: Arc<dyn Backend>, probe: Probe, pause: Duration) -> Self {
        let state = State {
            health: Health::Closed,
            failures: 0,
            outcomes: 0,
            trying: false,
            opened: 0,
            stopping: false,
        };
        let (state, stopped) = (Mutex::new(state), Condvar::new());
        Self { inner: Arc::new(Inner { backend, probe, pause, state, stopped }) }
    }

    /// Whether the backend is asked now.
    pub fn health(&self) -> Health {
        self.inner.lock().health
    }

    /// How often the breaker has opened.
    pub fn opened(&self) -> u64 {
        self.inner.lock().opened
    }
}

/// Whether an outcome speaks against the backend. A shard that is not there,
/// or is not what it should be, is an answer; a full queue is ours.
fn is_failure(error: &BackendError) -> Option<bool> {
    match error {
        BackendError::Io { .. }
        | BackendError::Injected { .. }
        | BackendError::ShortRead { .. }
        | BackendError::TimedOut => Some(true),
        BackendError::Abandoned
        | BackendError::ShuttingDown
        | BackendError::QueueFull { .. }
        | BackendError::TooManyUnfinished { .. }
        | BackendError::Unavailable => None,
        _ => Some(false),
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request may go through.
    fn admit(&self) -> bool {
        let mut state = self.lock();
        match state.health {
            Health::Closed => true,
            Health::Open => false,
            Health::HalfOpen => !std::mem::replace(&mut state.trying, true),
        }
    }

    /// A request that went through has ended.
    fn note<T>(self: &Arc<Self>, result: &Result<T, BackendError>) {
        let failed = result.as_ref().map_or_else(is_failure, |_| Some(false));
        let mut state = self.lock();
        let tried = std::mem::take(&mut state.trying);
        let Some(failed) = failed else { return };
        match state.health {
            Health::Closed => {
                state.failures = state.failures << 1 | u32::from(failed);
                state.outcomes = (state.outcomes + 1).min(WINDOW);
                let bad = state.failures.count_ones();
                if failed && state.outcomes >= LEAST && bad * 2 >= state.outcomes {
                    self.open(state);
                }
            }
            Health::HalfOpen if tried && failed => self.open(state),
            Health::HalfOpen if tried => {
                (state.health, state.failures, state.outcomes) = (Health::Closed, 0, 0);
                tracing::info!("the backend works again");
            }
            // Begun before it opened.
            Health::Open | Health::HalfOpen => {}
        }
    }

    fn open(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        state.health = Health::Open;
        state.opened += 1;
        tracing::warn!("the backend keeps failing: everything is a miss until a probe succeeds");
        let inner = Arc::clone(self);
        let spawned = std::thread::Builder::new()
            .name("ucm_probe".to_owned())
            .spawn(move || inner.probe_until_it_works());
        if let Err(error) = spawned {
            // Better to try than to stay shut for ever.
            tracing::error!(%error, "no thread for probing; the next request finds out");
            state.health = Health::HalfOpen;
        }
    }

    fn probe_until_it_works(&self) {
        loop {
            let deadline = Instant::now() + self.pause;
            let mut state = self.lock();
            while !state.stopping {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let woken = self.stopped.wait_timeout(state, left);
                state = woken.unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.stopping {
                return;
            }
            drop(state);
            match (self.probe)() {
                Ok(()) => {
                    let mut state = self.lock();
                    (state.health, state.trying) = (Health::HalfOpen, false);
                    return;
                }
                Err(error) => tracing::debug!(%error, "the backend's probe failed"),
            }
        }
    }
}

impl Backend for Breaker {
    fn submit(&self, batch: Vec<LoadRequest>) {
        let mut admitted = Vec::with_capacity(batch.len());
        for request in batch {
            if self.inner.admit() {
                let inner = Arc::clone(&self.inner);
                admitted.push(request.intercept(move |_, result| {
                    inner.note(&result);
                    result
                }));
            } else {
                request.finish(Err(BackendError::Unavailable));
            }
        }
        if !admitted.is_empty() {
            self.inner.backend.submit(admitted);
        }
    }

    fn adopt_memory(&self, memory: SharedMemory) {
        self.inner.backend.adopt_memory(memory);
    }

    fn put(&self, request: StoreRequest) {
        if !self.inner.admit() {
            return request.finish(Err(BackendError::Unavailable));
        }
        let inner = Arc::clone(&self.inner);
        self.inner.backend.put(request.watch(move |result| inner.note(result)));
    }

    fn discard(&self, block: BlockId) {
        self.inner.backend.discard(block);
    }

    fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError> {
        if !self.inner.admit() {
            return Ok(vec![false; blocks.len()]);
        }
        let result = self.inner.backend.exists(blocks);
        self.inner.note(&result);
        result
    }

    fn longest_prefix(&self, blocks: &[BlockId]) -> Result<usize, BackendError> {
        if !self.inner.admit() {
            return Ok(0);
        }
        let result = self.inner.backend.longest_prefix(blocks);
        self.inner.note(&result);
        result
    }

    fn flush(&self, deadline: Instant) -> Result<(), BackendError> {
        self.inner.backend.flush(deadline)
    }

    fn shutdown(&self, deadline: Instant) -> Result<(), BackendError> {
        self.inner.lock().stopping = true;
        self.inner.stopped.notify_all();
        self.inner.backend.shutdown(deadline)
    }
}

impl Drop for Breaker {
    fn drop(&mut self) {
        // A probe that hangs is left to itself; it holds nothing of ours.
        self.inner.lock().stopping = true;
        self.inner.stopped.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use ucm_core::key::ShardKey;

    use super::*;
    use crate::backend::traits::{LoadedShard, RawBuf};

    /// Answers on the spot, well or badly.
    #[derive(Default)]
    struct Switch {
        broken: AtomicBool,
        asked: AtomicU32,
    }

    impl Backend for Switch {
        fn submit(&self, batch: Vec<LoadRequest>) {
            for request in batch {
                self.asked.fetch_add(1, Ordering::SeqCst);
                let broken = self.broken.load(Ordering::SeqCst);
                request.finish(if broken {
                    Err(BackendError::Injected { errno: libc::EIO })
                } else {
                    Ok(LoadedShard { len_bytes: 0, checksum: None })
                });
            }
        }
        fn put(&self, request: StoreRequest) {
            request.finish(Ok(()));
        }
        fn discard(&self, _: BlockId) {}
        fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError> {
            Ok(vec![true; blocks.len()])
        }
        fn flush(&self, _: Instant) -> Result<(), BackendError> {
            Ok(())
        }
        fn shutdown(&self, _: Instant) -> Result<(), BackendError> {
            Ok(())
        }
    }

    fn load(breaker: &Breaker) -> Result<LoadedShard, BackendError> {
        let (tell, told) = std::sync::mpsc::channel();
        // SAFETY: no bytes at all.
        let nothing = unsafe { RawBuf::new(std::ptr::NonNull::dangling().as_ptr(), 0) };
        let request = LoadRequest::new(ShardKey::default(), nothing, move |result| {
            tell.send(result).unwrap();
        });
        breaker.submit(vec![request]);
        told.recv().unwrap()
    }

    fn switched() -> (Arc<Switch>, Breaker) {
        let switch = Arc::new(Switch::default());
        let probed = Arc::clone(&switch);
        let probe: Probe = Arc::new(move || match probed.broken.load(Ordering::SeqCst) {
            true => Err(BackendError::Injected { errno: libc::EIO }),
            false => Ok(()),
        });
        let pause = Duration::from_millis(1);
        (Arc::clone(&switch), Breaker::new(switch, probe, pause))
    }

    #[test]
    fn a_backend_that_keeps_failing_is_left_alone_until_a_probe_succeeds() {
        let (switch, breaker) = switched();
        switch.broken.store(true, Ordering::SeqCst);
        while breaker.health() == Health::Closed {
            assert_eq!(load(&breaker), Err(BackendError::Injected { errno: libc::EIO }));
        }
        assert_eq!(switch.asked.load(Ordering::SeqCst), LEAST);
        // Probes fail, so it stays open: a miss, and nobody is asked.
        for _ in 0..20 {
            assert_eq!(load(&breaker), Err(BackendError::Unavailable));
            assert_eq!(breaker.exists(&[BlockId::default()]), Ok(vec![false]));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(switch.asked.load(Ordering::SeqCst), LEAST);
        switch.broken.store(false, Ordering::SeqCst);
        while breaker.health() == Health::Open {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(load(&breaker).is_ok());
        assert_eq!((breaker.health(), breaker.opened()), (Health::Closed, 1));
    }

    #[test]
    fn a_half_open_breaker_opens_again_with_the_first_failure() {
        let (switch, breaker) = switched();
        switch.broken.store(true, Ordering::SeqCst);
        while breaker.health() == Health::Closed {
            let _failed = load(&breaker);
        }
        switch.broken.store(false, Ordering::SeqCst);
        while breaker.health() == Health::Open {
            std::thread::sleep(Duration::from_millis(1));
        }
        switch.broken.store(true, Ordering::SeqCst);
        assert!(load(&breaker).is_err());
        assert_eq!(breaker.opened(), 2);
    }

    #[test]
    fn now_and_then_a_failure_and_answers_of_absence_open_nothing() {
        let (switch, breaker) = switched();
        for round in 0..200 {
            switch.broken.store(round % 3 == 0, Ordering::SeqCst);
            let _either = load(&breaker);
        }
        assert_eq!(breaker.health(), Health::Closed);
        for _ in 0..50 {
            breaker.inner.note::<()>(&Err(BackendError::NotFound(ShardKey::default())));
        }
        assert_eq!(breaker.health(), Health::Closed);
    }
}
