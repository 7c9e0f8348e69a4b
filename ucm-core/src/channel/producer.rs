//! The ring's writing end: it alone moves the tail, and remembers the head.

use core::fmt;

use crate::channel::ring::{ByteRing, WildIndex};
use crate::channel::sleep::{Bell, Mode, Wake, sleep};
use crate::sync::{Ordering, spin_hint};

/// Why bytes were not written. None of them was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteError {
    /// There is no room for them now.
    Full,
    /// There will never be: the ring is smaller.
    TooLarge,
    /// There was no room until the deadline.
    Deadline,
    /// The engine's index is impossible.
    Wild(WildIndex),
}

impl fmt::Display for WriteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the ring is full"),
            Self::TooLarge => f.write_str("more bytes than the ring has"),
            Self::Deadline => f.write_str("the ring was full until the deadline"),
            Self::Wild(error) => error.fmt(f),
        }
    }
}
impl core::error::Error for WriteError {}

impl From<WildIndex> for WriteError {
    fn from(error: WildIndex) -> Self {
        Self::Wild(error)
    }
}

/// What is put aside before it is copied into the ring. One long copy lets the
/// transfers of many lines overlap, which stores of single messages do not.
pub(crate) const STAGE_BYTES: usize = 4096;
/// Pieces that are put aside: longer ones are long copies themselves, and
/// several shorter ones share a line, which travels once for all of them.
pub(crate) const STAGED_BYTES: core::ops::RangeInclusive<usize> = 32..=512;
/// Writes between two publications that make a batch.
const STAGING_WRITES: u32 = 4;

/// The one producer of a byte ring.
///
/// What is written becomes visible with [`publish`](Self::publish), so many
/// small writes cost one. Dropped, it publishes nothing.
pub struct ByteProducer<'m, H> {
    ring: ByteRing<'m>,
    host: H,
    mode: Mode,
    wake: Wake,
    spins: u32,
    /// Ours, so a plain copy of the shared tail; ahead of it by what is not
    /// published yet.
    tail: u32,
    published: u32,
    /// The head as last seen: the ring may be emptier than it says.
    seen_head: u32,
    /// Small writes of a batch, put aside to be copied at once: `staged` bytes
    /// that belong right before `tail`.
    stage: [u8; STAGE_BYTES],
    staged: usize,
    staging: bool,
    /// Writes of such a length since the last publication; no more than the
    /// ring has bytes.
    writes: u32,
}

impl<'m, H: Bell> ByteProducer<'m, H> {
    /// The producer of `ring`. `peer` is what the consumer declared.
    ///
    /// # Safety
    /// There is no other producer of this ring while this one lives, in
    /// whatever process.
    ///
    /// # Errors
    /// [`WildIndex`] when the ring's indices contradict each other.
    pub unsafe fn new(
        ring: ByteRing<'m>,
        host: H,
        mode: Mode,
        peer: u32,
        spins: u32,
    ) -> Result<Self, WildIndex> {
        let tail = ring.lines.tail.load(Ordering::Acquire);
        let found = ring.lines.head.load(Ordering::Acquire);
        if ring.filled(found, tail).is_none() {
            let capacity_bytes = ring.capacity_bytes();
            return Err(WildIndex { found, ours: tail, capacity_bytes });
        }
        let wake = Wake::between(mode, peer);
        Ok(Self {
            ring,
            host,
            mode,
            wake,
            spins,
            tail,
            published: tail,
            seen_head: found,
            stage: [0; STAGE_BYTES],
            staged: 0,
            staging: false,
            writes: 0,
        })
    }

    /// Reads the shared head.
    fn look(&mut self) -> Result<(), WildIndex> {
        // SYNC(channel.head): Acquire; pairs with the Release store in
        // `ByteConsumer::release`: the bytes are out before their place is
        // written again.
        let found = self.ring.lines.head.load(Ordering::Acquire);
        // It goes forward, and not beyond what was published.
        let filled = self.published.wrapping_sub(found);
        if filled > self.published.wrapping_sub(self.seen_head) {
            let capacity_bytes = self.ring.capacity_bytes();
            return Err(WildIndex { found, ours: self.published, capacity_bytes });
        }
        self.seen_head = found;
        Ok(())
    }

    #[inline(always)]
    fn room_seen(&self) -> u32 {
        self.ring.capacity_bytes() - self.tail.wrapping_sub(self.seen_head)
    }

    #[inline(always)]
    fn make_room(&mut self, bytes: usize) -> Result<(), WriteError> {
        if (self.room_seen() as usize) < bytes { self.find_room(bytes) } else { Ok(()) }
    }

    #[cold]
    fn find_room(&mut self, bytes: usize) -> Result<(), WriteError> {
        if bytes > self.ring.capacity_bytes() as usize {
            return Err(WriteError::TooLarge);
        }
        self.look()?;
        if (self.room_seen() as usize) < bytes { Err(WriteError::Full) } else { Ok(()) }
    }

    /// Bytes that can be written now.
    ///
    /// # Errors
    /// [`WildIndex`].
    pub fn room_bytes(&mut self) -> Result<u32, WildIndex> {
        self.look()?;
        Ok(self.room_seen())
    }

    /// Writes bytes that there is room for.
    #[inline(always)]
    fn put(&mut self, bytes: &[u8]) {
        if STAGED_BYTES.contains(&bytes.len()) {
            self.writes += 1;
            if self.staging {
                return self.stage_bytes(bytes);
            }
        }
        self.unstage();
        self.put_direct(bytes);
    }

    #[inline(always)]
    fn stage_bytes(&mut self, bytes: &[u8]) {
        if self.stage.len() - self.staged < bytes.len() {
            self.unstage();
        }
        if let Some(place) = self.stage.get_mut(self.staged..self.staged + bytes.len()) {
            place.copy_from_slice(bytes);
            self.staged += bytes.len();
            self.tail = self.tail.wrapping_add(bytes.len() as u32);
        }
    }

    /// Copies what was put aside to where it belongs.
    #[inline(always)]
    fn unstage(&mut self) {
        if self.staged > 0 {
            self.unstage_all();
        }
    }

    #[inline(never)]
    fn unstage_all(&mut self) {
        let start = self.tail.wrapping_sub(self.staged as u32);
        // SAFETY: room for them was found when they were put aside, and only
        // the consumer's head has moved since, which makes more.
        unsafe { self.ring.bytes.copy_in(start, &self.stage[..self.staged]) };
        self.staged = 0;
    }

    #[inline(always)]
    fn put_direct(&mut self, bytes: &[u8]) {
        // SAFETY: there is room for them (every caller has asked), that is,
        // their places are not between head and tail: no consumer looks at
        // them before the tail has passed them, and this is the only producer.
        unsafe { self.ring.bytes.copy_in(self.tail, bytes) };
        self.tail = self.tail.wrapping_add(bytes.len() as u32);
    }

    /// Writes all of `bytes`, or nothing. Not visible before it is published.
    ///
    /// # Errors
    /// See [`WriteError`]; a full ring is one.
    #[inline(always)]
    pub fn try_write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.make_room(bytes.len())?;
        self.put(bytes);
        Ok(())
    }

    /// Writes both one after the other, or nothing.
    ///
    /// # Errors
    /// See [`WriteError`].
    #[inline]
    pub fn try_write_pair(&mut self, first: &[u8], second: &[u8]) -> Result<(), WriteError> {
        self.make_room(first.len().saturating_add(second.len()))?;
        self.put(first);
        self.put(second);
        Ok(())
    }

    /// Writes as much of `bytes` as there is room for; says how much.
    ///
    /// # Errors
    /// [`WildIndex`].
    #[inline]
    pub fn write_some(&mut self, bytes: &[u8]) -> Result<usize, WildIndex> {
        if (self.room_seen() as usize) < bytes.len() {
            self.look()?;
        }
        let bytes = &bytes[..bytes.len().min(self.room_seen() as usize)];
        self.put(bytes);
        Ok(bytes.len())
    }

    /// Bytes written and not published.
    #[inline]
    pub fn unpublished_bytes(&self) -> u32 {
        self.tail.wrapping_sub(self.published)
    }

    /// Makes everything written so far visible, and wakes an engine that
    /// sleeps for it.
    #[inline(always)]
    pub fn publish(&mut self) {
        if self.writes > 0 {
            self.unstage();
            // Whoever has just published a batch will do so again.
            self.staging = self.writes >= STAGING_WRITES;
            self.writes = 0;
        }
        // SYNC(channel.tail): Release; pairs with the Acquire load in
        // `ByteConsumer::look`: the bytes are there before they are read.
        self.ring.lines.tail.store(self.tail, Ordering::Release);
        self.published = self.tail;
        self.wake.publish(&self.ring.lines.reader_sleeps, &self.host);
    }

    /// Publishes, and waits until there is room for `bytes`.
    ///
    /// # Errors
    /// [`WriteError::Deadline`], [`WriteError::TooLarge`], [`WriteError::Wild`].
    pub fn wait_room(&mut self, bytes: usize, deadline_ns: u64) -> Result<(), WriteError> {
        match self.make_room(bytes) {
            Err(WriteError::Full) => {}
            other => return other,
        }
        self.publish();
        for _ in 0..self.spins {
            match self.find_room(bytes) {
                Err(WriteError::Full) => spin_hint(),
                other => return other,
            }
        }
        loop {
            let now_ns = self.host.now_ns();
            if now_ns >= deadline_ns {
                return Err(WriteError::Deadline);
            }
            let lines = self.ring.lines;
            let (host, mode) = (self.host.clone(), self.mode);
            let mut found = Err(WriteError::Full);
            sleep(&lines.writer_sleeps, mode, &host, deadline_ns - now_ns, || {
                found = self.find_room(bytes);
                found != Err(WriteError::Full)
            });
            match self.find_room(bytes) {
                Err(WriteError::Full) => {}
                other => return other,
            }
        }
    }
}
