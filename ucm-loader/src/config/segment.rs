//! A checked configuration as the options of its segment.

use ucm_posix::{SegmentError, SegmentId, SegmentOptions, ShmDir};

use crate::config::Config;

impl Config {
    /// The options that every process of this cache opens its segment with.
    ///
    /// # Errors
    /// When the id cannot be part of a file name.
    pub fn segment_options(&self) -> Result<SegmentOptions, SegmentError> {
        let id = SegmentId::new(&self.segment_id)?;
        let io_quarantine_ns = u64::try_from(self.io_quarantine.as_nanos()).unwrap_or(u64::MAX);
        Ok(SegmentOptions {
            dir: ShmDir::new(&self.shm_dir),
            io_quarantine_ns,
            persist: self.persist,
            huge_pages: self.huge_pages,
            numa_node: self.numa_node,
            ..SegmentOptions::new(id, self.shape())
        })
    }
}
