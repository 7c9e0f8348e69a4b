//! Blocks on their way to the backend: one task's at a time, and forgotten if they do not become whole.
//!
//! A backend takes every shard of a block once, until the block is complete or
//! discarded. So two tasks with the same block go one after the other, and a
//! block of which a shard failed is discarded when the last of its shards has
//! ended: then nothing of it is in flight, and it can be dumped anew.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ucm_core::key::BlockId;

use crate::backend::traits::Backend;
use crate::task::ShardTarget;

/// A block's part in the task that writes it.
#[derive(Default)]
struct Writing {
    /// Shards of the task that have not ended.
    left: u32,
    /// One of them has failed.
    is_broken: bool,
}

/// The blocks that the tasks of one engine are writing.
pub(crate) struct Blocks {
    backend: Arc<dyn Backend>,
    writing: Mutex<HashMap<BlockId, Writing>>,
    /// Signalled when a block is nobody's any more.
    freed: Condvar,
}

impl Blocks {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        Self { backend, writing: Mutex::default(), freed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<BlockId, Writing>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the blocks of `shards`, unless an earlier task still writes one
    /// of them at the end of `patience`.
    pub(crate) fn take(&self, shards: &[ShardTarget], patience: Duration) -> bool {
        let taken = |writing: &mut HashMap<BlockId, Writing>| {
            shards.iter().any(|shard| writing.contains_key(&shard.key.block))
        };
        let (mut writing, waited) = self
            .freed
            .wait_timeout_while(self.lock(), patience, taken)
            .unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return false;
        }
        for shard in shards {
            writing.entry(shard.key.block).or_default().left += 1;
        }
        true
    }

    /// One shard of `block` has ended, one way or the other.
    pub(crate) fn end(&self, block: BlockId, is_whole: bool) {
        let mut writing = self.lock();
        let Some(entry) = writing.get_mut(&block) else { return };
        entry.left -= 1;
        entry.is_broken |= !is_whole;
        if entry.left == 0 {
            if entry.is_broken {
                // Under the lock, so that the next writer comes after it.
                self.backend.discard(block);
            }
            writing.remove(&block);
            self.freed.notify_all();
        }
    }
}
