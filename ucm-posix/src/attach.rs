//! Taking part in a segment: a place in its participant table, from join to leave.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ucm_core::cache::token::Eviction;
use ucm_core::cache::{self, Cache, Place};
use ucm_core::host::{Liveness, Waiter};
use ucm_core::participant::{Introduction, ParticipantId, Role};
use ucm_core::sync::AtomicU32;

use crate::error::{ForkedError, JoinError, LockError};
use crate::futex::waiter::SystemWaiter;
use crate::identity::start_time_ticks;
use crate::liveness::{ByteLock, LockFile, OfdLiveness};
use crate::segment::handle::Segment;

/// How long a rank waits for its place. A killed predecessor lets go when its
/// last thread is gone, which takes seconds on a loaded machine.
pub const JOIN_PATIENCE: Duration = Duration::from_secs(5);

/// `Introduction::device` of a participant that drives none.
const NO_DEVICE: u32 = u32::MAX;

/// The operating system as the core sees it: futexes to sleep on, file locks
/// to tell who is alive.
#[derive(Clone)]
pub struct PosixHost {
    waiter: SystemWaiter,
    liveness: OfdLiveness,
    on_evict: Option<EvictionObserver>,
}

/// Called after every eviction of a READY shard.
pub type EvictionObserver = Arc<dyn Fn(&Eviction) + Send + Sync>;

impl PosixHost {
    /// Over the lock bytes of a control file.
    pub fn new(file: Arc<LockFile>) -> Self {
        Self { waiter: SystemWaiter, liveness: OfdLiveness::new(file), on_evict: None }
    }
}

impl Waiter for PosixHost {
    fn now_ns(&self) -> u64 {
        self.waiter.now_ns()
    }

    fn wait(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) {
        self.waiter.wait(word, expected, timeout_ns);
    }

    fn wait_any(&self, words: &[(&AtomicU32, u32)], timeout_ns: u64) {
        self.waiter.wait_any(words, timeout_ns);
    }

    fn wake_all(&self, word: &AtomicU32) {
        self.waiter.wake_all(word);
    }

    fn pause(&self, ns: u64) {
        self.waiter.pause(ns);
    }
}

impl fmt::Debug for PosixHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PosixHost").field("liveness", &self.liveness).finish_non_exhaustive()
    }
}

impl Liveness for PosixHost {
    type Claim = ByteLock;

    fn is_held(&self, participant: ParticipantId) -> bool {
        self.liveness.is_held(participant)
    }

    fn try_claim(&self, participant: ParticipantId) -> Option<ByteLock> {
        self.liveness.try_claim(participant)
    }
}

/// A participant of a segment. Dropping it leaves: pins, claims and the place
/// come back, then the segment is let go of, and the last one out removes it.
pub struct Attachment {
    /// Borrows from `segment`, so it goes first; not dropped in a forked
    /// child, where the memory it would touch is not mapped.
    cache: ManuallyDrop<Cache<'static, PosixHost>>,
    segment: Arc<Segment>,
}

impl Attachment {
    /// Takes a place: a rank its own, a scout the first free one behind them.
    /// `device` is for people to read. Waits up to [`JOIN_PATIENCE`] for a
    /// place whose holder has not quite died yet.
    ///
    /// # Errors
    /// See [`JoinError`].
    pub fn join(
        segment: Arc<Segment>,
        role: Role,
        rank: Option<u32>,
        device: Option<u32>,
    ) -> Result<Self, JoinError> {
        Self::join_within(segment, role, rank, device, JOIN_PATIENCE)
    }

    /// The same with the caller's patience.
    ///
    /// # Errors
    /// See [`JoinError`].
    pub fn join_within(
        segment: Arc<Segment>,
        role: Role,
        rank: Option<u32>,
        device: Option<u32>,
        patience: Duration,
    ) -> Result<Self, JoinError> {
        segment.check_process()?;
        let place = match (role, rank) {
            (Role::Rank, None) => return Err(JoinError::RankMissing),
            (Role::Rank, Some(_)) if segment.data().is_none() => {
                return Err(JoinError::NoDataPlane);
            }
            (Role::Rank, Some(rank)) => Place::Rank(rank),
            (Role::Scout, _) => Place::Any,
        };
        let who = Introduction {
            role,
            pid: std::process::id(),
            device: device.unwrap_or(NO_DEVICE),
            start_time: start_time_ticks(),
        };
        let deadline = Instant::now() + patience;
        let mut nap = Duration::from_millis(1);
        loop {
            // Our presence byte keeps everybody from removing the files, but
            // not a person with `rm`; what has no name can have no new members.
            match segment.is_linked() {
                Ok(true) => {}
                Ok(false) => {
                    let path = segment.control_path().to_path_buf();
                    return Err(JoinError::SegmentGone { path });
                }
                Err(LockError::Os(error)) => return Err(error.into()),
                Err(_) => return Err(ForkedError.into()),
            }
            // SAFETY: the cache is stored beside `segment` and dropped before it.
            let plane = unsafe { segment.plane_unbound() };
            let host = PosixHost::new(Arc::clone(segment.lock_file()));
            match Cache::join(plane, host, place, who) {
                Ok(cache) => return Ok(Self { cache: ManuallyDrop::new(cache), segment }),
                Err(cache::JoinError::RankTaken { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(nap);
                    nap = (nap * 2).min(Duration::from_millis(50));
                }
                Err(error) => return Err(explain(&segment, error)),
            }
        }
    }

    /// The cache, as this participant.
    ///
    /// # Panics
    /// In a forked child of the process that joined: there the memory is not
    /// mapped, and the alternative is a segmentation fault.
    /// [`try_cache`](Self::try_cache) asks.
    #[inline]
    pub fn cache(&self) -> &Cache<'_, PosixHost> {
        assert!(
            self.segment.stamp().is_current(),
            "a cache was used in a forked child; join again there"
        );
        &self.cache
    }

    /// The cache, or [`ForkedError`] in a forked child.
    ///
    /// # Errors
    /// [`ForkedError`].
    #[inline]
    pub fn try_cache(&self) -> Result<&Cache<'_, PosixHost>, ForkedError> {
        self.segment.check_process()?;
        Ok(&self.cache)
    }

    /// Has `observer` called after every eviction of a READY shard by this
    /// participant, with a time from just before it.
    pub fn observe_evictions(&mut self, observer: EvictionObserver) {
        self.cache.host_mut().on_evict = Some(observer);
        self.cache.observe_evictions(|host, eviction| {
            if let Some(observer) = &host.on_evict {
                observer(eviction);
            }
        });
    }

    /// The segment.
    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// My place in the table.
    pub fn me(&self) -> ParticipantId {
        self.cache.me()
    }

    /// Leaves. Dropping does the same.
    pub fn leave(self) {}
}

fn explain(segment: &Segment, error: cache::JoinError) -> JoinError {
    match error {
        cache::JoinError::RankTaken { rank, pid } => JoinError::RankTaken { rank, pid },
        cache::JoinError::RankOutOfRange { rank, local_rank_size } => {
            JoinError::RankOutOfRange { rank, local_rank_size }
        }
        cache::JoinError::TableFull { participants } => {
            JoinError::TableFull { id: segment.id().to_string(), participants }
        }
        other => JoinError::Core(other),
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if self.segment.stamp().is_current() {
            // SAFETY: dropped once, here; `segment` is still alive.
            unsafe { ManuallyDrop::drop(&mut self.cache) }
        }
    }
}

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Attachment");
        out.field("segment", self.segment.id()).field("me", &self.me()).finish_non_exhaustive()
    }
}
