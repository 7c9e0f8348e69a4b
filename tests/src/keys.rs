//! Keys by number, and the bytes that each one demands.

use ucm_core::{BlockId, ShardKey};

/// Shards of one block in every segment of these tests.
pub const SHARDS_PER_BLOCK: u64 = 4;
/// Payload of one slot, in 8-byte words.
pub const SLOT_WORDS: usize = 32;
/// Keys are numbered below this.
pub const KEYS: usize = 4096;
/// What a slot is filled with before a load, and what no key demands.
pub const POISON: u64 = 0xDEAD_DEAD_DEAD_DEAD;

fn mix(value: u64) -> u64 {
    let z = (value ^ (value >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (z ^ (z >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

/// Key number `id`. Four in a row are the shards of one block.
pub fn key(id: u64) -> ShardKey {
    let block = id / SHARDS_PER_BLOCK;
    ShardKey::new(BlockId::from_words(mix(block + 1), block), (id % SHARDS_PER_BLOCK) as u32)
}

/// The number of a key made by [`key`].
pub fn id_of(key: &ShardKey) -> Option<u64> {
    let (_, block) = key.block.words();
    let id = block.checked_mul(SHARDS_PER_BLOCK)?.checked_add(key.shard.into())?;
    (self::key(id) == *key).then_some(id)
}

/// How many words the payload of key `id` has.
pub fn payload_words(id: u64) -> usize {
    8 + (mix(id ^ 0x55) >> 40) as usize % (SLOT_WORDS - 8)
}

/// Word `at` of the payload of key `id`.
pub fn payload_word(id: u64, at: usize) -> u64 {
    mix(id.wrapping_mul(0x1_0001) ^ ((at as u64 + 1) << 32))
}

/// What the owner states as the payload's checksum.
pub fn checksum(id: u64) -> u64 {
    mix(id ^ 0xC0FFEE)
}

/// The code with which loads of key `id` fail.
pub fn failure_code(id: u64) -> i32 {
    (id % 100) as i32 + 1
}

/// Keys that have no room but buckets 0 and 1 of an index of `bucket_count`.
pub fn crowd(bucket_count: u32) -> impl Iterator<Item = u64> {
    (0..KEYS as u64)
        .filter(move |&id| matches!(key(id).hash().buckets(bucket_count - 1), (0, 1) | (1, 0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_tells_its_number() {
        for id in 0..KEYS as u64 {
            assert_eq!(id_of(&key(id)), Some(id));
        }
        assert_eq!(id_of(&ShardKey::new(BlockId::from_words(1, 2), 3)), None);
    }

    #[test]
    fn no_two_keys_demand_the_same_word_and_none_demands_poison() {
        let mut seen = std::collections::HashSet::from([POISON]);
        for id in 0..512 {
            assert!((8..=SLOT_WORDS).contains(&payload_words(id)));
            assert!((0..SLOT_WORDS).all(|at| seen.insert(payload_word(id, at))));
        }
    }
}
