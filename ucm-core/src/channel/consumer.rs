//! The ring's reading end: it alone moves the head, and remembers the tail.
//!
//! The head is published now and then and not with every message: when an
//! eighth of the ring has been read, when the ring is found empty, and when
//! [`ByteConsumer::release`] is called. So the line that the producer looks at
//! when it believes the ring to be full hardly ever travels.

use crate::channel::producer::{STAGE_BYTES, STAGED_BYTES};
use crate::channel::ring::{ByteRing, WildIndex};
use crate::channel::sleep::{Bell, Mode, Wake, sleep};
use crate::sync::{Ordering, spin_hint};

/// How much must be there for a piece of it to be read ahead, in one long copy
/// whose line transfers overlap.
const READ_AHEAD_BYTES: usize = 256;

/// The most pauses before the first look of a spin: a few microseconds.
const MAX_PAUSES: u32 = 128;
/// What must have gathered between two looks, two messages aside, for them to
/// become fewer.
const GATHERED_BYTES: usize = 32;

/// The one consumer of a byte ring.
pub struct ByteConsumer<'m, H> {
    ring: ByteRing<'m>,
    host: H,
    mode: Mode,
    wake: Wake,
    spins: u32,
    /// Ours; ahead of the shared head by what is not released yet.
    head: u32,
    released: u32,
    /// The tail as last seen: there may be more than it says.
    seen_tail: u32,
    /// Where the current epoch's stream begins, while the one before it is
    /// still being read.
    boundary: Option<u32>,
    /// `staged` bytes from position `stage_start` on, read ahead.
    stage: [u8; STAGE_BYTES],
    stage_start: u32,
    staged: usize,
    /// Pauses before the first look of a spin.
    pauses: u32,
}

impl<'m, H: Bell> ByteConsumer<'m, H> {
    /// The consumer of `ring`. `peer` is what the producer declared; 0 while
    /// there is none.
    ///
    /// # Safety
    /// There is no other consumer of this ring while this one lives, in
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
        let head = ring.lines.head.load(Ordering::Acquire);
        let wake = Wake::between(mode, peer);
        let mut consumer = Self {
            ring,
            host,
            mode,
            wake,
            spins,
            head,
            released: head,
            seen_tail: head,
            boundary: None,
            stage: [0; STAGE_BYTES],
            stage_start: head,
            staged: 0,
            pauses: 1,
        };
        consumer.look()?;
        Ok(consumer)
    }

    /// What the producer has declared; a new one may be another kind.
    pub(crate) fn set_peer(&mut self, peer: u32) {
        self.wake = Wake::between(self.mode, peer);
    }

    /// Reads the shared tail.
    #[inline]
    fn look(&mut self) -> Result<(), WildIndex> {
        // SYNC(channel.tail): Acquire; pairs with the Release store in
        // `ByteProducer::publish`: the bytes are there before they are read.
        let found = self.ring.lines.tail.load(Ordering::Acquire);
        let filled = found.wrapping_sub(self.head);
        // No more than the ring has, counted from what we gave back; and never
        // back behind what was there.
        let plausible = self.ring.filled(self.released, found).is_some()
            && filled >= self.seen_tail.wrapping_sub(self.head)
            && filled <= self.ring.capacity_bytes();
        if !plausible {
            let capacity_bytes = self.ring.capacity_bytes();
            return Err(WildIndex { found, ours: self.head, capacity_bytes });
        }
        self.seen_tail = found;
        Ok(())
    }

    #[inline(always)]
    fn seen(&self) -> u32 {
        self.seen_tail.wrapping_sub(self.head)
    }

    /// Whether `bytes` are there; if not, what was read is given back.
    #[inline(always)]
    fn have(&mut self, bytes: usize) -> Result<bool, WildIndex> {
        if (self.seen() as usize) < bytes { self.find(bytes) } else { Ok(true) }
    }

    #[inline(never)]
    fn find(&mut self, bytes: usize) -> Result<bool, WildIndex> {
        self.look()?;
        if self.seen() as usize >= bytes {
            return Ok(true);
        }
        if self.released != self.head {
            self.release();
        }
        Ok(false)
    }

    /// Bytes that can be read now.
    ///
    /// # Errors
    /// [`WildIndex`].
    pub fn readable_bytes(&mut self) -> Result<u32, WildIndex> {
        self.look()?;
        Ok(self.seen())
    }

    #[inline(always)]
    fn take(&mut self, out: &mut [u8]) {
        self.peek(0, out);
        self.advance(out.len() as u32);
    }

    #[inline(always)]
    fn peek(&mut self, ahead: u32, out: &mut [u8]) {
        let from = self.head.wrapping_add(ahead);
        if STAGED_BYTES.contains(&out.len()) {
            // What was read ahead begins at `stage_start`.
            let at = from.wrapping_sub(self.stage_start) as usize;
            if let Some(read) = self.stage[..self.staged].get(at..at.wrapping_add(out.len())) {
                return out.copy_from_slice(read);
            }
            if (self.seen() - ahead) as usize >= out.len().max(READ_AHEAD_BYTES) {
                return self.read_ahead(from, ahead, out);
            }
        }
        self.peek_direct(ahead, out);
    }

    /// Copies a long piece of what is there at once, and `out` from that.
    #[inline(never)]
    fn read_ahead(&mut self, from: u32, ahead: u32, out: &mut [u8]) {
        let count = STAGE_BYTES.min((self.seen() - ahead) as usize);
        // SAFETY: as in `peek_direct`: `count` bytes from `from` on are below
        // the tail, and stay as they are until the head has passed them.
        unsafe { self.ring.bytes.copy_out(from, &mut self.stage[..count]) };
        self.stage_start = from;
        self.staged = count;
        out.copy_from_slice(&self.stage[..out.len()]);
    }

    #[inline(always)]
    fn peek_direct(&self, ahead: u32, out: &mut [u8]) {
        // SAFETY: these places are between head and tail (every caller has
        // asked): written, as the Acquire load of the tail has shown, and not
        // written again before the head has passed them.
        unsafe { self.ring.bytes.copy_out(self.head.wrapping_add(ahead), out) };
    }

    #[inline(always)]
    fn advance(&mut self, bytes: u32) {
        self.head = self.head.wrapping_add(bytes);
        if self.head.wrapping_sub(self.released) >= self.ring.capacity_bytes() / 8 {
            self.release();
        }
    }

    /// Reads exactly `out`, or nothing (`false`) while less than that is there.
    ///
    /// # Errors
    /// [`WildIndex`].
    #[inline(always)]
    pub fn try_read(&mut self, out: &mut [u8]) -> Result<bool, WildIndex> {
        let there = self.have(out.len())?;
        if there {
            self.take(out);
        }
        Ok(there)
    }

    /// Reads up to `out`; says how much.
    ///
    /// # Errors
    /// [`WildIndex`].
    #[inline]
    pub fn read_some(&mut self, out: &mut [u8]) -> Result<usize, WildIndex> {
        if self.seen() == 0 && !self.find(1)? {
            return Ok(0);
        }
        let count = out.len().min(self.seen() as usize);
        self.take(&mut out[..count]);
        Ok(count)
    }

    /// Copies exactly `out` from `ahead` bytes further on, without taking it.
    ///
    /// # Errors
    /// [`WildIndex`].
    #[inline]
    pub fn try_peek(&mut self, ahead: u32, out: &mut [u8]) -> Result<bool, WildIndex> {
        let there = self.have((ahead as usize).saturating_add(out.len()))?;
        if there {
            self.peek(ahead, out);
        }
        Ok(there)
    }

    /// Passes over at most `bytes` of what is there; says how many that were.
    pub fn skip(&mut self, bytes: u32) -> u32 {
        let bytes = bytes.min(self.seen());
        self.advance(bytes);
        bytes
    }

    /// Gives what was read back to the producer, and wakes one that sleeps for
    /// room.
    #[inline]
    pub fn release(&mut self) {
        // SYNC(channel.head): Release; pairs with the Acquire load in
        // `ByteProducer::look`: the bytes are out before their place is
        // written again.
        self.ring.lines.head.store(self.head, Ordering::Release);
        self.released = self.head;
        // What was read ahead and is passed is forgotten, long before its
        // positions come round again.
        if self.head.wrapping_sub(self.stage_start) as usize >= self.staged {
            self.staged = 0;
        }
        if self.boundary.is_some() {
            self.stale_bytes();
        }
        self.wake.publish(&self.ring.lines.writer_sleeps, &self.host);
    }

    /// Waits until `bytes` are there; `false` at the deadline.
    ///
    /// # Errors
    /// [`WildIndex`].
    pub fn wait_readable(&mut self, bytes: usize, deadline_ns: u64) -> Result<bool, WildIndex> {
        if self.have(bytes)? {
            return Ok(true);
        }
        if self.spin_readable(bytes)? {
            return Ok(true);
        }
        loop {
            let now_ns = self.host.now_ns();
            if now_ns >= deadline_ns {
                return Ok(false);
            }
            let lines = self.ring.lines;
            let (host, mode) = (self.host.clone(), self.mode);
            sleep(&lines.reader_sleeps, mode, &host, deadline_ns - now_ns, || {
                !matches!(self.have(bytes), Ok(false))
            });
            if self.have(bytes)? {
                return Ok(true);
            }
        }
    }

    /// The spin before the sleep. While several messages have gathered between
    /// two looks, it looks less and less often: each look takes the tail's line
    /// away from a producer that is about to write to it, and what has gathered
    /// is read in one long copy. When there was one message, it looks more
    /// often again, so that an answer is seen as soon as it is there.
    fn spin_readable(&mut self, bytes: usize) -> Result<bool, WildIndex> {
        let mut block = self.pauses;
        let mut left = self.spins;
        while left > 0 {
            for _ in 0..block {
                spin_hint();
            }
            if self.have(bytes)? {
                let several =
                    self.seen() as usize >= bytes.saturating_mul(2).saturating_add(GATHERED_BYTES);
                let pauses = if several { self.pauses * 2 } else { self.pauses / 2 };
                self.pauses = pauses.clamp(1, MAX_PAUSES);
                return Ok(true);
            }
            left = left.saturating_sub(block);
            block = 1;
        }
        self.pauses = 1;
        Ok(false)
    }

    /// What is there now is a dead producer's, up to here; what follows is a
    /// new one's.
    ///
    /// # Errors
    /// [`WildIndex`].
    pub(crate) fn mark_boundary(&mut self) -> Result<(), WildIndex> {
        self.look()?;
        // A boundary that was not reached yet gives way: both sides of it are
        // dead ones' now.
        self.boundary = (self.seen() > 0).then_some(self.seen_tail);
        // For people, and for a reader that comes later.
        self.ring.lines.epoch_start.store(self.seen_tail, Ordering::Release);
        self.ring.lines.writer_sleeps.store(0, Ordering::Relaxed);
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn has_boundary(&self) -> bool {
        self.boundary.is_some()
    }

    /// How many bytes of dead producers are still to be read.
    pub fn stale_bytes(&mut self) -> u32 {
        let left = self.boundary.map_or(0, |at| at.wrapping_sub(self.head));
        if left == 0 || left > self.seen() {
            self.boundary = None;
            return 0;
        }
        left
    }
}
