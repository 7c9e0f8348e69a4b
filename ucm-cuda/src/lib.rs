//! CUDA devices for UCM: whether one can be used here, and why not.
//!
//! This build has no CUDA adapter yet: [`open`] says so, and never panics.
//! Engines run on the host device.

use ucm_core::device::{Device, DeviceError};

/// The driver library the adapter will load at run time.
pub const DRIVER_LIBRARY: &str = "libcuda.so.1";

/// Opens device `ordinal`.
///
/// # Errors
/// Always [`DeviceError::Unavailable`] in this build.
pub fn open(_ordinal: u32) -> Result<Box<dyn Device>, DeviceError> {
    Err(DeviceError::Unavailable)
}
