//! What reads bytes that somebody else wrote, given any bytes: it must end, and without a panic.
//!
//! Each target is a function of the input alone. `fuzz/` runs them under
//! libFuzzer; `tests/tests/fuzz.rs` runs the same functions over the corpus
//! and over seeded random inputs, wherever there is no nightly toolchain.
//!
//! Inputs for structured memory are *patches* onto a valid image: random bytes
//! alone never get past a magic number.

pub mod files;
pub mod memory;
pub mod ring;
pub mod segment;

/// A function of the input; a panic is the finding.
pub type Target = fn(&[u8]);

/// Every target by name.
pub const TARGETS: &[(&str, Target)] = &[
    ("attach", segment::attach),
    ("walks", segment::walks),
    ("reap", segment::reap),
    ("ring", ring::ring),
    ("block_file", files::block_file),
    ("trace", files::trace),
];

/// An input, read front to back; zeroes follow it.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let (&first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        first
    }

    pub(crate) fn number(&mut self) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// The next `len` bytes, or fewer.
    pub(crate) fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Writes over memory of `len` bytes: where and what is the input's to
    /// say, up to `most` times.
    pub(crate) fn patch(&mut self, len: usize, most: usize, mut write: impl FnMut(usize, u8)) {
        for _ in 0..most {
            if self.is_empty() {
                return;
            }
            let kind = self.byte();
            // Near the beginning, where the header is, or anywhere.
            let at = self.number() as usize % if kind & 1 == 0 { len } else { len.min(512) };
            let count = 1 + usize::from(kind >> 1) % 16;
            for (offset, &byte) in self.bytes(count).iter().enumerate() {
                if at + offset < len {
                    write(at + offset, byte);
                }
            }
        }
    }
}
