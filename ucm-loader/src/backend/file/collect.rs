//! Keeping a store within its limit: the coldest blocks go first.
//!
//! How cold a block is, its file's modification time says: its bytes never
//! change after it has become visible, so the time is free for that use, and
//! whoever opens a block to read it sets it (at most once a minute). That
//! works on every mount, `noatime` or not, and needs no log.
//!
//! Only complete blocks are removed, by name: who has one open reads on, who
//! writes one has it in `tmp/`. A block that is gone is a miss like any other.
//! One collector works on a store at a time, by a lock that the kernel frees
//! if it dies; others leave it to him.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, Mode, OFlags, Timespec, Timestamps, flock};
use rustix::io::Errno;

use super::store::io_error;
use super::upkeep::{Found, blocks};
use crate::backend::traits::BackendError;

/// A block's time is set again only when it is older than this.
const TOUCH_EVERY: Duration = Duration::from_secs(60);
/// Part of the limit that a process may write before it looks again.
const LOOK_EVERY_PART: u64 = 64;

/// When blocks go, and how many.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// What the blocks may take on the medium.
    pub limit_bytes: u64,
    /// Collection begins when they take more than this part of it.
    pub trigger_percent: u64,
    /// And ends when they take no more than this part.
    pub target_percent: u64,
    /// Blocks that one collection removes at most.
    pub batch: usize,
}

impl Limits {
    /// Room for eight writers: each may add a 64th between two looks.
    pub fn new(limit_bytes: u64) -> Self {
        Self { limit_bytes, trigger_percent: 85, target_percent: 75, batch: usize::MAX }
    }

    fn part(&self, percent: u64) -> u64 {
        (u128::from(self.limit_bytes) * u128::from(percent) / 100) as u64
    }
}

/// What a collection did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct Collected {
    /// Somebody else was at it, so nothing was done.
    pub busy: bool,
    /// What the blocks took before.
    pub before_bytes: u64,
    /// And after.
    pub after_bytes: u64,
    /// Blocks that were removed.
    pub removed_blocks: u64,
}

/// Removes the coldest blocks of the store in `root` if it is over its trigger.
///
/// # Errors
/// When the store cannot be read. What cannot be removed stays.
pub fn collect(root: &Path, limits: &Limits) -> Result<Collected, BackendError> {
    let path = root.join("gc.lock");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let failed = |call| {
        let path = path.clone();
        move |error: Errno| io_error(call, &path, &error.into())
    };
    let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(failed("open"))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(Collected { busy: true, ..Collected::default() }),
        other => other.map_err(failed("flock"))?,
    }
    let mut found: Vec<Found> =
        blocks(root)?.into_iter().filter(|found| found.block.is_some()).collect();
    let before_bytes = found.iter().map(|found| found.bytes).sum();
    let mut collected = Collected { before_bytes, after_bytes: before_bytes, ..Default::default() };
    if before_bytes <= limits.part(limits.trigger_percent) {
        return Ok(collected);
    }
    found.sort_by_key(|found| found.used);
    let target = limits.part(limits.target_percent);
    for found in found.iter().take(limits.batch) {
        if collected.after_bytes <= target {
            break;
        }
        // Read or put anew since: not cold any more.
        let is_warmer = fs::symlink_metadata(&found.path)
            .and_then(|metadata| metadata.modified())
            .is_ok_and(|used| used != found.used);
        if is_warmer {
            continue;
        }
        match fs::remove_file(&found.path) {
            Ok(()) => collected.removed_blocks += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %found.path.display(), %error, "a cold block cannot be removed");
                continue;
            }
        }
        collected.after_bytes -= found.bytes;
    }
    Ok(collected)
}

/// Notes that a block is being read.
pub(super) fn touch(file: &fs::File) {
    let is_recent = file.metadata().and_then(|metadata| metadata.modified()).is_ok_and(|used| {
        SystemTime::now().duration_since(used).is_ok_and(|age| age < TOUCH_EVERY)
    });
    if !is_recent {
        let now = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
        let keep = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
        let times = Timestamps { last_access: keep, last_modification: now };
        // A store that cannot be written cannot be collected either.
        rustix::fs::futimens(file, &times).ok();
    }
}

/// A process's share in keeping the limit.
pub(super) struct Keeper {
    limits: Option<Limits>,
    /// Written since the last look; the first write looks.
    unseen_bytes: Mutex<u64>,
}

impl Keeper {
    pub(super) fn new(limit_bytes: Option<u64>) -> Self {
        Self { limits: limit_bytes.map(Limits::new), unseen_bytes: Mutex::new(u64::MAX / 2) }
    }

    /// A block of so many bytes has become visible: collects when it is time.
    pub(super) fn wrote(&self, root: &Path, bytes: u64) {
        let Some(limits) = &self.limits else { return };
        {
            let mut unseen = self.unseen_bytes.lock().unwrap_or_else(PoisonError::into_inner);
            *unseen += bytes;
            if *unseen < limits.limit_bytes / LOOK_EVERY_PART {
                return;
            }
            *unseen = 0;
        }
        match collect(root, limits) {
            Ok(collected) if collected.removed_blocks > 0 => {
                tracing::info!(?collected, "cold blocks were removed");
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "the store's limit could not be looked after"),
        }
    }
}
