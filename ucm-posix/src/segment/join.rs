//! Joining a segment that is there: checks, refusals, and replacing what is dead.

use std::path::Path;
use std::sync::Arc;

use ucm_core::segment::attach::ControlPlane;
use ucm_core::segment::geometry::Geometry;

use crate::crash::crash_point;
use crate::error::{LockError, OsError, Refusal, SegmentError};
use crate::fork::PrivateFd;
use crate::identity::{boot_id, effective_uid};
use crate::liveness::{LIFECYCLE, LIFECYCLE_WAIT, LockFile, Mode, PRESENCE, USERS};
use crate::mapping::Mapping;
use crate::names::SegmentId;
use crate::segment::create::create;
use crate::segment::handle::{Parts, Segment, region};
use crate::segment::options::SegmentOptions;
use crate::segment::peek::HeaderPeek;
use crate::shm::{FileStat, ShmDir, is_named, open_existing, stat_fd, stat_path, unlink};

/// How often the name may change hands while we try.
const MAX_ATTEMPTS: u32 = 64;

/// Refuses what belongs to another user. A file that is gone belongs to nobody.
pub(crate) fn check_owner(path: &Path, stat: Option<FileStat>) -> Result<(), SegmentError> {
    let me = effective_uid();
    match stat {
        Some(stat) if stat.owner != me => {
            Err(SegmentError::OtherUser { path: path.to_path_buf(), owner: stat.owner, me })
        }
        _ => Ok(()),
    }
}

/// Opens a control file of our own; `None` when there is none.
pub(crate) fn open_control(path: &Path, writable: bool) -> Result<Option<PrivateFd>, SegmentError> {
    match open_existing(path, writable) {
        Ok(Some(fd)) => {
            check_owner(path, Some(stat_fd(&fd, path)?))?;
            Ok(Some(fd))
        }
        Ok(None) => Ok(None),
        Err(error) => {
            // "Permission denied" says less than whose it is.
            check_owner(path, stat_path(path)?)?;
            match error {
                LockError::Os(OsError { source, .. })
                    if source.raw_os_error() == Some(libc::ELOOP) =>
                {
                    Err(SegmentError::Refused {
                        path: path.to_path_buf(),
                        in_use: false,
                        refusal: Refusal::NotAFile,
                    })
                }
                error => Err(error.into()),
            }
        }
    }
}

/// Either a refusal, which may lead to a replacement, or a plain failure.
pub(crate) enum Failure {
    Refused(Refusal),
    Other(SegmentError),
}

impl<E: Into<SegmentError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Other(error.into())
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// Checks and maps a control file. The plane is valid as long as the mapping.
pub(crate) fn map_control(
    fd: &PrivateFd,
    path: &Path,
    peek: &HeaderPeek,
    expected: Option<&Geometry>,
    writable: bool,
) -> Result<(ControlPlane<'static>, Mapping), Failure> {
    let boot_id = boot_id()?;
    peek.check(&boot_id)?;
    let control = Mapping::new(fd, path, peek.file().len_bytes, writable)?;
    // SAFETY: the plane is returned, and kept, together with the mapping.
    let region = unsafe { region(&control) };
    let plane = ControlPlane::attach(region, expected, &boot_id).map_err(Refusal::Core)?;
    if plane.is_poisoned() {
        return Err(Refusal::Poisoned.into());
    }
    Ok((plane, control))
}

/// Checks and maps the data file that belongs to `plane`.
fn map_data(
    dir: &ShmDir,
    id: &SegmentId,
    plane: &ControlPlane<'_>,
    huge_pages: bool,
) -> Result<Mapping, Failure> {
    let path = id.data_path(dir, plane.nonce());
    let Some(fd) = open_existing(&path, true)? else {
        return Err(Refusal::DataMissing { path }.into());
    };
    let stat = stat_fd(&fd, &path)?;
    check_owner(&path, Some(stat))?;
    let needed_bytes = plane.geometry().data_bytes;
    if !stat.is_regular || stat.len_bytes != needed_bytes {
        return Err(Refusal::DataBytes { path, file_bytes: stat.len_bytes, needed_bytes }.into());
    }
    let data = Mapping::new(&fd, &path, needed_bytes, true)?;
    if huge_pages {
        data.advise_huge_pages();
    }
    Ok(data)
}

enum Attempt {
    Joined(Box<Segment>),
    /// There is no such segment.
    Missing,
    /// It was removed, by somebody or by us.
    Removed,
}

/// One try. With `options`, shape and data plane are theirs, and a segment
/// that is dead and refused is removed; without, the shape is the segment's.
fn attempt(
    dir: &ShmDir,
    id: &SegmentId,
    wanted: Option<(&SegmentOptions, &Geometry)>,
) -> Result<Attempt, SegmentError> {
    let path = id.control_path(dir);
    let Some(fd) = open_control(&path, true)? else { return Ok(Attempt::Missing) };
    let file = Arc::new(LockFile::new(fd, path.clone()));
    crash_point!(AttachOpened);
    let _lifecycle = file.lock(LIFECYCLE, Mode::Exclusive, LIFECYCLE_WAIT)?;
    crash_point!(AttachLocked);
    if !is_named(file.anchor(), &path)? {
        return Ok(Attempt::Removed);
    }
    let presence = file.lock(PRESENCE, Mode::Shared, LIFECYCLE_WAIT)?;
    crash_point!(AttachPresent);
    let peek = HeaderPeek::read(file.anchor(), &path)?;
    let expected = wanted.map(|(_, geometry)| geometry);
    let mapped =
        map_control(file.anchor(), &path, &peek, expected, true).and_then(|(plane, control)| {
            let data = match wanted {
                Some((options, _)) => Some(map_data(dir, id, &plane, options.huge_pages)?),
                None => None,
            };
            Ok((plane, control, data))
        });
    match mapped {
        Ok((plane, control, data)) => {
            crash_point!(AttachChecked);
            let parts = Parts { plane, control, data, file, presence };
            Ok(Attempt::Joined(Box::new(Segment::new(parts, dir, id, false))))
        }
        Err(Failure::Other(error)) => Err(error),
        Err(Failure::Refused(refusal)) => {
            let in_use = presence.others_hold(USERS, &path)?;
            // Whoever still has a poisoned one open keeps its memory until it
            // leaves; the name is what the next ones need.
            let in_the_way = in_use && !matches!(refusal, Refusal::Poisoned);
            let replaceable = refusal.allows_replacement(peek.is_persistent());
            if wanted.is_none() || in_the_way || !replaceable {
                return Err(SegmentError::Refused { path, in_use, refusal });
            }
            tracing::warn!(
                path = %path.display(), %refusal,
                in_use, "a segment that cannot be used any more; a new one takes its place"
            );
            remove(dir, id, &path, peek.nonce())?;
            Ok(Attempt::Removed)
        }
    }
}

/// Removes a segment's files, the name first. The caller holds the lifecycle
/// byte and has found that nobody uses the segment.
pub(crate) fn remove(
    dir: &ShmDir,
    id: &SegmentId,
    control_path: &Path,
    nonce: Option<u64>,
) -> Result<(), OsError> {
    unlink(control_path)?;
    crash_point!(RemoveControlUnlinked);
    if let Some(nonce) = nonce {
        unlink(&id.data_path(dir, nonce))?;
    }
    crash_point!(RemoveDone);
    Ok(())
}

/// See [`Segment::open_or_create`].
pub(crate) fn open_or_create(options: &SegmentOptions) -> Result<Segment, SegmentError> {
    let SegmentOptions { dir, id, .. } = options;
    let geometry = Geometry::new(options.shape)?;
    let boot_id = boot_id()?;
    for _ in 0..MAX_ATTEMPTS {
        match attempt(dir, id, Some((options, &geometry)))? {
            Attempt::Joined(segment) => {
                report_differences(&segment, options);
                return Ok(*segment);
            }
            Attempt::Removed => continue,
            Attempt::Missing => {}
        }
        if let Some(segment) = create(options, &geometry, &boot_id)? {
            return Ok(segment);
        }
    }
    Err(SegmentError::Unstable { path: id.control_path(dir), attempts: MAX_ATTEMPTS })
}

/// See [`Segment::join_existing`].
pub(crate) fn join_existing(dir: &ShmDir, id: &SegmentId) -> Result<Segment, SegmentError> {
    for _ in 0..MAX_ATTEMPTS {
        match attempt(dir, id, None)? {
            Attempt::Joined(segment) => return Ok(*segment),
            Attempt::Removed => {}
            Attempt::Missing => {
                return Err(SegmentError::NotFound { path: id.control_path(dir) });
            }
        }
    }
    Err(SegmentError::Unstable { path: id.control_path(dir), attempts: MAX_ATTEMPTS })
}

/// The creator's choice holds for what need not be equal; a joiner that wanted
/// something else is told.
fn report_differences(segment: &Segment, options: &SegmentOptions) {
    let plane = segment.plane();
    if plane.is_persistent() != options.persist {
        tracing::warn!(
            segment = plane.is_persistent(),
            ours = options.persist,
            "persist is set otherwise in the segment, and holds as it is there"
        );
    }
    if plane.io_quarantine_ns() != options.io_quarantine_ns {
        tracing::warn!(
            segment_ns = plane.io_quarantine_ns(),
            ours_ns = options.io_quarantine_ns,
            "io_quarantine is set otherwise in the segment, and holds as it is there"
        );
    }
}
