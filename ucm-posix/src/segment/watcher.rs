//! Looking at a segment without taking part: the control plane, mapped read-only.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ucm_core::segment::attach::ControlPlane;

use crate::error::{ForkedError, LockError, SegmentError};
use crate::fork::ForkStamp;
use crate::liveness::{LockFile, OfdLiveness};
use crate::mapping::Mapping;
use crate::names::SegmentId;
use crate::segment::join::{Failure, map_control, open_control};
use crate::segment::peek::HeaderPeek;
use crate::shm::{ShmDir, is_named};

/// A segment's control plane, to read only.
///
/// It holds no lock, so it keeps no segment alive: when the last participant
/// leaves, the files go, and the watcher sees the last state of a segment
/// that is no more ([`is_linked`](Self::is_linked) says so).
pub struct SegmentWatcher {
    plane: ControlPlane<'static>,
    control: Mapping,
    file: Arc<LockFile>,
    path: PathBuf,
}

impl SegmentWatcher {
    /// Opens a segment for watching, whatever its shape.
    ///
    /// # Errors
    /// [`SegmentError::NotFound`], [`SegmentError::OtherUser`], and
    /// [`SegmentError::Refused`] for what this build cannot read.
    pub fn open(dir: &ShmDir, id: &SegmentId) -> Result<Self, SegmentError> {
        let path = id.control_path(dir);
        let Some(fd) = open_control(&path, false)? else {
            return Err(SegmentError::NotFound { path });
        };
        let peek = HeaderPeek::read(&fd, &path)?;
        match map_control(&fd, &path, &peek, None, false) {
            Ok((plane, control)) => {
                let file = Arc::new(LockFile::new(fd, path.clone()));
                Ok(Self { plane, control, file, path })
            }
            Err(Failure::Other(error)) => Err(error),
            Err(Failure::Refused(refusal)) => {
                let in_use = crate::liveness::any_user(&fd, &path)?;
                Err(SegmentError::Refused { path, in_use, refusal })
            }
        }
    }

    /// The control plane. A write through it is a segmentation fault, by
    /// design; so is any use in a forked child.
    pub fn plane(&self) -> ControlPlane<'_> {
        self.plane
    }

    /// The control file.
    pub fn control_path(&self) -> &Path {
        &self.path
    }

    /// Who is alive, to ask only: a watcher takes no place.
    pub fn liveness(&self) -> OfdLiveness {
        OfdLiveness::new(Arc::clone(&self.file))
    }

    /// Whether the segment's name still means this segment.
    ///
    /// # Errors
    /// In a forked child, and when the file cannot be asked.
    pub fn is_linked(&self) -> Result<bool, LockError> {
        is_named(self.file.anchor(), &self.path)
    }

    /// Which process may use it.
    pub fn stamp(&self) -> ForkStamp {
        self.control.stamp()
    }

    /// Refuses in a forked child, where nothing is mapped.
    pub fn check_process(&self) -> Result<(), ForkedError> {
        self.stamp().check()
    }
}

impl std::fmt::Debug for SegmentWatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SegmentWatcher").field("path", &self.path).finish_non_exhaustive()
    }
}
