//! Blocks on their way to the backend: pinned until they are there, one task's
//! at a time, and forgotten if they do not become whole.
//!
//! A backend says of a shard that it has taken it; what it has taken can be
//! loaded again only when the whole block is there. So the pins of a block's
//! shards go together: else one could be evicted that nobody can bring back.
//!
//! A backend takes every shard of a block once, until the block is complete or
//! discarded. So two tasks with the same block go one after the other, and a
//! block of which a shard failed is discarded when the last of its shards has
//! ended: then nothing of it is in flight, and it can be dumped anew.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ucm_core::cache::Pinned;
use ucm_core::key::BlockId;

use crate::engine::Shared;
use crate::load::budget::Budget;
use crate::task::ShardTarget;

/// A block's part in the task that writes it.
#[derive(Default)]
struct Writing {
    /// Shards of the task that have not ended.
    left: u32,
    /// One of them has failed.
    is_broken: bool,
    /// Those that the backend has taken.
    held: Vec<Pinned>,
}

/// The blocks that the tasks of one engine are writing.
pub(crate) struct Blocks {
    shared: Arc<Shared>,
    budget: Arc<Budget>,
    writing: Mutex<HashMap<BlockId, Writing>>,
    /// Signalled when a block is nobody's any more.
    freed: Condvar,
}

impl Blocks {
    pub(crate) fn new(shared: Arc<Shared>, budget: Arc<Budget>) -> Self {
        Self { shared, budget, writing: Mutex::default(), freed: Condvar::new() }
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

    /// One shard of `block` has ended: with its pin if the backend has taken
    /// it, else without.
    pub(crate) fn end(&self, block: BlockId, taken: Option<Pinned>) {
        let mut writing = self.lock();
        let Some(entry) = writing.get_mut(&block) else {
            return self.unpin(taken);
        };
        entry.left -= 1;
        entry.is_broken |= taken.is_none();
        entry.held.extend(taken);
        if entry.left > 0 {
            // Whoever waits for room may have to look at what is held.
            return self.budget.nudge();
        }
        if entry.is_broken {
            // Under the lock, so that the next writer comes after it.
            self.shared.backend.discard(block);
        }
        self.unpin(writing.remove(&block).into_iter().flat_map(|entry| entry.held));
        self.freed.notify_all();
    }

    /// Pins that are held although the backend has taken the shard.
    pub(crate) fn held(&self) -> u32 {
        self.lock().values().map(|entry| entry.held.len() as u32).sum()
    }

    /// Gives them up, where the cache is too small to keep a block together.
    pub(crate) fn let_go(&self) {
        let mut writing = self.lock();
        writing.values_mut().for_each(|entry| self.unpin(entry.held.drain(..)));
    }

    fn unpin(&self, pins: impl IntoIterator<Item = Pinned>) {
        for pinned in pins {
            self.shared.attachment.cache().release(pinned);
            self.budget.unpin();
        }
    }
}
