//! A run's own places: a temporary directory and a private corner of shared memory.
//!
//! Both are removed when the run ends, however it ends short of SIGKILL. Since
//! the corner is a directory of its own, what is left in it can be counted,
//! and no other segment of the machine is ever touched.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ucm_core::cache::Audit;
use ucm_posix::{Segment, SegmentError, SegmentId, ShmDir};

use crate::cli::Failure;

/// How long pins may still be on their way back.
const PIN_PATIENCE: Duration = Duration::from_secs(2);

/// The id of the one segment in a private corner.
const SEGMENT_ID: &str = "run";

/// The places of one run.
pub struct Scratch {
    shm: TempDir,
    files: TempDir,
}

impl Scratch {
    /// Makes both.
    ///
    /// # Errors
    /// When one of them cannot be made.
    pub fn new(shm_dir: &Path, prefix: &str) -> Result<Self, Failure> {
        let make = |parent: &Path| {
            tempfile::Builder::new().prefix(prefix).tempdir_in(parent).map_err(|error| {
                Failure::Broken(format!("a directory in {}: {error}", parent.display()))
            })
        };
        Ok(Self { shm: make(shm_dir)?, files: make(&std::env::temp_dir())? })
    }

    /// Where segments go.
    pub fn shm_dir(&self) -> PathBuf {
        self.shm.path().to_owned()
    }

    /// The id segments get.
    pub fn segment_id(&self) -> String {
        SEGMENT_ID.to_owned()
    }

    /// The segment, for looking at: no data plane, no place in the table.
    ///
    /// # Errors
    /// When there is none.
    pub fn segment(&self) -> Result<Segment, SegmentError> {
        Segment::join_existing(&ShmDir::new(self.shm.path()), &SegmentId::new(SEGMENT_ID)?)
    }

    /// Pins that somebody still holds although every task has ended. A rank's
    /// last step after a task's end is to let go of its slots, so this looks
    /// again for a moment before it calls them leaked.
    pub fn leaked_pins(segment: &Segment) -> u64 {
        let deadline = Instant::now() + PIN_PATIENCE;
        loop {
            let pins = Audit::new(&segment.plane()).pins();
            if pins == 0 || Instant::now() >= deadline {
                return pins;
            }
            std::thread::sleep(PIN_PATIENCE / 100);
        }
    }

    /// A directory for files, made if need be.
    ///
    /// # Errors
    /// The system's.
    pub fn dir(&self, name: &str) -> std::io::Result<PathBuf> {
        let path = self.files.path().join(name);
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// Files in shared memory that are still there, to be asked when every
    /// rank has left; then removes both places and counts what would not go.
    pub fn remove(self) -> u64 {
        let in_shm = std::fs::read_dir(self.shm.path()).map_or(0, |entries| entries.count());
        let paths = [self.shm.path().to_owned(), self.files.path().to_owned()];
        // What could not be removed is still there to be counted.
        let _counted_below = (self.shm.close(), self.files.close());
        in_shm as u64 + paths.iter().filter(|path| path.exists()).count() as u64
    }
}
