//! A small seeded generator, so that a run can be repeated.

/// SplitMix64.
pub struct Rng(u64);

impl Rng {
    /// With a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ 0x1234_5678_9ABC_DEF1)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// One below `limit`, which is not zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.number() % limit
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
