//! The writing end: it alone moves the tail, and remembers the head.

use core::marker::PhantomData;
use core::ops::Deref;

use crate::ring::layout::{Ring, Slot};
use crate::sync::Ordering;

/// The ring is full; the item comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full<T>(pub T);

/// The one producer of a ring.
pub struct Producer<T, S: AsRef<[Slot<T>]>, R: Deref<Target = Ring<T, S>>> {
    ring: R,
    /// Mine, so a plain copy of the shared tail.
    tail: u32,
    /// The head as last seen: the ring may be emptier than it says.
    seen_head: u32,
    _items: PhantomData<(T, S)>,
}

impl<T, S: AsRef<[Slot<T>]>, R: Deref<Target = Ring<T, S>>> Producer<T, S, R> {
    pub(crate) fn new(ring: R) -> Self {
        // An earlier producer may have used the ring.
        let tail = ring.tail.0.load(Ordering::Acquire);
        let seen_head = ring.head.0.load(Ordering::Acquire);
        Self { ring, tail, seen_head, _items: PhantomData }
    }

    /// Appends `item`, or gives it back when the ring is full.
    #[inline]
    pub fn push(&mut self, item: T) -> Result<(), Full<T>> {
        if self.tail.wrapping_sub(self.seen_head) == self.ring.capacity() {
            // SYNC(ring.head): Acquire; pairs with the Release store in
            // `Consumer::pop`: the item is out before its place is reused.
            self.seen_head = self.ring.head.0.load(Ordering::Acquire);
            if self.tail.wrapping_sub(self.seen_head) == self.ring.capacity() {
                return Err(Full(item));
            }
        }
        self.ring.slot(self.tail).0.with_mut(|place| {
            // SAFETY: `place` points into the ring, and this position is not
            // between head and tail, so this producer alone may touch it.
            unsafe { (*place).write(item) };
        });
        self.tail = self.tail.wrapping_add(1);
        // SYNC(ring.tail): Release; pairs with the Acquire load in
        // `Consumer::pop` and publishes the item above.
        self.ring.tail.0.store(self.tail, Ordering::Release);
        Ok(())
    }

    /// The ring.
    pub fn ring(&self) -> &Ring<T, S> {
        &self.ring
    }
}

impl<T, S: AsRef<[Slot<T>]>, R: Deref<Target = Ring<T, S>>> Drop for Producer<T, S, R> {
    fn drop(&mut self) {
        self.ring.give_back_producer();
    }
}
