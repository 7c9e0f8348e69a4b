//! Finding the segments in a directory, and removing those that nobody uses.
//!
//! A file is removed because its locks say that nobody has it, under the lock
//! that attaching takes too: never for its age, never for its name alone.

use std::path::{Path, PathBuf};

use crate::error::{LockError, OsError, SegmentError};
use crate::fork::PrivateFd;
use crate::identity::{boot_id, effective_uid};
use crate::liveness::{CREATION, LIFECYCLE, LIFECYCLE_WAIT, LockFile, Mode, USERS};
use crate::names::{FileRole, SegmentId};
use crate::segment::join;
use crate::segment::peek::HeaderPeek;
use crate::shm::{ShmDir, is_named, open_existing, stat_path, unlink};

/// What was found out about a segment, or about a file that looks like part of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum State {
    /// Somebody has it open.
    Live,
    /// Whole, and nobody has it open.
    Dead,
    /// Nobody has it open, and nobody could: truncated, or its data are gone.
    Corrupt,
    /// Named like a segment, but it does not begin like one.
    Foreign,
    /// Made before the machine was last started.
    OtherBoot,
    /// Somebody else's; not looked into.
    OtherUser,
    /// A data, birth or temporary file of no segment, with nobody at work on it.
    Orphan,
    /// A data, birth or temporary file that somebody is at work on.
    BeingMade,
}

/// A segment, or a file that looks like part of one.
#[derive(Clone, Debug)]
pub struct FoundSegment {
    /// Its id.
    pub id: SegmentId,
    /// Its files.
    pub paths: Vec<PathBuf>,
    /// Their lengths in sum.
    pub bytes: u64,
    /// Participants that are alive, by index.
    pub live: Vec<u32>,
    /// Whether it should outlive its last user.
    pub persist: bool,
    /// What it is.
    pub state: State,
}

/// What a collection did.
#[derive(Debug, Default)]
pub struct Collected {
    /// What was removed.
    pub removed: Vec<FoundSegment>,
    /// What was kept: in use, persistent, or not ours.
    pub kept: Vec<FoundSegment>,
    /// What could not be looked at or removed.
    pub failed: Vec<SegmentError>,
}

/// The files of a directory, by what their names say, sorted by name.
fn files(dir: &ShmDir) -> Result<Vec<(FileRole, PathBuf)>, OsError> {
    let failed = |error| OsError::new("readdir", &dir.path, error);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&dir.path).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if let Some(role) = name.to_str().and_then(FileRole::of) {
            files.push((role, dir.path.join(name)));
        }
    }
    files.sort_by(|(_, a), (_, b)| a.cmp(b));
    Ok(files)
}

/// Everything in `dir` that is named like a segment's file. Looks only.
///
/// # Errors
/// When the directory cannot be read. A file that cannot be looked at is left out
/// of the list and logged.
pub fn scan(dir: &ShmDir) -> Result<Vec<FoundSegment>, SegmentError> {
    let Collected { mut kept, failed, .. } = walk(dir, Removal::None)?;
    for error in failed {
        tracing::warn!(%error, "a file of the shared-memory directory cannot be looked at");
    }
    kept.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(kept)
}

/// Removes what nobody uses; persistent segments, and files that do not even
/// begin like a segment, only with `all`.
///
/// # Errors
/// When the directory cannot be read; other failures are listed in the result.
pub fn collect(dir: &ShmDir, all: bool) -> Result<Collected, SegmentError> {
    walk(dir, if all { Removal::All } else { Removal::Unneeded })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Removal {
    None,
    Unneeded,
    All,
}

impl Removal {
    fn takes(self, found: &FoundSegment) -> bool {
        match (self, found.state) {
            (Self::None, _) | (_, State::Live | State::OtherUser | State::BeingMade) => false,
            (_, State::Orphan) | (Self::All, _) => true,
            (Self::Unneeded, State::Foreign) => false,
            // Of another boot or corrupt, it has nothing that could be kept.
            (Self::Unneeded, State::Corrupt | State::OtherBoot) => true,
            (Self::Unneeded, State::Dead) => !found.persist,
        }
    }
}

fn walk(dir: &ShmDir, removal: Removal) -> Result<Collected, SegmentError> {
    let mut done = Collected::default();
    let files = files(dir)?;
    // Segments first, so that what they leave behind is an orphan by then.
    let (controls, others): (Vec<_>, Vec<_>) =
        files.into_iter().partition(|(role, _)| matches!(role, FileRole::Control(_)));
    for (role, path) in controls.into_iter().chain(others) {
        let result = match role {
            FileRole::Control(id) => segment(dir, &id, path, removal),
            FileRole::Data(id, nonce) => loose(dir, &id, Some(nonce), path, removal),
            FileRole::Birth(id) | FileRole::Temporary(id) => loose(dir, &id, None, path, removal),
        };
        match result {
            Ok(Some((found, true))) => done.removed.push(found),
            Ok(Some((found, false))) => done.kept.push(found),
            // Gone meanwhile, or part of a segment.
            Ok(None) => {}
            Err(error) => done.failed.push(error),
        }
    }
    Ok(done)
}

/// What was found, and whether it was removed.
type Outcome = Result<Option<(FoundSegment, bool)>, SegmentError>;

/// Opens a file of ours. `Err` of a finding when it is another user's.
fn open_own(
    id: &SegmentId,
    path: &Path,
) -> Result<Option<Result<PrivateFd, FoundSegment>>, SegmentError> {
    let Some(stat) = stat_path(path)? else { return Ok(None) };
    let mut found = FoundSegment {
        id: id.clone(),
        paths: vec![path.to_path_buf()],
        bytes: stat.len_bytes,
        live: Vec::new(),
        persist: false,
        state: State::OtherUser,
    };
    if stat.owner != effective_uid() {
        return Ok(Some(Err(found)));
    }
    if !stat.is_regular {
        found.state = State::Foreign;
        return Ok(Some(Err(found)));
    }
    Ok(open_existing(path, true)?.map(Ok))
}

/// A control file with what belongs to it.
fn segment(dir: &ShmDir, id: &SegmentId, path: PathBuf, removal: Removal) -> Outcome {
    let fd = match open_own(id, &path)? {
        None => return Ok(None),
        Some(Err(found)) => return Ok(Some((found, false))),
        Some(Ok(fd)) => fd,
    };
    let file = LockFile::new(fd, path.clone());
    // Nobody attaches or leaves while we look. A scan does without: it must
    // not make a joiner wait, and what it says is old at once anyway.
    let lifecycle = match removal {
        Removal::None => None,
        _ => match file.lock(LIFECYCLE, Mode::Exclusive, LIFECYCLE_WAIT) {
            Err(LockError::Busy { .. }) => None,
            lock => Some(lock?),
        },
    };
    if !is_named(file.anchor(), &path)? {
        return Ok(None);
    }
    let peek = HeaderPeek::read(file.anchor(), &path)?;
    let data = peek.nonce().map(|nonce| id.data_path(dir, nonce));
    let data_stat = match &data {
        Some(data) => stat_path(data)?,
        None => None,
    };
    let data_bytes = data_stat.map(|stat| stat.len_bytes);
    let mut found = FoundSegment {
        id: id.clone(),
        bytes: peek.file().len_bytes + data_bytes.unwrap_or(0),
        live: file.held_participants()?,
        persist: peek.is_persistent(),
        state: State::Dead,
        paths: vec![path.clone()],
    };
    found.paths.extend(data.filter(|_| data_stat.is_some()));
    found.state = if file.is_held(USERS)? {
        State::Live
    } else if !peek.is_segment() {
        State::Foreign
    } else if peek.boot_id() != boot_id()? {
        State::OtherBoot
    } else if !peek.is_whole() || data_bytes != Some(peek.data_bytes()) {
        State::Corrupt
    } else {
        State::Dead
    };
    let remove = lifecycle.is_some() && removal.takes(&found);
    if remove {
        join::remove(dir, id, &path, peek.nonce())?;
    }
    Ok(Some((found, remove)))
}

/// A data, birth or temporary file.
fn loose(
    dir: &ShmDir,
    id: &SegmentId,
    nonce: Option<u64>,
    path: PathBuf,
    removal: Removal,
) -> Outcome {
    let fd = match open_own(id, &path)? {
        None => return Ok(None),
        Some(Err(found)) => return Ok(Some((found, false))),
        Some(Ok(fd)) => fd,
    };
    let bytes = crate::shm::stat_fd(&fd, &path)?.len_bytes;
    let file = LockFile::new(fd, path.clone());
    let mut found = FoundSegment {
        id: id.clone(),
        paths: vec![path.clone()],
        bytes,
        live: Vec::new(),
        persist: false,
        state: State::BeingMade,
    };
    // The creator takes this lock before the file has its final name, and lets
    // go when the segment is complete. To look, asking is enough; to remove,
    // it is ours.
    let lock = match removal {
        Removal::None => None,
        _ => file.try_lock(CREATION, Mode::Exclusive)?,
    };
    let at_work = match removal {
        Removal::None => file.is_held(CREATION..CREATION + 1)?,
        _ => lock.is_none(),
    };
    if at_work {
        return Ok(Some((found, false)));
    }
    // Only now: the creator may have completed the segment until a moment ago.
    if nonce.is_some() && belongs(dir, id, nonce)? {
        return Ok(None);
    }
    found.state = State::Orphan;
    let remove = removal.takes(&found) && is_named(file.anchor(), &path)?;
    if remove {
        unlink(&path)?;
    }
    Ok(Some((found, remove)))
}

/// Whether the segment's control file is there and means this data file. One
/// that is not readable any more is given the benefit of the doubt.
fn belongs(dir: &ShmDir, id: &SegmentId, nonce: Option<u64>) -> Result<bool, SegmentError> {
    let path = id.control_path(dir);
    let Some(fd) = open_existing(&path, false)? else { return Ok(false) };
    let peek = HeaderPeek::read(&fd, &path)?;
    Ok(peek.nonce().is_none() || peek.nonce() == nonce)
}
