//! The rings that the channel's is measured against.

use std::path::Path;
use std::process::Child;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};
use ucm_core::sync::{AtomicU64, Ordering};
use ucm_posix::monotonic_ns;

use crate::cli::Failure;

/// Bytes a rival's ring has, as ours.
const CAPACITY_BYTES: usize = 1 << 20;

/// How all of them wait: a spin, now and then the processor given away, and an
/// end to it.
pub(crate) struct Pace {
    spins: u32,
    deadline: Instant,
}

impl Pace {
    pub(crate) fn new(patience: Duration) -> Self {
        Self { spins: 0, deadline: Instant::now() + patience }
    }

    /// Nothing there, or no room.
    #[inline]
    pub(crate) fn wait(&mut self) -> Result<(), Failure> {
        self.spins += 1;
        if self.spins < 2000 {
            std::hint::spin_loop();
            return Ok(());
        }
        self.give_way()
    }

    #[cold]
    pub(crate) fn give_way(&mut self) -> Result<(), Failure> {
        self.spins = 0;
        std::thread::yield_now();
        if Instant::now() >= self.deadline {
            return Err(Failure::Broken("the other side of a ring hangs".to_owned()));
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn went_on(&mut self) {
        self.spins = 0;
    }
}

/// Writes a message's number where [`check`] looks for it.
#[inline(always)]
pub(crate) fn number(message: &mut [u8], number: u64) {
    message[..8].copy_from_slice(&number.to_le_bytes());
}

/// Whether this is message `number`. All of it must have been copied out, by
/// all contenders alike: the compiler is told that it is looked at.
#[inline(always)]
pub(crate) fn check(message: &[u8], number: u64) -> Result<(), Failure> {
    let message = std::hint::black_box(message);
    if message[..8] == number.to_le_bytes() {
        Ok(())
    } else {
        Err(Failure::Wrong(format!("message {number} is another one")))
    }
}

/// A file mapped by both processes; its first 64 bytes hold the word that says
/// that the reader is there.
struct Shared {
    map: MmapRaw,
}

/// Where the ring begins.
const RING_OFFSET: usize = 128;

impl Shared {
    fn create(path: &Path, bytes: usize) -> Result<Self, Failure> {
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)?;
        file.set_len(bytes as u64)?;
        Ok(Self { map: MmapOptions::new().len(bytes).map_raw(&file)? })
    }

    fn open(path: &Path) -> Result<Self, Failure> {
        let file = std::fs::File::options().read(true).write(true).open(path)?;
        Ok(Self { map: MmapOptions::new().map_raw(&file)? })
    }

    fn place(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.map.len(), "inside the mapping");
        // SAFETY: inside the mapping, by the line above.
        let place = unsafe { self.map.as_mut_ptr().add(offset) };
        NonNull::new(place).unwrap_or(NonNull::dangling())
    }

    /// A word of the mapping.
    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: inside the mapping, aligned (a page begins there and offsets
        // are multiples of 8), and used by both sides as an atomic.
        unsafe { self.place(offset).cast::<AtomicU64>().as_ref() }
    }

    /// The writer waits for the reader.
    fn await_go(&self) -> Result<(), Failure> {
        let mut pace = Pace::new(Duration::from_secs(60));
        // SYNC(bench.go): Acquire; pairs with the Release store in `go`.
        while self.word(0).load(Ordering::Acquire) == 0 {
            pace.wait()?;
        }
        Ok(())
    }

    /// The writer says that it is there, the reader lets it go.
    fn go(&self) -> Result<u64, Failure> {
        let mut pace = Pace::new(Duration::from_secs(60));
        while self.word(8).load(Ordering::Acquire) == 0 {
            pace.wait()?;
        }
        let began_ns = monotonic_ns();
        // SYNC(bench.go): Release; pairs with the Acquire load in `await_go`.
        self.word(0).store(1, Ordering::Release);
        Ok(began_ns)
    }

    fn here(&self) -> Result<(), Failure> {
        self.word(8).store(1, Ordering::Release);
        self.await_go()
    }
}

/// The ring as its source has it: head and tail side by side on one line,
/// both read for every message, every message published.
pub(crate) struct OneLine {
    shared: Shared,
}

impl OneLine {
    const HEAD: usize = RING_OFFSET;
    const TAIL: usize = RING_OFFSET + 8;
    const BYTES: usize = RING_OFFSET + 16;

    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        Ok(Self { shared: Shared::create(path, Self::BYTES + CAPACITY_BYTES)? })
    }

    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        Ok(Self { shared: Shared::open(path)? })
    }

    fn bytes(&self, position: u64) -> (NonNull<u8>, usize) {
        let at = position as usize % CAPACITY_BYTES;
        (self.shared.place(Self::BYTES + at), CAPACITY_BYTES - at)
    }

    pub(crate) fn send(&self, size: usize, count: u64) -> Result<(), Failure> {
        match size {
            8 => self.send_messages::<8>(count),
            64 => self.send_messages::<64>(count),
            _ => self.send_messages::<4096>(count),
        }
    }

    fn send_messages<const N: usize>(&self, count: u64) -> Result<(), Failure> {
        let (head, tail) = (self.shared.word(Self::HEAD), self.shared.word(Self::TAIL));
        let mut message = [0; N];
        let mut pace = Pace::new(Duration::from_secs(120));
        self.shared.here()?;
        for sent in 0..count {
            number(&mut message, sent);
            // SYNC(bench.one_line): Acquire and Release on both indices; pairs
            // with the loads and stores in `receive_messages`.
            let to = tail.load(Ordering::Relaxed);
            while to - head.load(Ordering::Acquire) + N as u64 > CAPACITY_BYTES as u64 {
                pace.wait()?;
            }
            pace.went_on();
            let (place, _) = self.bytes(to);
            // SAFETY: sizes divide the capacity, so no message wraps; these
            // bytes are not between head and tail, so the reader is not there.
            unsafe { std::ptr::copy_nonoverlapping(message.as_ptr(), place.as_ptr(), N) };
            tail.store(to + N as u64, Ordering::Release);
        }
        Ok(())
    }

    /// Reads `count` messages, or as many bytes as a stream.
    pub(crate) fn receive(&self, size: usize, stream: bool, count: u64) -> Result<u64, Failure> {
        match size {
            _ if stream => self.receive_stream(count * size as u64),
            8 => self.receive_messages::<8>(count),
            64 => self.receive_messages::<64>(count),
            _ => self.receive_messages::<4096>(count),
        }
    }

    fn receive_messages<const N: usize>(&self, count: u64) -> Result<u64, Failure> {
        let (head, tail) = (self.shared.word(Self::HEAD), self.shared.word(Self::TAIL));
        let mut message = [0; N];
        let mut pace = Pace::new(Duration::from_secs(120));
        let began_ns = self.shared.go()?;
        for read in 0..count {
            // SYNC(bench.one_line): pairs with `send_messages`.
            let from = head.load(Ordering::Relaxed);
            while tail.load(Ordering::Acquire) - from < N as u64 {
                pace.wait()?;
            }
            pace.went_on();
            let (place, _) = self.bytes(from);
            // SAFETY: between head and tail, so written, and not written again
            // before the head has passed.
            unsafe { std::ptr::copy_nonoverlapping(place.as_ptr(), message.as_mut_ptr(), N) };
            head.store(from + N as u64, Ordering::Release);
            check(&message, read)?;
        }
        Ok(monotonic_ns() - began_ns)
    }

    fn receive_stream(&self, bytes: u64) -> Result<u64, Failure> {
        let (head, tail) = (self.shared.word(Self::HEAD), self.shared.word(Self::TAIL));
        let mut buffer = vec![0_u8; 16 << 10];
        let mut pace = Pace::new(Duration::from_secs(120));
        let began_ns = self.shared.go()?;
        let mut left = bytes;
        while left > 0 {
            let from = head.load(Ordering::Relaxed);
            let there = tail.load(Ordering::Acquire) - from;
            if there == 0 {
                pace.wait()?;
                continue;
            }
            pace.went_on();
            let (place, to_end) = self.bytes(from);
            let take = buffer.len().min(there as usize).min(to_end);
            // SAFETY: as in `receive_messages`, and not beyond the ring's end.
            unsafe { std::ptr::copy_nonoverlapping(place.as_ptr(), buffer.as_mut_ptr(), take) };
            head.store(from + take as u64, Ordering::Release);
            left -= take as u64;
        }
        Ok(monotonic_ns() - began_ns)
    }
}

#[cfg(feature = "rivals")]
mod others {
    use super::*;
    use heapless::spsc::Queue;

    pub(crate) fn has_others() -> bool {
        true
    }

    /// Messages that a rival's ring of as many bytes holds.
    const fn slots(size: usize) -> usize {
        CAPACITY_BYTES / size
    }

    pub(crate) fn rtrb(size: usize, batch: usize, count: u64) -> Result<u64, Failure> {
        match size {
            8 => rtrb_messages::<8>(batch, count),
            64 => rtrb_messages::<64>(batch, count),
            _ => rtrb_messages::<4096>(batch, count),
        }
    }

    fn rtrb_messages<const N: usize>(batch: usize, count: u64) -> Result<u64, Failure> {
        let (mut producer, mut consumer) = rtrb::RingBuffer::<[u8; N]>::new(slots(N));
        let go = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| -> Result<(), Failure> {
                let mut pace = Pace::new(Duration::from_secs(120));
                // SYNC(bench.go): as between processes.
                while go.load(Ordering::Acquire) == 0 {
                    pace.wait()?;
                }
                let mut message = [0; N];
                let mut sent = 0;
                while sent < count {
                    if batch == 1 {
                        number(&mut message, sent);
                        while producer.push(message).is_err() {
                            pace.wait()?;
                        }
                        sent += 1;
                    } else if let Ok(chunk) = producer.write_chunk_uninit(batch) {
                        chunk.fill_from_iter((sent..).map(|n| {
                            number(&mut message, n);
                            message
                        }));
                        sent += batch as u64;
                    } else {
                        pace.wait()?;
                        continue;
                    }
                    pace.went_on();
                }
                Ok(())
            });
            let mut pace = Pace::new(Duration::from_secs(120));
            let began_ns = monotonic_ns();
            go.store(1, Ordering::Release);
            let mut read = 0;
            while read < count {
                if batch == 1 {
                    match consumer.pop() {
                        Ok(message) => check(&message, read)?,
                        Err(_) => {
                            pace.wait()?;
                            continue;
                        }
                    }
                    read += 1;
                } else if let Ok(chunk) = consumer.read_chunk(batch) {
                    for message in chunk {
                        check(&message, read)?;
                        read += 1;
                    }
                } else {
                    pace.wait()?;
                    continue;
                }
                pace.went_on();
            }
            let elapsed_ns = monotonic_ns() - began_ns;
            sending.join().map_err(|_| Failure::Broken("the sending thread".to_owned()))??;
            Ok(elapsed_ns)
        })
    }

    pub(crate) fn heapless_receive(
        path: &Path,
        size: usize,
        count: u64,
        spawn: impl Fn() -> std::io::Result<Child>,
    ) -> Result<(u64, Child), Failure> {
        match size {
            8 => heapless_reader::<8, { slots(8) }>(path, count, spawn),
            64 => heapless_reader::<64, { slots(64) }>(path, count, spawn),
            _ => heapless_reader::<4096, { slots(4096) }>(path, count, spawn),
        }
    }

    pub(crate) fn heapless_send(path: &Path, size: usize, count: u64) -> Result<(), Failure> {
        match size {
            8 => heapless_writer::<8, { slots(8) }>(path, count),
            64 => heapless_writer::<64, { slots(64) }>(path, count),
            _ => heapless_writer::<4096, { slots(4096) }>(path, count),
        }
    }

    fn heapless_reader<const N: usize, const SLOTS: usize>(
        path: &Path,
        count: u64,
        spawn: impl Fn() -> std::io::Result<Child>,
    ) -> Result<(u64, Child), Failure> {
        let bytes = RING_OFFSET + size_of::<Queue<[u8; N], SLOTS>>();
        let shared = Shared::create(path, bytes)?;
        let mut place = shared.place(RING_OFFSET).cast::<Queue<[u8; N], SLOTS>>();
        // SAFETY: the mapping has room for it and its start is aligned to 128.
        // A new file is all zeroes, which is an empty queue: two indices, and
        // places that may hold anything. This process uses the reading half only.
        let queue = unsafe { place.as_mut() };
        let (_, mut consumer) = queue.split();
        let child = spawn()?;
        let mut pace = Pace::new(Duration::from_secs(120));
        let began_ns = shared.go()?;
        for read in 0..count {
            let message = loop {
                match consumer.dequeue() {
                    Some(message) => break message,
                    None => pace.wait()?,
                }
            };
            pace.went_on();
            check(&message, read)?;
        }
        Ok((monotonic_ns() - began_ns, child))
    }

    fn heapless_writer<const N: usize, const SLOTS: usize>(
        path: &Path,
        count: u64,
    ) -> Result<(), Failure> {
        let shared = Shared::open(path)?;
        let mut place = shared.place(RING_OFFSET).cast::<Queue<[u8; N], SLOTS>>();
        // SAFETY: made by the reader before it started this process, which
        // uses the writing half only.
        let queue = unsafe { place.as_mut() };
        let (mut producer, _) = queue.split();
        let mut message = [0; N];
        let mut pace = Pace::new(Duration::from_secs(120));
        shared.here()?;
        for sent in 0..count {
            number(&mut message, sent);
            while producer.enqueue(message).is_err() {
                pace.wait()?;
            }
            pace.went_on();
        }
        Ok(())
    }
}

#[cfg(not(feature = "rivals"))]
mod others {
    use super::*;

    fn absent<T>() -> Result<T, Failure> {
        Err(Failure::Broken("built without the other rings (feature `rivals`)".to_owned()))
    }

    pub(crate) fn has_others() -> bool {
        false
    }

    pub(crate) fn rtrb(_: usize, _: usize, _: u64) -> Result<u64, Failure> {
        absent()
    }

    pub(crate) fn heapless_receive(
        _: &Path,
        _: usize,
        _: u64,
        _: impl Fn() -> std::io::Result<Child>,
    ) -> Result<(u64, Child), Failure> {
        absent()
    }

    pub(crate) fn heapless_send(_: &Path, _: usize, _: u64) -> Result<(), Failure> {
        absent()
    }
}
pub(crate) use others::{has_others, heapless_receive, heapless_send, rtrb};
