//! The reading end: it alone moves the head, and remembers the tail.

use core::marker::PhantomData;
use core::ops::Deref;

use crate::ring::layout::{Ring, Slot};
use crate::sync::Ordering;

/// The one consumer of a ring.
pub struct Consumer<T, S: AsRef<[Slot<T>]>, R: Deref<Target = Ring<T, S>>> {
    ring: R,
    /// Mine, so a plain copy of the shared head.
    head: u32,
    /// The tail as last seen: there may be more than it says.
    seen_tail: u32,
    _items: PhantomData<(T, S)>,
}

impl<T, S: AsRef<[Slot<T>]>, R: Deref<Target = Ring<T, S>>> Consumer<T, S, R> {
    pub(crate) fn new(ring: R) -> Self {
        let head = ring.head.0.load(Ordering::Acquire);
        let seen_tail = ring.tail.0.load(Ordering::Acquire);
        Self { ring, head, seen_tail, _items: PhantomData }
    }

    /// Takes the oldest item.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        if self.head == self.seen_tail {
            // SYNC(ring.tail): Acquire; pairs with the Release store in
            // `Producer::push`: the item is there before it is read.
            self.seen_tail = self.ring.tail.0.load(Ordering::Acquire);
            if self.head == self.seen_tail {
                return None;
            }
        }
        let item = self.ring.slot(self.head).0.with_mut(|place| {
            // SAFETY: `place` points into the ring, and this position is
            // between head and tail: ours alone.
            let place = unsafe { &*place };
            // SAFETY: and written, as the Acquire load above has shown.
            unsafe { place.assume_init_read() }
        });
        self.head = self.head.wrapping_add(1);
        // SYNC(ring.head): Release; pairs with the Acquire load in
        // `Producer::push`: the item is out before its place is reused.
        self.ring.head.0.store(self.head, Ordering::Release);
        Some(item)
    }

    /// Whether nothing is there now.
    pub fn is_empty(&self) -> bool {
        self.head == self.ring.tail.0.load(Ordering::Acquire)
    }
}

impl<T, S: AsRef<[Slot<T>]>, R: Deref<Target = Ring<T, S>>> Drop for Consumer<T, S, R> {
    fn drop(&mut self) {
        self.ring.give_back_consumer();
    }
}
