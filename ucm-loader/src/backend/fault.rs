//! A middleware that makes a backend slow, failing, short or wrong, repeatably.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ucm_core::key::{BlockId, ShardKey};
use ucm_core::sync::{AtomicU64, Ordering};

use super::traits::{Backend, BackendError, LoadRequest, LoadedShard, SharedMemory, StoreRequest};
use crate::content::mix;

const MILLION: u64 = 1_000_000;

/// How often what goes wrong, in cases of a million. A load that several
/// would hit gets the first of errno, short, corrupt; a delay comes on top.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultPlan {
    /// Chooses the cases, together with the key and how often it was asked for.
    pub seed: u64,
    /// Loads that are answered late.
    pub delay_ppm: u32,
    /// By so much.
    pub delay: Duration,
    /// Loads that fail without reaching the backend.
    pub errno_ppm: u32,
    /// With this error number.
    pub errno: i32,
    /// Loads that are read and then reported as cut short.
    pub short_ppm: u32,
    /// Loads that are reported as good with one byte changed.
    pub corrupt_ppm: u32,
    /// Stores that fail with `errno` without reaching the backend.
    pub store_errno_ppm: u32,
}

/// What has been done so far.
#[derive(Debug, Default)]
pub struct FaultCounts {
    /// Loads that were delayed.
    pub delayed: AtomicU64,
    /// Loads that failed with the error number.
    pub failed: AtomicU64,
    /// Loads that were cut short.
    pub cut: AtomicU64,
    /// Loads with a changed byte.
    pub corrupted: AtomicU64,
    /// Stores that failed.
    pub failed_stores: AtomicU64,
}

/// A backend with faults.
pub struct FaultBackend<B> {
    inner: B,
    plan: FaultPlan,
    counts: FaultCounts,
    /// How often each key was asked for: a retry draws anew.
    attempts: Mutex<HashMap<ShardKey, u64>>,
}

/// Independent draws for one load.
#[derive(Clone, Copy)]
struct Draws(u64);

impl Draws {
    fn of(&mut self, ppm: u32) -> bool {
        self.0 = mix(self.0);
        self.0 % MILLION < u64::from(ppm)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 % limit.max(1) as u64) as usize
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl<B: Backend> FaultBackend<B> {
    /// `inner` with the faults of `plan`.
    pub fn new(inner: B, plan: FaultPlan) -> Self {
        Self { inner, plan, counts: FaultCounts::default(), attempts: Mutex::default() }
    }

    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// What has been done so far.
    pub fn counts(&self) -> &FaultCounts {
        &self.counts
    }

    fn draws(&self, key: ShardKey) -> Draws {
        let mut attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        let attempt = attempts.entry(key).or_insert(0);
        *attempt += 1;
        Draws(mix(self.plan.seed ^ key.hash().0).wrapping_add(*attempt))
    }

    /// `None` when the request has been answered here.
    fn spoil(&self, request: LoadRequest) -> Option<LoadRequest> {
        let FaultPlan { delay_ppm, delay, errno_ppm, errno, short_ppm, corrupt_ppm, .. } =
            self.plan;
        let mut draws = self.draws(request.key());
        let late = draws.of(delay_ppm);
        let mut request = request;
        if late {
            count(&self.counts.delayed);
            // Slept in the thread that answers; `submit` must not block.
            request = request.intercept(move |_, result| {
                thread::sleep(delay);
                result
            });
        }
        if draws.of(errno_ppm) {
            count(&self.counts.failed);
            request.finish(Err(BackendError::Injected { errno }));
            return None;
        }
        if draws.of(short_ppm) {
            count(&self.counts.cut);
            request = request.intercept(move |_, result| {
                let LoadedShard { len_bytes, .. } = result?;
                Err(BackendError::ShortRead { got_bytes: len_bytes / 2, wanted_bytes: len_bytes })
            });
        } else if draws.of(corrupt_ppm) {
            count(&self.counts.corrupted);
            request = request.intercept(move |buffer, result| {
                let loaded = result?;
                let at = draws.below(loaded.len_bytes as usize);
                if let Some(byte) = buffer.get_mut(at) {
                    *byte ^= 0x40;
                }
                Ok(loaded)
            });
        }
        Some(request)
    }
}

impl<B: Backend> Backend for FaultBackend<B> {
    fn submit(&self, batch: Vec<LoadRequest>) {
        self.inner.submit(batch.into_iter().filter_map(|request| self.spoil(request)).collect());
    }

    fn adopt_memory(&self, memory: SharedMemory) {
        self.inner.adopt_memory(memory);
    }

    fn put(&self, request: StoreRequest) {
        // Another stream of draws than the loads of the same key have.
        let mut draws = self.draws(request.key());
        draws.0 = mix(draws.0 ^ u64::MAX);
        if draws.of(self.plan.store_errno_ppm) {
            count(&self.counts.failed_stores);
            request.finish(Err(BackendError::Injected { errno: self.plan.errno }));
        } else {
            self.inner.put(request);
        }
    }

    fn discard(&self, block: BlockId) {
        self.inner.discard(block);
    }

    fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError> {
        self.inner.exists(blocks)
    }

    fn longest_prefix(&self, blocks: &[BlockId]) -> Result<usize, BackendError> {
        self.inner.longest_prefix(blocks)
    }

    fn flush(&self, deadline: Instant) -> Result<(), BackendError> {
        self.inner.flush(deadline)
    }

    fn shutdown(&self, deadline: Instant) -> Result<(), BackendError> {
        self.inner.shutdown(deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::file::{FileBackend, FileOptions};
    use crate::backend::testing::*;
    use crate::backend::traits::StoreGeometry;
    use crate::content;

    const ALWAYS: u32 = 1_000_000;

    fn with(plan: FaultPlan, check: impl FnOnce(&FaultBackend<FileBackend>)) {
        let dir = tempfile::tempdir().unwrap();
        let geometry = StoreGeometry { shard_bytes: 512, shards_per_block: 1, content_tag: 0 };
        let inner = FileBackend::open(&FileOptions::new(dir.path(), geometry), THREADS).unwrap();
        (0..100).for_each(|number| put_block(&inner, id(number), 1, 512));
        check(&FaultBackend::new(inner, plan));
    }

    fn key() -> ShardKey {
        ShardKey::new(id(1), 0)
    }

    #[test]
    fn an_empty_plan_changes_nothing() {
        with(FaultPlan::default(), |backend| assert_block(backend, id(1), 1, 512));
    }

    #[test]
    fn an_injected_errno_is_the_loads_answer() {
        let plan = FaultPlan { errno_ppm: ALWAYS, errno: libc::EIO, ..FaultPlan::default() };
        with(plan, |backend| {
            let injected = BackendError::Injected { errno: libc::EIO };
            assert_eq!(load(backend, key(), 512).1, Err(injected));
        });
    }

    #[test]
    fn a_short_read_is_an_error_with_both_lengths() {
        with(FaultPlan { short_ppm: ALWAYS, ..FaultPlan::default() }, |backend| {
            let short = BackendError::ShortRead { got_bytes: 256, wanted_bytes: 512 };
            assert_eq!(load(backend, key(), 512).1, Err(short));
        });
    }

    #[test]
    fn a_corrupted_load_looks_good_and_has_one_wrong_byte() {
        with(FaultPlan { corrupt_ppm: ALWAYS, ..FaultPlan::default() }, |backend| {
            let (bytes, answer) = load(backend, key(), 512);
            assert_eq!(answer.unwrap().len_bytes, 512);
            assert!(content::verify(&bytes, SEED, &key(), 0).is_some());
            let good = bytes_of(key(), 512);
            assert_eq!(bytes.iter().zip(&good).filter(|(found, good)| found != good).count(), 1);
        });
    }

    #[test]
    fn a_delayed_load_is_late_and_otherwise_right() {
        let delay = Duration::from_millis(20);
        with(FaultPlan { delay_ppm: ALWAYS, delay, ..FaultPlan::default() }, |backend| {
            let begun = Instant::now();
            assert_block(backend, id(1), 1, 512);
            assert!(begun.elapsed() >= delay);
        });
    }

    #[test]
    fn a_failed_store_leaves_no_block() {
        let plan = FaultPlan { store_errno_ppm: ALWAYS, errno: 28, ..FaultPlan::default() };
        with(plan, |backend| {
            let key = ShardKey::new(id(200), 0);
            let injected = BackendError::Injected { errno: 28 };
            assert_eq!(put(backend, key, b"x", None), Err(injected));
            assert_eq!(backend.exists(&[id(200)]), Ok(vec![false]));
        });
    }

    #[test]
    fn the_same_seed_fails_the_same_loads_and_a_retry_draws_anew() {
        let failing = |seed| {
            let plan = FaultPlan { seed, errno_ppm: 300_000, errno: 5, ..FaultPlan::default() };
            let mut failed = Vec::new();
            with(plan, |backend| {
                for _ in 0..2 {
                    let fails = |n| load(backend, ShardKey::new(id(n), 0), 512).1.is_err();
                    failed.push((0..100).map(fails).collect::<Vec<_>>());
                }
                let count: usize = failed.iter().flatten().filter(|failed| **failed).count();
                assert_eq!(backend.counts().failed.load(Ordering::Relaxed), count as u64);
                assert!((30..90).contains(&count), "{count} of 200 at 30 %");
            });
            failed
        };
        let first = failing(1);
        assert_eq!(first, failing(1));
        assert_ne!(first, failing(2));
        assert_ne!(first[0], first[1]);
    }
}
