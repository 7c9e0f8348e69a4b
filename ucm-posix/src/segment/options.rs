//! What the caller wants a segment to be.

use ucm_core::segment::geometry::CacheShape;

use crate::names::SegmentId;
use crate::shm::ShmDir;

/// A segment to be created, or joined when it is there and the same.
#[derive(Clone, Debug)]
pub struct SegmentOptions {
    /// Where its files live.
    pub dir: ShmDir,
    /// Its name.
    pub id: SegmentId,
    /// What all its processes must agree on.
    pub shape: CacheShape,
    /// How long the slot of a loader that died stays untouched, because IO the
    /// kernel still has may write into it. The creator's value holds.
    pub io_quarantine_ns: u64,
    /// Whether the segment stays when the last one leaves. The creator's value holds.
    pub persist: bool,
    /// Ask for huge pages.
    pub huge_pages: bool,
    /// Ask for memory of this NUMA node; only when the segment is created.
    pub numa_node: Option<u32>,
}

impl SegmentOptions {
    /// Twice the default IO deadline of 30 s.
    pub const DEFAULT_IO_QUARANTINE_NS: u64 = 60_000_000_000;

    /// A segment in `/dev/shm` that goes with its last process, on small
    /// pages of any node.
    pub fn new(id: SegmentId, shape: CacheShape) -> Self {
        Self {
            dir: ShmDir::default(),
            id,
            shape,
            io_quarantine_ns: Self::DEFAULT_IO_QUARANTINE_NS,
            persist: false,
            huge_pages: false,
            numa_node: None,
        }
    }
}
