//! Who is alive and who may reap, answered by open-file-description locks on single bytes.
//!
//! The bytes lie far behind the end of the control file, so they lock nothing
//! but names:
//!
//! | byte | held by |
//! |---|---|
//! | 1 TiB + index | participant `index`, or whoever reaps it; exclusive |
//! | 1 TiB + 4096 | every process that has the segment open; shared |
//! | 1 TiB + 8192 | whoever attaches, leaves or collects right now; exclusive |
//! | 1 TiB + 12288 | of a data or birth file: its creator, until the segment is complete |
//!
//! These places never change, in no version: a newer program must be able to
//! tell whether an older one is alive.
//!
//! Each held byte has a descriptor of its own, freshly opened: closing it
//! gives back exactly that byte. It is never the descriptor that was mapped,
//! because a mapping keeps the description, and with it the lock, after `close`.
//! The kernel drops a lock when the process's last thread is gone, however it
//! died; a stopped process keeps it; pids play no part.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::OFlags;
use ucm_core::host::Liveness;
use ucm_core::limits::MAX_PARTICIPANTS;
use ucm_core::participant::ParticipantId;

use crate::error::{LockError, OsError};
use crate::fork::PrivateFd;

const BASE: i64 = 1 << 40;
/// The participants' bytes.
pub(crate) const PARTICIPANTS: Range<i64> = BASE..BASE + MAX_PARTICIPANTS as i64;
/// Shared by everybody who has the segment open for writing.
pub(crate) const PRESENCE: i64 = BASE + 4096;
/// Exclusive, for the moment of attaching, leaving or collecting.
pub(crate) const LIFECYCLE: i64 = BASE + 8192;
/// Exclusive, by the creator, on files that are not part of a segment yet.
pub(crate) const CREATION: i64 = BASE + 12288;
/// Both kinds of users of a segment.
pub(crate) const USERS: Range<i64> = PARTICIPANTS.start..PRESENCE + 1;

/// How long attaching and leaving wait for each other. Both take well below a
/// millisecond, so only a stopped process is ever met for that long.
pub(crate) const LIFECYCLE_WAIT: Duration = Duration::from_secs(5);

/// How a byte is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    Shared,
    Exclusive,
}

fn flock(mode: Mode, bytes: &Range<i64>) -> libc::flock {
    libc::flock {
        l_type: match mode {
            Mode::Shared => libc::F_RDLCK as libc::c_short,
            Mode::Exclusive => libc::F_WRLCK as libc::c_short,
        },
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: bytes.start,
        l_len: bytes.end - bytes.start,
        l_pid: 0,
    }
}

fn byte(at: i64) -> Range<i64> {
    at..at + 1
}

/// A byte that is held. Dropping it gives it back.
#[derive(Debug)]
pub struct ByteLock {
    fd: PrivateFd,
    at: i64,
}

impl Drop for ByteLock {
    fn drop(&mut self) {
        // Closing would do, but for a process that another thread is starting
        // right now: until its `exec` it has a copy of the descriptor, and a
        // lock that seems to be held for that moment would, for example, keep
        // the last one out from removing the segment. In a forked child the
        // descriptor is gone and the lock is the parent's: nothing is done.
        if let Ok(fd) = self.fd.get() {
            let mut lock = flock(Mode::Shared, &byte(self.at));
            lock.l_type = libc::F_UNLCK as libc::c_short;
            let _ = fcntl(fd, FcntlArg::F_OFD_SETLK(&lock));
        }
    }
}

impl ByteLock {
    /// Whether anybody but this descriptor holds one of `bytes`.
    pub(crate) fn others_hold(&self, bytes: Range<i64>, path: &Path) -> Result<bool, LockError> {
        held(&self.fd, bytes, path)
    }
}

/// Whether a description other than `fd`'s holds one of `bytes`.
fn held(fd: &PrivateFd, bytes: Range<i64>, path: &Path) -> Result<bool, LockError> {
    let mut lock = flock(Mode::Exclusive, &bytes);
    loop {
        match fcntl(fd.get()?, FcntlArg::F_OFD_GETLK(&mut lock)) {
            Ok(_) => return Ok(lock.l_type != libc::F_UNLCK as libc::c_short),
            Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(OsError::new("fcntl(F_OFD_GETLK)", path, error).into()),
        }
    }
}

/// A file whose bytes are locked. It keeps one descriptor that never holds a
/// lock itself: to ask on, to map, and to reopen the file from.
#[derive(Debug)]
pub struct LockFile {
    anchor: PrivateFd,
    path: PathBuf,
}

impl LockFile {
    pub(crate) fn new(anchor: PrivateFd, path: PathBuf) -> Self {
        Self { anchor, path }
    }

    pub(crate) fn anchor(&self) -> &PrivateFd {
        &self.anchor
    }

    /// What the file was called when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the byte, or says that it is taken.
    pub(crate) fn try_lock(&self, at: i64, mode: Mode) -> Result<Option<ByteLock>, LockError> {
        let fd = self.anchor.reopen(&self.path, OFlags::RDWR)?;
        if self.set(&fd, at, mode)? { Ok(Some(ByteLock { fd, at })) } else { Ok(None) }
    }

    /// Takes the byte, trying again until `patience` is over.
    pub(crate) fn lock(
        &self,
        at: i64,
        mode: Mode,
        patience: Duration,
    ) -> Result<ByteLock, LockError> {
        let fd = self.anchor.reopen(&self.path, OFlags::RDWR)?;
        let deadline = Instant::now() + patience;
        let mut nap = Duration::from_micros(200);
        // Tried again and again and not F_OFD_SETLKW, which has no deadline.
        while !self.set(&fd, at, mode)? {
            if Instant::now() >= deadline {
                let waited_ms = patience.as_millis() as u64;
                return Err(LockError::Busy { path: self.path.clone(), waited_ms });
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(10));
        }
        Ok(ByteLock { fd, at })
    }

    fn set(&self, fd: &PrivateFd, at: i64, mode: Mode) -> Result<bool, LockError> {
        let lock = flock(mode, &byte(at));
        loop {
            match fcntl(fd.get()?, FcntlArg::F_OFD_SETLK(&lock)) {
                Ok(_) => return Ok(true),
                Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => return Ok(false),
                Err(nix::errno::Errno::EINTR) => {}
                Err(error) => {
                    return Err(OsError::new("fcntl(F_OFD_SETLK)", &self.path, error).into());
                }
            }
        }
    }

    /// Whether anybody holds one of `bytes`.
    pub(crate) fn is_held(&self, bytes: Range<i64>) -> Result<bool, LockError> {
        held(&self.anchor, bytes, &self.path)
    }

    /// Whether somebody holds `participant`'s byte.
    ///
    /// # Errors
    /// In a forked child, and when the kernel refuses the question.
    pub fn is_participant_held(&self, participant: ParticipantId) -> Result<bool, LockError> {
        self.is_held(byte(PARTICIPANTS.start + i64::from(participant.index())))
    }

    /// The participants whose byte is held, by index.
    pub(crate) fn held_participants(&self) -> Result<Vec<u32>, LockError> {
        let mut indices = Vec::new();
        // One question for the common answer.
        if self.is_held(PARTICIPANTS)? {
            for participant in (0..MAX_PARTICIPANTS).filter_map(ParticipantId::new) {
                if self.is_participant_held(participant)? {
                    indices.push(participant.index());
                }
            }
        }
        Ok(indices)
    }
}

/// The core's question "is it alive?", answered by the control file's locks.
#[derive(Clone, Debug)]
pub struct OfdLiveness {
    file: Arc<LockFile>,
}

impl OfdLiveness {
    /// Over the lock bytes of `file`.
    pub fn new(file: Arc<LockFile>) -> Self {
        Self { file }
    }
}

impl Liveness for OfdLiveness {
    type Claim = ByteLock;

    fn is_held(&self, participant: ParticipantId) -> bool {
        self.file.is_participant_held(participant).unwrap_or_else(|error| {
            warn_once!(%error, "cannot ask who is alive; everybody counts as alive");
            true
        })
    }

    fn try_claim(&self, participant: ParticipantId) -> Option<ByteLock> {
        let at = PARTICIPANTS.start + i64::from(participant.index());
        self.file.try_lock(at, Mode::Exclusive).unwrap_or_else(|error| {
            warn_once!(%error, "cannot take a participant's lock; it counts as taken");
            None
        })
    }
}

/// Whether anybody uses the segment behind a control file, as its locks say.
pub(crate) fn any_user(fd: &PrivateFd, path: &Path) -> Result<bool, LockError> {
    held(fd, USERS, path)
}
