//! Prealloc: the slot of a block's next shard, ready to be taken over.

use crate::cache::ask::GetError;
use crate::cache::handle::Cache;
use crate::evict::clock::Pool;
use crate::host::Host;
use crate::key::ShardKey;
use crate::segment::counters::Counter;
use crate::slot::word::Status;

impl<H: Host> Cache<'_, H> {
    /// Prepares a slot for the shard after `key` in the same block: keyed,
    /// unowned, not loaded, access bit set; the reserve may be used. Whoever
    /// asks for that shard next becomes its owner without eviction or index
    /// work. Returns whether a slot was prepared: not past the block's end,
    /// and not if the shard is known already or no slot is to be had.
    pub fn prepare_next(&self, key: &ShardKey) -> bool {
        let next = ShardKey::new(key.block, key.shard.saturating_add(1));
        let beyond = next.shard >= self.plane.geometry().shape.shards_per_block;
        if beyond || self.plane.is_poisoned() {
            return false;
        }
        matches!(self.prepare(&next), Ok(true))
    }

    fn prepare(&self, key: &ShardKey) -> Result<bool, GetError> {
        let hash = key.hash();
        if self.find(key, hash).is_some() {
            return Ok(false);
        }
        let Some(tagged) = self.tag_victim(Pool::WithReserve) else { return Ok(false) };
        let Some(victim) = self.commit(tagged) else { return Ok(false) };
        let prepared = self.install(key, hash, victim, Status::Prepared)?.is_some();
        if prepared {
            self.add(Counter::Prepared, 1);
        }
        Ok(prepared)
    }
}
