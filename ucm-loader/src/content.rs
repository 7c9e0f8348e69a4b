//! Bytes that can be recomputed: what a shard must hold, and what poison looks like.
//!
//! Every 8-byte word of a shard is a function of (seed, block, shard, word
//! number), so a byte that is stale, shifted, swapped with another shard's or
//! never written is found, and no expected copy has to be kept. One
//! multiplication a word keeps it faster than the memory it checks.

use ucm_core::key::ShardKey;

/// What memory is filled with before a phase, so that what was not written shows.
pub const POISON_BYTE: u8 = 0xDB;

const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
const MULTIPLIER: u64 = 0xD6E8_FEB8_6659_FD93;
const WORD_BYTES: usize = 8;
/// Words compared before anybody looks at the outcome.
const RUN_WORDS: usize = 32;

/// A 64-bit mix in which every input bit reaches every output bit.
#[inline]
pub(crate) fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// The stream a shard's words are taken from.
#[inline]
fn base(seed: u64, key: &ShardKey) -> u64 {
    let (low, high) = key.block.words();
    let block = mix(mix(seed ^ STEP).wrapping_add(low)).wrapping_add(high);
    mix(mix(block).wrapping_add(u64::from(key.shard)))
}

#[inline(always)]
fn word(base: u64, number: u64) -> u64 {
    let value = base.wrapping_add(number.wrapping_mul(STEP)).wrapping_mul(MULTIPLIER);
    value ^ (value >> 32)
}

#[inline(always)]
fn byte(base: u64, position: u64) -> u8 {
    word(base, position / WORD_BYTES as u64).to_le_bytes()[(position % WORD_BYTES as u64) as usize]
}

/// Bytes of `len` before the first whole word that starts at or after `offset`.
fn head_bytes(offset: u64, len: usize) -> usize {
    let to_word = (offset.next_multiple_of(WORD_BYTES as u64) - offset) as usize;
    to_word.min(len)
}

/// Fills `buf` with what shard `key` holds from byte `offset` on.
pub fn fill(buf: &mut [u8], seed: u64, key: &ShardKey, offset: u64) {
    let base = base(seed, key);
    let head = head_bytes(offset, buf.len());
    let (front, rest) = buf.split_at_mut(head);
    for (position, slot) in (offset..).zip(front) {
        *slot = byte(base, position);
    }
    let first = (offset + head as u64) / WORD_BYTES as u64;
    let (words, tail) = rest.as_chunks_mut::<WORD_BYTES>();
    for (number, chunk) in (first..).zip(words.iter_mut()) {
        *chunk = word(base, number).to_le_bytes();
    }
    let after = (first + words.len() as u64) * WORD_BYTES as u64;
    for (position, slot) in (after..).zip(tail) {
        *slot = byte(base, position);
    }
}

/// Compares `buf` with what shard `key` holds from byte `offset` on. The first
/// byte that differs is returned as its offset within the shard.
#[must_use]
pub fn verify(buf: &[u8], seed: u64, key: &ShardKey, offset: u64) -> Option<u64> {
    let base = base(seed, key);
    let differs = |start: u64, bytes: &[u8]| {
        let mut pairs = (start..).zip(bytes);
        pairs
            .find(|(position, found)| **found != byte(base, *position))
            .map(|(position, _)| position)
    };
    let head = head_bytes(offset, buf.len());
    let (front, rest) = buf.split_at(head);
    if let Some(position) = differs(offset, front) {
        return Some(position);
    }
    let mut start = offset + head as u64;
    for run in rest.chunks(RUN_WORDS * WORD_BYTES) {
        let (words, tail) = run.as_chunks::<WORD_BYTES>();
        let mut wrong = 0;
        for (number, found) in (start / WORD_BYTES as u64..).zip(words) {
            wrong |= u64::from_le_bytes(*found) ^ word(base, number);
        }
        // Only a run that is known to be bad, or the end, is looked at bytewise.
        let suspect = if wrong == 0 { tail } else { run };
        let suspect_start = start + (run.len() - suspect.len()) as u64;
        if let Some(position) = differs(suspect_start, suspect) {
            return Some(position);
        }
        start += run.len() as u64;
    }
    None
}

/// Fills `buf` with [`POISON_BYTE`].
pub fn poison(buf: &mut [u8]) {
    buf.fill(POISON_BYTE);
}

#[cfg(test)]
mod tests {
    use ucm_core::key::BlockId;

    use super::*;

    fn key(block: u64, shard: u32) -> ShardKey {
        ShardKey::new(BlockId::from_words(block, 1), shard)
    }

    fn filled(len: usize, seed: u64, key: &ShardKey, offset: u64) -> Vec<u8> {
        let mut buf = vec![0; len];
        fill(&mut buf, seed, key, offset);
        buf
    }

    #[test]
    fn a_piece_at_any_offset_equals_that_piece_of_the_whole() {
        let whole = filled(1000, 1, &key(5, 2), 0);
        for offset in [0, 1, 7, 8, 9, 255, 256, 257, 992, 999] {
            for len in [0, 1, 3, 8, 15, 300] {
                let end = (offset + len).min(1000);
                let piece = filled(end - offset, 1, &key(5, 2), offset as u64);
                assert_eq!(piece, whole[offset..end], "offset {offset}, {len} bytes");
                assert_eq!(verify(&piece, 1, &key(5, 2), offset as u64), None);
            }
        }
    }

    #[test]
    fn every_single_wrong_byte_is_found_where_it_is() {
        let good = filled(777, 3, &key(9, 0), 100);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert_eq!(verify(&bad, 3, &key(9, 0), 100), Some(100 + at as u64));
        }
    }

    #[test]
    fn another_seed_block_shard_or_offset_has_other_bytes() {
        let good = filled(4096, 1, &key(1, 1), 0);
        assert!(verify(&good, 2, &key(1, 1), 0).is_some());
        assert!(verify(&good, 1, &key(2, 1), 0).is_some());
        assert!(verify(&good, 1, &key(1, 2), 0).is_some());
        assert!(verify(&good, 1, &key(1, 1), 8).is_some());
        let other_half = ShardKey::new(BlockId::from_words(1, 2), 1);
        assert!(verify(&good, 1, &other_half, 0).is_some());
    }

    #[test]
    fn poison_is_nobodys_content() {
        let mut buf = vec![0; 64];
        poison(&mut buf);
        assert_eq!(buf, [POISON_BYTE; 64]);
        // Within the first word, though one byte may be equal by chance.
        assert!(verify(&buf, 1, &key(1, 1), 0).is_some_and(|at| at < 8));
    }
}
