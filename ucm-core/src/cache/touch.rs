//! Touch: refresh every resident shard of a list of blocks.

use crate::cache::handle::Cache;
use crate::evict::clock::mark_used;
use crate::host::Host;
use crate::key::{BlockId, ShardKey};
use crate::slot::word::Status;
use crate::sync::Ordering;

impl<H: Host> Cache<'_, H> {
    /// Sets the access bit of every READY shard of `blocks`; returns how many
    /// that were. It pins nothing: a slot that changes hands meanwhile gets a
    /// second chance it did not earn, and no more.
    pub fn touch(&self, blocks: &[BlockId]) -> u32 {
        let mut touched = 0;
        for &block in blocks {
            for shard in 0..self.plane.geometry().shape.shards_per_block {
                let key = ShardKey::new(block, shard);
                if let Some(slot) = self.find(&key, key.hash())
                    && self.meta(slot).load(Ordering::Relaxed).status() == Status::Ready
                {
                    mark_used(self.access(slot));
                    touched += 1;
                }
            }
        }
        touched
    }
}
