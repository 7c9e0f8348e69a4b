//! What both ends of the byte ring share, and the parts a channel consists of.
//!
//! Positions count bytes for ever, modulo 2^32; a position's place is its low
//! bits. Full is `tail - head == capacity`. The worker writes bytes, then moves
//! the tail (Release); the engine reads the tail (Acquire), then the bytes, and
//! moves the head. Each side remembers the other's index, and looks at the
//! shared one only when what it remembers is not enough.

use core::fmt;

use crate::channel::bytes::ByteArea;
use crate::channel::control::ControlBlock;
use crate::channel::layout::{RingLines, StateHeader};
use crate::sync::AtomicU32;

/// A ring's words and its bytes.
#[derive(Clone, Copy)]
pub struct ByteRing<'m> {
    pub(crate) lines: &'m RingLines,
    pub(crate) bytes: ByteArea<'m>,
}

/// The other side's index is nowhere it could have got to: that side is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WildIndex {
    /// The index.
    pub found: u32,
    /// Our own.
    pub ours: u32,
    /// Bytes the ring has.
    pub capacity_bytes: u32,
}

impl fmt::Display for WildIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found, ours, capacity_bytes } = self;
        write!(
            f,
            "the peer's ring index is {found:#x}, ours {ours:#x}, in a ring of {capacity_bytes} \
             bytes: the peer is broken"
        )
    }
}
impl core::error::Error for WildIndex {}

impl<'m> ByteRing<'m> {
    /// A ring of what `lines` and `bytes` say.
    pub fn new(lines: &'m RingLines, bytes: ByteArea<'m>) -> Self {
        Self { lines, bytes }
    }

    /// How many bytes fit.
    #[inline(always)]
    pub fn capacity_bytes(&self) -> u32 {
        self.bytes.capacity_bytes()
    }

    /// How full it is, if `head` and `tail` can be a ring's at all.
    #[inline(always)]
    pub(crate) fn filled(&self, head: u32, tail: u32) -> Option<u32> {
        let filled = tail.wrapping_sub(head);
        (filled <= self.capacity_bytes()).then_some(filled)
    }
}

/// Everything a channel consists of, wherever it lies.
#[derive(Clone, Copy)]
pub struct Parts<'m> {
    /// Status, epoch, heartbeat.
    pub header: &'m StateHeader,
    /// What is asked for.
    pub control: &'m ControlBlock,
    /// How long the message in `input` is.
    pub input_length_bytes: &'m AtomicU32,
    /// The message.
    pub input: ByteArea<'m>,
    /// The most a message may have.
    pub max_input_bytes: u32,
    /// The stream.
    pub output: ByteRing<'m>,
}
