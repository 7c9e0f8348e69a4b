//! CLOCK second chance: the shared hand, the access bytes, the reserved pool.

use crate::sync::{AtomicU8, AtomicU32, Ordering};

/// Which slots an allocation may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pool {
    /// All but the reserve.
    Ordinary,
    /// All, the reserve too: prefetch and prealloc.
    WithReserve,
}

/// One step of the hand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Step {
    /// The slot it points at.
    pub(crate) slot: u32,
    /// Whether a set access bit still protects the slot.
    pub(crate) second_chance: bool,
}

/// The hand's way through `range` slots: twice around with second chances,
/// then once more taking whatever may be taken. Each step is one atomic add,
/// so any number of evictors walk one circle together.
pub(crate) struct Sweep<'m> {
    hand: &'m AtomicU32,
    range: u32,
    steps: u64,
}

impl<'m> Sweep<'m> {
    pub(crate) fn new(hand: &'m AtomicU32, range: u32) -> Self {
        Self { hand, range, steps: 0 }
    }
}

impl Iterator for Sweep<'_> {
    type Item = Step;

    #[inline]
    fn next(&mut self) -> Option<Step> {
        if self.range == 0 || self.steps >= 3 * u64::from(self.range) {
            return None;
        }
        // The hand wraps at 2^32; where that is no multiple of `range` it
        // jumps once in four billion steps, which harms nobody.
        let position = self.hand.fetch_add(1, Ordering::Relaxed);
        let second_chance = self.steps < 2 * u64::from(self.range);
        self.steps += 1;
        Some(Step { slot: position % self.range, second_chance })
    }
}

/// Marks a slot as used. A hit finds the byte set nearly always, so it looks
/// first and the line stays shared.
#[inline(always)]
pub(crate) fn mark_used(access: &AtomicU8) {
    if access.load(Ordering::Relaxed) == 0 {
        access.store(1, Ordering::Relaxed);
    }
}

/// Takes the second chance away; says whether there was one.
#[inline(always)]
pub(crate) fn spend_chance(access: &AtomicU8) -> bool {
    let had_one = access.load(Ordering::Relaxed) != 0;
    if had_one {
        access.store(0, Ordering::Relaxed);
    }
    had_one
}
