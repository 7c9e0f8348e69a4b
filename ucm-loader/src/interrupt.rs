//! Ctrl-C: noticed, so that a run can clean up behind itself.

use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Notices SIGINT, SIGTERM and SIGHUP from now on; a second one ends the
/// process at once.
///
/// # Errors
/// When another handler is installed already.
pub fn watch() -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    })
}

/// Ignores them, in a rank process: its parent ends it, in order.
///
/// # Errors
/// When another handler is installed already.
pub fn ignore() -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(|| {})
}

/// Whether the user wants the run to end.
pub fn is_set() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}
