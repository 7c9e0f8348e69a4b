//! What the cache is asked for: a block id, a shard of it, and their hash.

use bytemuck::{Pod, Zeroable};

/// A block's name: the 16-byte hash of its content and everything before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct BlockId(pub [u8; 16]);

impl BlockId {
    /// The id as two little-endian words, as a slot stores it.
    #[inline(always)]
    pub const fn words(self) -> (u64, u64) {
        let value = u128::from_le_bytes(self.0);
        (value as u64, (value >> 64) as u64)
    }

    /// The id whose [`words`](Self::words) these are.
    #[inline(always)]
    pub const fn from_words(low: u64, high: u64) -> Self {
        Self(((high as u128) << 64 | low as u128).to_le_bytes())
    }
}

impl core::fmt::Display for BlockId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl core::fmt::Debug for BlockId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{self}")
    }
}

/// The cache key: one equal-sized piece of one block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct ShardKey {
    /// The block.
    pub block: BlockId,
    /// Which shard of it, from 0.
    pub shard: u32,
}

impl ShardKey {
    /// Shard `shard` of `block`.
    #[inline(always)]
    pub const fn new(block: BlockId, shard: u32) -> Self {
        Self { block, shard }
    }

    /// A 64-bit hash whose high half is the index fingerprint and whose low
    /// half chooses buckets. Ids are hashes already, but a test's or an
    /// engine's may be counters, so it mixes all 160 bits: one folded
    /// 64 x 64 -> 128 multiplication and one finishing round.
    #[inline(always)]
    pub const fn hash(&self) -> KeyHash {
        let (low, high) = self.block.words();
        let left = low ^ 0x9E37_79B9_7F4A_7C15;
        let right = high ^ ((self.shard as u64) << 32) ^ 0xD6E8_FEB8_6659_FD93 ^ self.shard as u64;
        let wide = (left as u128) * (right as u128);
        let folded = (wide as u64) ^ ((wide >> 64) as u64) ^ low.rotate_left(23) ^ right;
        let mixed = (folded ^ (folded >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        KeyHash(mixed ^ (mixed >> 32))
    }
}

/// The hash of a [`ShardKey`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyHash(pub u64);

impl KeyHash {
    /// What an index entry says of its key.
    #[inline(always)]
    pub const fn fingerprint(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The two different buckets (of `bucket_mask + 1`, a power of two >= 2)
    /// that may hold the key.
    #[inline(always)]
    pub const fn buckets(self, bucket_mask: u32) -> (u32, u32) {
        let first = self.0 as u32 & bucket_mask;
        let second = ((self.0 >> 22) ^ self.0.rotate_left(17)) as u32 & bucket_mask;
        (first, if second == first { first ^ 1 } else { second })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_id_survives_its_words() {
        let id = BlockId(*b"0123456789abcdef");
        let (low, high) = id.words();
        assert_eq!(BlockId::from_words(low, high), id);
    }

    #[test]
    fn the_two_buckets_of_a_key_always_differ() {
        for shard in 0..10_000 {
            let hash = ShardKey::new(BlockId::from_words(7, 9), shard).hash();
            for mask in [1, 3, 1023] {
                let (first, second) = hash.buckets(mask);
                assert_ne!(first, second);
                assert!(first <= mask && second <= mask);
            }
        }
    }

    #[test]
    fn counters_as_ids_spread_over_the_buckets() {
        let mut filled = [0_u32; 256];
        for id in 0..2048_u64 {
            let hash = ShardKey::new(BlockId::from_words(id, 0), 0).hash();
            filled[hash.buckets(255).0 as usize] += 1;
        }
        // 8 expected in each; a bad mix leaves many empty or piles them up.
        assert!(filled.iter().all(|&count| count < 32));
        assert!(filled.iter().filter(|&&count| count == 0).count() < 8);
    }
}
