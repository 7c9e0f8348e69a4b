//! Rotation: the order in which a rank walks a task's shards.
//!
//! Rank `r` begins at offset `r` and strides over the ranks, then takes the
//! next offset, and so on: at every step the ranks of a full stride stand on
//! different shards, so each finds something that nobody else is loading.

use core::fmt;

/// The order of `count` shards for one rank of `ranks`. Allocates nothing.
#[derive(Clone, Debug)]
pub struct Rotation {
    count: usize,
    ranks: usize,
    /// Offsets still to walk, this one included.
    offsets_left: usize,
    offset: usize,
    next: usize,
}

impl Rotation {
    /// The walk of the rank that drives `device_id`, among `local_rank_size`
    /// ranks (at least one), over shards `0..count`.
    pub fn new(count: usize, device_id: u32, local_rank_size: u32) -> Self {
        let ranks = local_rank_size.max(1) as usize;
        let offset = device_id as usize % ranks;
        Self { count, ranks, offsets_left: ranks, offset, next: offset }
    }

    /// The natural order, `0..count`.
    pub fn natural(count: usize) -> Self {
        Self::new(count, 0, 1)
    }
}

impl Iterator for Rotation {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        while self.next >= self.count {
            if self.offsets_left <= 1 {
                return None;
            }
            self.offsets_left -= 1;
            self.offset = if self.offset + 1 == self.ranks { 0 } else { self.offset + 1 };
            self.next = self.offset;
        }
        let index = self.next;
        self.next += self.ranks;
        Some(index)
    }
}

/// The configured number of ranks is not the number that takes part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RankCountMismatch {
    /// What `local_rank_size` says.
    pub configured: u32,
    /// Ranks that are attached.
    pub attached: u32,
}

impl RankCountMismatch {
    /// The mismatch, if there is one. To be asked once all ranks should be there.
    pub fn check(configured: u32, attached: u32) -> Option<Self> {
        (configured != attached).then_some(Self { configured, attached })
    }
}

impl fmt::Display for RankCountMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "local_rank_size = {} but {} ranks are attached: ranks will meet on the same shards; \
             set local_rank_size to the ranks of this node",
            self.configured, self.attached
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(count: usize, rank: u32, ranks: u32) -> impl Iterator<Item = usize> {
        Rotation::new(count, rank, ranks)
    }

    #[test]
    fn rank_1_of_4_walks_12_shards_in_the_documented_order() {
        assert!(order(12, 1, 4).eq([1, 5, 9, 2, 6, 10, 3, 7, 11, 0, 4, 8]));
    }

    #[test]
    fn a_device_beyond_the_rank_count_wraps_around() {
        assert!(order(12, 5, 4).eq(order(12, 1, 4)));
    }

    #[test]
    fn every_order_is_a_permutation() {
        for ranks in 1..=9 {
            for rank in 0..ranks {
                for count in 0..70 {
                    let mut seen = [false; 70];
                    for index in order(count, rank, ranks) {
                        assert!(!core::mem::replace(&mut seen[index], true));
                    }
                    assert!(seen[..count].iter().all(|&seen| seen), "{count} {rank}/{ranks}");
                }
            }
        }
    }

    #[test]
    fn at_every_step_of_full_strides_the_ranks_stand_on_different_shards() {
        for ranks in 1..=8_u32 {
            let count = 6 * ranks as usize;
            for step in 0..count {
                let mut seen = [false; 48];
                for rank in 0..ranks {
                    let Some(index) = order(count, rank, ranks).nth(step) else { panic!() };
                    assert!(!core::mem::replace(&mut seen[index], true), "step {step}");
                }
            }
        }
    }

    #[test]
    fn one_rank_walks_in_natural_order() {
        assert!(order(7, 3, 1).eq(0..7));
        assert!(Rotation::natural(7).eq(0..7));
    }

    #[test]
    fn a_wrong_rank_count_is_reported_with_both_numbers() {
        assert_eq!(RankCountMismatch::check(4, 4), None);
        let mismatch = RankCountMismatch::check(8, 4).unwrap();
        assert_eq!((mismatch.configured, mismatch.attached), (8, 4));
    }
}
