//! The probe of a directory: write, read back, compare, delete.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::breaker::Probe;
use super::error::BackendError;
use crate::content;

/// Enough to need a block of the disk.
const BYTES: usize = 4096;

/// A probe that uses files in `dir`, which must exist.
pub fn of_directory(dir: PathBuf) -> Probe {
    let number = AtomicU64::new(0);
    Arc::new(move || {
        let number = number.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("probe.{}.{number}", std::process::id()));
        let result = round_trip(&path, number);
        // Best effort: what a broken disk keeps is cleaned up with its `tmp`.
        let _removed = fs::remove_file(&path);
        result
    })
}

fn round_trip(path: &Path, seed: u64) -> Result<(), BackendError> {
    let failed = |operation| {
        move |error: std::io::Error| BackendError::Io {
            operation,
            path: path.to_owned(),
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        }
    };
    let key = ucm_core::ShardKey::default();
    let mut bytes = vec![0; BYTES];
    content::fill(&mut bytes, seed, &key, 0);
    let mut file = File::create(path).map_err(failed("create"))?;
    file.write_all(&bytes).map_err(failed("write"))?;
    file.sync_data().map_err(failed("fdatasync"))?;
    drop(file);
    content::poison(&mut bytes);
    let mut file = File::open(path).map_err(failed("open"))?;
    file.read_exact(&mut bytes).map_err(failed("read"))?;
    match content::verify(&bytes, seed, &key, 0) {
        None => Ok(()),
        Some(_) => Err(failed("compare")(std::io::Error::from_raw_os_error(libc::EIO))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_succeeds_where_files_can_be_written_and_leaves_none() {
        let dir = tempfile::tempdir().unwrap();
        let probe = of_directory(dir.path().to_owned());
        assert_eq!(probe(), Ok(()));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_probe_of_a_directory_that_is_gone_names_the_call() {
        let dir = tempfile::tempdir().unwrap();
        let probe = of_directory(dir.path().join("gone"));
        let error = probe().unwrap_err();
        assert!(matches!(error, BackendError::Io { operation: "create", errno: libc::ENOENT, .. }));
    }
}
