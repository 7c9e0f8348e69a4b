//! What both ends of a ring share: head line, tail line, slots.

use core::mem::MaybeUninit;
use core::ops::Deref;

use crate::ring::consumer::Consumer;
use crate::ring::producer::Producer;
use crate::sync::{AtomicU32, Cell, Ordering};

/// One place of a ring.
pub struct Slot<T>(pub(crate) Cell<MaybeUninit<T>>);

// SAFETY: a slot is entered by one end at a time, which the ring's positions
// decide; what is in it moves between threads, so it must be Send.
unsafe impl<T: Send> Sync for Slot<T> {}

impl<T> Slot<T> {
    /// An empty place.
    #[cfg(not(ucm_loom))]
    pub const fn new() -> Self {
        Self(Cell::new(MaybeUninit::uninit()))
    }

    /// An empty place.
    #[cfg(ucm_loom)]
    pub fn new() -> Self {
        Self(Cell::new(MaybeUninit::uninit()))
    }
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// An index on a line of its own: each is written by one end only.
#[repr(align(128))]
pub(crate) struct OwnLine(pub(crate) AtomicU32);

const PRODUCER_TAKEN: u32 = 1;
const CONSUMER_TAKEN: u32 = 2;

/// A ring over memory the caller brings (`S`: an array, a boxed slice).
///
/// Positions count up for ever, modulo 2^32; a position's slot is its low
/// bits. Full is `tail - head == capacity`, so every slot is used.
pub struct Ring<T, S: AsRef<[Slot<T>]>> {
    /// Next position to read. Written by the consumer.
    pub(crate) head: OwnLine,
    /// Next position to write. Written by the producer.
    pub(crate) tail: OwnLine,
    taken: AtomicU32,
    mask: u32,
    slots: S,
    _items: core::marker::PhantomData<fn() -> T>,
}

impl<T, S: AsRef<[Slot<T>]>> Ring<T, S> {
    /// A ring over `slots`, whose number must be a power of two below 2^31;
    /// otherwise they come back.
    pub fn new(slots: S) -> Result<Self, S> {
        let count = slots.as_ref().len();
        if !count.is_power_of_two() || count > 1 << 30 {
            return Err(slots);
        }
        Ok(Self {
            head: OwnLine(AtomicU32::new(0)),
            tail: OwnLine(AtomicU32::new(0)),
            taken: AtomicU32::new(0),
            mask: count as u32 - 1,
            slots,
            _items: core::marker::PhantomData,
        })
    }

    /// How many items fit.
    pub fn capacity(&self) -> u32 {
        self.mask + 1
    }

    /// The one producer of the ring `ring` points at; `None` if it exists already.
    pub fn producer<R: Deref<Target = Self>>(ring: R) -> Option<Producer<T, S, R>> {
        ring.take(PRODUCER_TAKEN).then(|| Producer::new(ring))
    }

    /// The one consumer of the ring `ring` points at; `None` if it exists already.
    pub fn consumer<R: Deref<Target = Self>>(ring: R) -> Option<Consumer<T, S, R>> {
        ring.take(CONSUMER_TAKEN).then(|| Consumer::new(ring))
    }

    fn take(&self, end: u32) -> bool {
        self.taken.fetch_or(end, Ordering::AcqRel) & end == 0
    }

    pub(crate) fn give_back_producer(&self) {
        self.taken.fetch_and(!PRODUCER_TAKEN, Ordering::AcqRel);
    }

    pub(crate) fn give_back_consumer(&self) {
        self.taken.fetch_and(!CONSUMER_TAKEN, Ordering::AcqRel);
    }

    #[inline(always)]
    pub(crate) fn slot(&self, position: u32) -> &Slot<T> {
        &self.slots.as_ref()[(position & self.mask) as usize]
    }
}

impl<T, S: AsRef<[Slot<T>]>> Drop for Ring<T, S> {
    fn drop(&mut self) {
        // Both ends are gone (they borrow or share the ring), so what lies
        // between the positions is ours to drop.
        let tail = self.tail.0.load(Ordering::Acquire);
        let mut head = self.head.0.load(Ordering::Acquire);
        while head != tail {
            self.slot(head).0.with_mut(|item| {
                // SAFETY: `item` points at a live cell, and nobody else has it.
                let item = unsafe { &mut *item };
                // SAFETY: a position between head and tail was written and
                // not taken.
                unsafe { item.assume_init_drop() }
            });
            head = head.wrapping_add(1);
        }
    }
}
