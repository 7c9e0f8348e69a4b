//! What the tests of this binary share besides the machine: a say in who has it, and its places.

use std::process::Command;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use serde_json::Value;

use crate::common::child::ucm;
use crate::common::{Corner, files_of};

static MACHINE: RwLock<()> = RwLock::new(());

/// To run beside others.
pub fn shared() -> RwLockReadGuard<'static, ()> {
    MACHINE.read().unwrap_or_else(PoisonError::into_inner)
}

/// To run alone: for what is counted from the order of things in time.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    MACHINE.write().unwrap_or_else(PoisonError::into_inner)
}

/// The tool, with shared memory and temporary files in the corner.
pub fn ucm_in(corner: &Corner, arguments: &[&str]) -> Command {
    let mut command = ucm(arguments);
    command.arg("--shm-dir").arg(corner.shm()).env("TMPDIR", corner.dir("tmp"));
    command
}

/// Nothing is left of a run, neither in shared memory nor among the files.
#[track_caller]
pub fn assert_clean(corner: &Corner) {
    assert_eq!(files_of(corner.shm()), [""; 0]);
    assert_eq!(files_of(&corner.dir("tmp")), [""; 0]);
}

/// The numbers at these paths (`a.b`) of a report.
#[track_caller]
pub fn numbers<const N: usize>(report: &Value, paths: [&str; N]) -> [u64; N] {
    paths.map(|path| {
        let pointer = format!("/{}", path.replace('.', "/"));
        let found = report.pointer(&pointer).and_then(Value::as_u64);
        found.unwrap_or_else(|| panic!("no count {path} in {report}"))
    })
}

/// The fraction at `path`.
#[track_caller]
pub fn fraction(report: &Value, path: &str) -> f64 {
    let pointer = format!("/{}", path.replace('.', "/"));
    let found = report.pointer(&pointer).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("no number {path} in {report}"))
}
