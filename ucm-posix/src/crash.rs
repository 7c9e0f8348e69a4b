//! Named points in the life of a segment at which a test may end or pause this process.
//!
//! As in `ucm_core::crash`: they exist under `--cfg ucm_crash` and are nothing
//! in any other build.

ucm_core::define_crash_points! {
    /// Create: the birth file is made and locked.
    CreateBirth,
    /// Create: the data file is there, without a name and without a page.
    CreateDrafted,
    /// Create: every page of the data file is reserved.
    CreateReserved,
    /// Create: the control plane is initialised; neither file has a name.
    CreateInitialised,
    /// Create: the data file has its name, the control file has none.
    CreateDataLinked,
    /// Create: the control file has its name; the birth file is still there.
    CreateControlLinked,
    /// Join: the control file is open, nothing is locked.
    AttachOpened,
    /// Join: the lifecycle byte is held, presence is not.
    AttachLocked,
    /// Join: present, nothing checked.
    AttachPresent,
    /// Join: checked and mapped, the lifecycle byte still held.
    AttachChecked,
    /// Leave: the lifecycle byte is held, still present.
    LeaveLocked,
    /// Leave: not present any more; whether it is the last is not known.
    LeaveAbsent,
    /// Leave: the last one, nothing removed.
    LeaveLast,
    /// Remove: the control file has lost its name, the data file has not.
    RemoveControlUnlinked,
    /// Remove: both names are gone, the lifecycle byte still held.
    RemoveDone,
}

/// `crash_point!(Name)`: as in `ucm_core::crash`.
macro_rules! crash_point {
    ($point:ident) => {
        #[cfg(ucm_crash)]
        $crate::crash::hit($crate::crash::Point::$point);
    };
}
pub(crate) use crash_point;
