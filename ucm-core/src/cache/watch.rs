//! Looking without taking part: no pins, no writes, on a read-only mapping.

use crate::key::{BlockId, ShardKey};
use crate::segment::attach::ControlPlane;
use crate::slot::word::{Status, Word};
use crate::sync::{Ordering, fence};

/// What the cache has of a shard. "Present" is READY and nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// Nothing.
    Absent,
    /// A slot is prepared for it.
    Prepared,
    /// It is being loaded.
    Loading,
    /// Its last load failed.
    Failed,
    /// It is here.
    Ready,
}

/// Looks of one shard that are spent on a slot that keeps changing, before it
/// is called absent. Each one means that somebody else made progress.
const LOOKS: u32 = 64;

/// Asks what is there.
#[derive(Clone, Copy)]
pub struct Watcher<'m> {
    plane: ControlPlane<'m>,
}

impl<'m> Watcher<'m> {
    /// A watcher of `plane`, whose memory may be mapped read-only.
    pub fn new(plane: ControlPlane<'m>) -> Self {
        Self { plane }
    }

    /// The control plane.
    pub fn plane(&self) -> &ControlPlane<'m> {
        &self.plane
    }

    /// What the cache has of `key` now. Two state loads, no lock.
    pub fn probe(&self, key: &ShardKey) -> Presence {
        self.plane.probe(key)
    }

    /// How many of `blocks`, from the first on, have every shard READY.
    pub fn ready_prefix(&self, blocks: &[BlockId]) -> usize {
        self.plane.ready_prefix(blocks)
    }
}

impl ControlPlane<'_> {
    /// What the cache has of `key` now.
    pub fn probe(&self, key: &ShardKey) -> Presence {
        if self.is_poisoned() {
            return Presence::Absent;
        }
        self.index
            .find(key.hash(), |slot| {
                let meta = &self.slots[slot as usize];
                for _ in 0..LOOKS {
                    // SYNC(slot.key): the state, the key, the state again. The
                    // same word twice means the key belongs to it: pairs with
                    // the Release stores in `SlotMeta::set_key`. (A word comes
                    // back after 2^20 takings of the slot between two loads.)
                    let first = meta.load(Ordering::Acquire);
                    let matches = meta.has_key(key);
                    fence(Ordering::Acquire);
                    let second = meta.load(Ordering::Relaxed);
                    if first.without_waiters() == second.without_waiters() {
                        return matches.then(|| presence(first)).flatten();
                    }
                }
                None
            })
            .unwrap_or(Presence::Absent)
    }

    /// Whether every shard of `block` is READY.
    pub fn is_block_ready(&self, block: BlockId) -> bool {
        let shards = self.geometry().shape.shards_per_block;
        (0..shards).all(|shard| self.probe(&ShardKey::new(block, shard)) == Presence::Ready)
    }

    /// How many of `blocks`, from the first on, have every shard READY.
    pub fn ready_prefix(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().take_while(|&&block| self.is_block_ready(block)).count()
    }
}

/// What a slot with the right key says; `None`: nothing, look further.
fn presence(word: Word) -> Option<Presence> {
    match word.status() {
        Status::Ready => Some(Presence::Ready),
        Status::Loading => Some(Presence::Loading),
        Status::Failed => Some(Presence::Failed),
        Status::Prepared => Some(Presence::Prepared),
        Status::Inserting | Status::Claimed | Status::Free | Status::Quarantined => None,
    }
}
