//! The cache's policy in one process, without concurrency: the reference a replay is held against.
//!
//! Plain CLOCK over slots of one shard each: the access bit is set on a hit
//! and on an allocation; the hand clears set bits and takes the first slot
//! whose bit is clear, after at most two rounds the one it stands at. A
//! request asks for its longest prefix over cache and backend, loads that
//! prefix shard by shard, then writes the rest through the cache into the
//! backend, which forgets nothing. Nothing is pinned.

use std::collections::{HashMap, HashSet};

/// What one request found and did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RequestOutcome {
    /// Blocks from the front that were in the cache or the backend.
    pub prefix_hit_blocks: u64,
    /// Blocks from the front that were in the cache with all their shards.
    pub host_hit_blocks: u64,
    /// Shards loaded from the backend.
    pub loads: u64,
}

type Shard = (u64, u32);

/// The slots, and the hand.
struct Clock {
    slots: Vec<Option<Shard>>,
    accessed: Vec<bool>,
    hand: usize,
    places: HashMap<Shard, usize>,
    evictions: u64,
}

impl Clock {
    fn new(capacity_slots: usize) -> Self {
        Self {
            slots: vec![None; capacity_slots],
            accessed: vec![false; capacity_slots],
            hand: 0,
            places: HashMap::new(),
            evictions: 0,
        }
    }

    fn contains(&self, shard: Shard) -> bool {
        self.places.contains_key(&shard)
    }

    /// Marks `shard` if it is there, else gives it a slot. Whether it was there.
    fn touch(&mut self, shard: Shard) -> bool {
        if let Some(&slot) = self.places.get(&shard) {
            self.accessed[slot] = true;
            return true;
        }
        let slot = self.victim();
        if let Some(old) = self.slots[slot].replace(shard) {
            self.places.remove(&old);
            self.evictions += 1;
        }
        self.places.insert(shard, slot);
        self.accessed[slot] = true;
        false
    }

    fn advance(&mut self) -> usize {
        let slot = self.hand;
        self.hand = (self.hand + 1) % self.slots.len();
        slot
    }

    fn victim(&mut self) -> usize {
        for _ in 0..2 * self.slots.len() {
            let slot = self.advance();
            if !std::mem::take(&mut self.accessed[slot]) {
                return slot;
            }
        }
        self.advance()
    }
}

/// The model.
pub struct ReferenceModel {
    clock: Clock,
    shards_per_block: u32,
    backend: HashSet<u64>,
}

impl ReferenceModel {
    /// A cache of `capacity_slots` slots of a shard each (at least one) and an
    /// empty backend. A cache with a reserve is modelled by its ordinary slots.
    pub fn new(capacity_slots: usize, shards_per_block: u32) -> Self {
        let clock = Clock::new(capacity_slots.max(1));
        Self { clock, shards_per_block, backend: HashSet::new() }
    }

    /// Shards that had to go so far.
    pub fn evictions(&self) -> u64 {
        self.clock.evictions
    }

    fn in_host(&self, block: u64) -> bool {
        (0..self.shards_per_block).all(|shard| self.clock.contains((block, shard)))
    }

    /// One request for the blocks `hash_ids`.
    pub fn request(&mut self, hash_ids: &[u64]) -> RequestOutcome {
        let host = hash_ids.iter().take_while(|block| self.in_host(**block)).count();
        let found = |block: &&u64| self.in_host(**block) || self.backend.contains(*block);
        let prefix = hash_ids.iter().take_while(found).count();
        let mut loads = 0;
        for (number, &block) in hash_ids.iter().enumerate() {
            for shard in 0..self.shards_per_block {
                let hit = self.clock.touch((block, shard));
                loads += u64::from(!hit && number < prefix);
            }
            self.backend.insert(block);
        }
        RequestOutcome { prefix_hit_blocks: prefix as u64, host_hit_blocks: host as u64, loads }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(prefix_hit_blocks: u64, host_hit_blocks: u64, loads: u64) -> RequestOutcome {
        RequestOutcome { prefix_hit_blocks, host_hit_blocks, loads }
    }

    #[test]
    fn the_hand_gives_every_slot_a_second_chance() {
        // Four slots hold A B C D with all bits set and the hand at 0.
        let mut clock = Clock::new(4);
        let shard = |name: char| (name as u64, 0);
        for name in ['A', 'B', 'C', 'D'] {
            assert!(!clock.touch(shard(name)));
        }
        assert_eq!((clock.hand, &clock.accessed[..]), (0, &[true; 4][..]));
        // E sweeps all four bits clear and takes slot 0.
        assert!(!clock.touch(shard('E')));
        assert_eq!(clock.slots[0], Some(shard('E')));
        assert_eq!((clock.hand, &clock.accessed[..]), (1, &[true, false, false, false][..]));
        // A hit on B sets its bit; F clears it, passes, and takes C's slot.
        assert!(clock.touch(shard('B')));
        assert!(!clock.touch(shard('F')));
        assert_eq!(clock.slots[2], Some(shard('F')));
        assert!(clock.contains(shard('B')) && !clock.contains(shard('C')));
        assert_eq!((clock.hand, clock.evictions), (3, 2));
    }

    #[test]
    fn a_repeated_request_that_fits_is_all_host_hits() {
        let mut model = ReferenceModel::new(6, 2);
        assert_eq!(model.request(&[1, 2, 3]), outcome(0, 0, 0));
        assert_eq!(model.request(&[1, 2, 3]), outcome(3, 3, 0));
        assert_eq!(model.request(&[1, 2, 4]), outcome(2, 2, 0));
    }

    #[test]
    fn what_was_evicted_comes_back_from_the_backend() {
        let mut model = ReferenceModel::new(4, 2);
        model.request(&[1, 2]);
        model.request(&[3, 4]);
        assert_eq!(model.request(&[1, 2]), outcome(2, 0, 4));
        assert_eq!(model.request(&[1, 2]), outcome(2, 2, 0));
        assert_eq!(model.evictions(), 8);
    }

    #[test]
    fn a_gap_ends_both_prefixes_even_when_later_blocks_are_there() {
        let mut model = ReferenceModel::new(100, 1);
        model.request(&[1, 2, 3]);
        assert_eq!(model.request(&[1, 9, 3]), outcome(1, 1, 0));
        assert_eq!(model.request(&[9, 1]), outcome(2, 2, 0));
    }

    #[test]
    fn a_block_with_one_shard_gone_is_no_host_hit_and_only_that_shard_is_loaded() {
        let mut model = ReferenceModel::new(3, 2);
        model.request(&[1]);
        model.request(&[2]);
        // Block 2's second shard took the slot of block 1's first; the hand
        // stands at block 1's second, whose bit this sets.
        assert!(!model.clock.contains((1, 0)) && model.clock.touch((1, 1)));
        assert_eq!(model.request(&[1]), outcome(1, 0, 1));
    }

    #[test]
    fn loading_one_shard_may_evict_the_next_one_of_the_same_block() {
        let mut model = ReferenceModel::new(3, 2);
        model.request(&[1]);
        model.request(&[2]);
        assert!(model.clock.contains((1, 1)));
        assert_eq!(model.request(&[1]), outcome(1, 0, 2));
    }
}
