//! An attached segment, and leaving it.

use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use ucm_core::ptr::Region;
use ucm_core::segment::attach::ControlPlane;
use ucm_core::segment::geometry::SlotStride;

use crate::crash::crash_point;
use crate::error::{ForkedError, LockError, SegmentError};
use crate::fork::ForkStamp;
use crate::liveness::{ByteLock, LIFECYCLE, LIFECYCLE_WAIT, LockFile, Mode, USERS};
use crate::mapping::Mapping;
use crate::names::SegmentId;
use crate::segment::join;
use crate::segment::options::SegmentOptions;
use crate::shm::{ShmDir, is_named};

/// The mapping as the core's region.
///
/// # Safety
/// Nothing borrowed from the region may be used after the mapping is dropped,
/// nor in a forked child.
pub(crate) unsafe fn region(mapping: &Mapping) -> Region<'static> {
    // SAFETY: a mapping is valid for its length and page aligned; it is a file
    // of ours (mode 0600) whose users reach it through the core's atomics; the
    // caller keeps it alive.
    unsafe { Region::new(mapping.base(), mapping.len_bytes()) }
}

/// Everything an attached segment consists of. `plane` borrows from `control`.
pub(crate) struct Parts {
    pub(crate) plane: ControlPlane<'static>,
    pub(crate) control: Mapping,
    pub(crate) data: Option<Mapping>,
    pub(crate) file: Arc<LockFile>,
    pub(crate) presence: ByteLock,
}

/// An attached segment. While it lives, nobody removes the segment's files;
/// the last one that is dropped, in whatever process, removes them (unless the
/// segment is persistent).
pub struct Segment {
    /// Borrowed from `control`, and never handed out for longer than `&self`.
    plane: ControlPlane<'static>,
    control: Mapping,
    data: Option<Mapping>,
    file: Arc<LockFile>,
    /// `None` only while it is dropped.
    presence: Option<ByteLock>,
    dir: ShmDir,
    id: SegmentId,
    created: bool,
}

impl Segment {
    pub(crate) fn new(parts: Parts, dir: &ShmDir, id: &SegmentId, created: bool) -> Self {
        let Parts { plane, control, data, file, presence } = parts;
        let presence = Some(presence);
        Self { plane, control, data, file, presence, dir: dir.clone(), id: id.clone(), created }
    }

    /// Joins the segment, or creates it when it is not there.
    ///
    /// A segment that nobody uses and that cannot be used any more (killed
    /// processes left it, and the configuration, the build or the boot is
    /// another one) is replaced; a persistent one only if it is broken.
    ///
    /// # Errors
    /// [`SegmentError::Refused`] when it is there and made otherwise, with both
    /// sides' values; [`ShmError::NoSpace`](crate::error::ShmError::NoSpace)
    /// and [`NotEnoughMemory`](crate::error::ShmError::NotEnoughMemory) when
    /// it cannot be created; nothing is left behind then.
    pub fn open_or_create(options: &SegmentOptions) -> Result<Self, SegmentError> {
        join::open_or_create(options)
    }

    /// Joins a segment whose shape the caller does not know; without its data
    /// plane, as a scout does. Creates and replaces nothing.
    ///
    /// # Errors
    /// [`SegmentError::NotFound`], and the refusals of
    /// [`open_or_create`](Self::open_or_create).
    pub fn join_existing(dir: &ShmDir, id: &SegmentId) -> Result<Self, SegmentError> {
        join::join_existing(dir, id)
    }

    /// The control plane. In a forked child it must not be touched; see
    /// [`check_process`](Self::check_process).
    pub fn plane(&self) -> ControlPlane<'_> {
        self.plane
    }

    /// The same for an owner that also keeps the segment alive.
    ///
    /// # Safety
    /// Nothing borrowed from it may be used after the segment is dropped.
    pub(crate) unsafe fn plane_unbound(&self) -> ControlPlane<'static> {
        self.plane
    }

    /// The data plane, if the segment was opened with it.
    pub fn data(&self) -> Option<DataPlane<'_>> {
        let mapping = self.data.as_ref()?;
        let geometry = self.plane.geometry();
        Some(DataPlane {
            mapping,
            stride: geometry.stride,
            slot_count: geometry.shape.slot_count,
            shard_bytes: geometry.shape.shard_bytes,
        })
    }

    /// Where a slot's bytes begin; valid for `shard_bytes` while the segment
    /// is attached. `None` for a slot that does not exist, without a data
    /// plane, and in a forked child.
    pub fn slot_ptr(&self, slot: u32) -> Option<NonNull<u8>> {
        self.data()?.slot_ptr(slot)
    }

    /// Its name.
    pub fn id(&self) -> &SegmentId {
        &self.id
    }

    /// Where its files live.
    pub fn dir(&self) -> &ShmDir {
        &self.dir
    }

    /// Its control file.
    pub fn control_path(&self) -> &Path {
        self.file.path()
    }

    /// Its data file.
    pub fn data_path(&self) -> PathBuf {
        self.id.data_path(&self.dir, self.plane.nonce())
    }

    /// Length of the control plane, in bytes.
    pub fn control_bytes(&self) -> usize {
        self.control.len_bytes()
    }

    /// Whether this handle created it.
    pub fn is_created(&self) -> bool {
        self.created
    }

    /// The file whose bytes say who is alive.
    pub fn lock_file(&self) -> &Arc<LockFile> {
        &self.file
    }

    /// Whether the segment's name still means this segment.
    ///
    /// # Errors
    /// In a forked child, and when the file cannot be asked.
    pub fn is_linked(&self) -> Result<bool, LockError> {
        is_named(self.file.anchor(), self.file.path())
    }

    /// Which process may use it.
    pub fn stamp(&self) -> ForkStamp {
        self.control.stamp()
    }

    /// Refuses in a forked child, where nothing is mapped.
    pub fn check_process(&self) -> Result<(), ForkedError> {
        self.stamp().check()
    }

    fn leave(&mut self) -> Result<(), LockError> {
        let lifecycle = self.file.lock(LIFECYCLE, Mode::Exclusive, LIFECYCLE_WAIT);
        crash_point!(LeaveLocked);
        // Whether or not the last one can be found out: we are gone.
        self.presence = None;
        crash_point!(LeaveAbsent);
        let _lifecycle = lifecycle?;
        let last = !self.file.is_held(USERS)?;
        if last && !self.plane.is_persistent() && self.is_linked()? {
            crash_point!(LeaveLast);
            join::remove(&self.dir, &self.id, self.file.path(), Some(self.plane.nonce()))?;
        }
        Ok(())
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // A forked child has nothing to leave.
        if self.stamp().is_current()
            && let Err(error) = self.leave()
        {
            tracing::warn!(
                %error,
                "leaving a segment failed; if its files are left, `ucm gc` removes them"
            );
        }
    }
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Segment").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The bytes of all slots: registered with devices, read into, copied from.
#[derive(Clone, Copy, Debug)]
pub struct DataPlane<'m> {
    mapping: &'m Mapping,
    stride: SlotStride,
    slot_count: u32,
    shard_bytes: u64,
}

impl DataPlane<'_> {
    /// Where it begins, on a page boundary; valid while the segment is attached.
    pub fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// How long it is.
    pub fn len_bytes(&self) -> usize {
        self.mapping.len_bytes()
    }

    /// Where a slot's `shard_bytes` begin; `None` for a slot that does not
    /// exist, and in a forked child.
    pub fn slot_ptr(&self, slot: u32) -> Option<NonNull<u8>> {
        if slot >= self.slot_count {
            return None;
        }
        self.mapping.place(self.stride.offset_of(slot), self.shard_bytes)
    }
}
