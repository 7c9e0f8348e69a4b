//! A channel in shared memory: made once, and checked by whoever attaches.

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::channel::bytes::ByteArea;
use crate::channel::control::ControlBlock;
use crate::channel::layout::{
    CHANNEL_BYTES, CHANNEL_VERSION, CONTROL_BLOCK_OFFSET, INPUT_BUFFER_BYTES, INPUT_BUFFER_OFFSET,
    LAYOUT_FINGERPRINT, MAGIC, MAX_INPUT_BYTES, OUTPUT_RING_OFFSET, RING_CAPACITY_BYTES, RingLines,
    STATE_HEADER_OFFSET, StateHeader,
};
use crate::channel::ring::{ByteRing, Parts};
use crate::channel::status::IllegalStatus;
use crate::channel::status::Status;
use crate::ptr::{OutOfRegion, Region};
use crate::sync::{AtomicU32, Ordering, wide_atomics_are_lock_free};

/// Where a fresh ring's positions begin: so close to the end of their 32 bits
/// that every channel passes it while it is young.
pub const FIRST_POSITION: u32 = 0_u32.wrapping_sub(1 << 16);

/// Where the ring's bytes begin, behind its lines.
const RING_BYTES_OFFSET: u64 = OUTPUT_RING_OFFSET + size_of::<RingLines>() as u64;

/// Why memory is not a channel that this build can use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ChannelError {
    /// Too short.
    Length {
        /// What it has.
        found_bytes: u64,
        /// What a channel has.
        needed_bytes: u64,
    },
    /// It does not begin like one.
    NotAChannel {
        /// What is there instead of the magic number.
        found: u64,
    },
    /// Made by another version.
    Version {
        /// Its version.
        found: u32,
        /// Ours.
        ours: u32,
    },
    /// Made by a build whose structures lie otherwise.
    Layout {
        /// Its fingerprint.
        found: u64,
        /// Ours.
        ours: u64,
    },
    /// Its ring has another size.
    Capacity {
        /// Its size.
        found_bytes: u32,
        /// Ours.
        ours_bytes: u32,
    },
    /// Its status is none.
    Status(IllegalStatus),
    /// This target has no 64-bit atomics that work between processes.
    AtomicsNotLockFree,
}

impl fmt::Display for ChannelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { found_bytes, needed_bytes } => {
                write!(f, "{found_bytes} bytes long; a channel has {needed_bytes}")
            }
            Self::NotAChannel { found } => {
                write!(f, "not a UCM channel (it begins with {found:#018x})")
            }
            Self::Version { found, ours } => write!(
                f,
                "the channel was made by version {found}, this build has {ours}; use one build \
                 for engine and workers"
            ),
            Self::Layout { found, ours } => write!(
                f,
                "the channel's layout is {found:#018x}, this build's {ours:#018x}; use one build \
                 for engine and workers"
            ),
            Self::Capacity { found_bytes, ours_bytes } => {
                write!(f, "its ring has {found_bytes} bytes, this build's {ours_bytes}")
            }
            Self::Status(error) => error.fmt(f),
            Self::AtomicsNotLockFree => f.write_str("this target has no lock-free 64-bit atomics"),
        }
    }
}
impl core::error::Error for ChannelError {}

/// The memory of one channel.
#[derive(Clone, Copy)]
pub struct ChannelMemory<'m> {
    base: NonNull<u8>,
    _memory: PhantomData<&'m [u8]>,
}

impl<'m> ChannelMemory<'m> {
    /// Describes the memory of a channel.
    ///
    /// # Safety
    /// `base` must be valid for reads and writes of `len_bytes` for all of
    /// `'m`, and reached by nobody but through channels' ends.
    ///
    /// # Errors
    /// [`ChannelError::Length`] when it is too short.
    ///
    /// # Panics
    /// When `base` is not aligned to 128 bytes: a mapping always is.
    pub unsafe fn new(base: NonNull<u8>, len_bytes: u64) -> Result<Self, ChannelError> {
        assert!((base.as_ptr() as usize).is_multiple_of(128), "index lines begin on line pairs");
        if len_bytes < CHANNEL_BYTES {
            return Err(ChannelError::Length {
                found_bytes: len_bytes,
                needed_bytes: CHANNEL_BYTES,
            });
        }
        if !wide_atomics_are_lock_free() {
            return Err(ChannelError::AtomicsNotLockFree);
        }
        Ok(Self { base, _memory: PhantomData })
    }

    /// The words of a part, as a region that ends where the part does.
    fn region(&self, offset_bytes: u64, len_bytes: usize) -> Region<'m> {
        // SAFETY: offsets and lengths are constants whose sum is at most
        // CHANNEL_BYTES, which the memory has.
        let base = unsafe { self.base.add(offset_bytes as usize) };
        // SAFETY: inside the memory (above), and a part that only atomics reach.
        unsafe { Region::new(base, len_bytes) }
    }

    fn try_parts(&self) -> Result<Parts<'m>, OutOfRegion> {
        let header = self.region(STATE_HEADER_OFFSET, size_of::<StateHeader>()).at(0)?;
        let control = self.region(CONTROL_BLOCK_OFFSET, size_of::<ControlBlock>()).at(0)?;
        let input_length_bytes: &AtomicU32 = self.region(INPUT_BUFFER_OFFSET, 4).at(0)?;
        let lines = self.region(OUTPUT_RING_OFFSET, size_of::<RingLines>()).at(0)?;
        // SAFETY: as in `region`.
        let input = unsafe { self.base.add(INPUT_BUFFER_OFFSET as usize) };
        // SAFETY: the input buffer; its first four bytes are the length, which
        // no copy touches (messages begin behind it and do not wrap).
        let input = unsafe { ByteArea::new(input, INPUT_BUFFER_BYTES as u32) };
        // SAFETY: as in `region`.
        let bytes = unsafe { self.base.add(RING_BYTES_OFFSET as usize) };
        // SAFETY: the ring's bytes, up to the channel's end.
        let bytes = unsafe { ByteArea::new(bytes, RING_CAPACITY_BYTES) };
        let output = ByteRing::new(lines, bytes);
        let max_input_bytes = MAX_INPUT_BYTES as u32;
        Ok(Parts { header, control, input_length_bytes, input, max_input_bytes, output })
    }

    fn parts(&self) -> Parts<'m> {
        match self.try_parts() {
            Ok(parts) => parts,
            Err(_) => unreachable!("constant offsets inside a length that was checked"),
        }
    }

    /// Makes a channel of zeroed memory that nobody else knows yet.
    pub fn initialise(&self) -> Parts<'m> {
        let parts = self.parts();
        let header = parts.header;
        let lines = parts.output.lines;
        lines.capacity_bytes.store(RING_CAPACITY_BYTES, Ordering::Relaxed);
        for position in [&lines.head, &lines.epoch_start, &lines.tail] {
            position.store(FIRST_POSITION, Ordering::Relaxed);
        }
        header.ring_capacity_bytes.store(RING_CAPACITY_BYTES, Ordering::Relaxed);
        header.version.store(CHANNEL_VERSION, Ordering::Relaxed);
        header.fingerprint.store(LAYOUT_FINGERPRINT, Ordering::Relaxed);
        header.epoch.store(1, Ordering::Relaxed);
        parts.control.store(&crate::channel::control::Parameters::default());
        // SYNC(channel.magic): Release; pairs with the Acquire load in `attach`.
        header.magic.store(MAGIC, Ordering::Release);
        parts
    }

    /// Checks that this is a channel of this build's kind.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn attach(&self) -> Result<Parts<'m>, ChannelError> {
        let parts = self.parts();
        let header = parts.header;
        // SYNC(channel.magic): Acquire; pairs with the Release store in `initialise`.
        let found = header.magic.load(Ordering::Acquire);
        if found != MAGIC {
            return Err(ChannelError::NotAChannel { found });
        }
        let found = header.version.load(Ordering::Relaxed);
        if found != CHANNEL_VERSION {
            return Err(ChannelError::Version { found, ours: CHANNEL_VERSION });
        }
        let found = header.fingerprint.load(Ordering::Relaxed);
        if found != LAYOUT_FINGERPRINT {
            return Err(ChannelError::Layout { found, ours: LAYOUT_FINGERPRINT });
        }
        let capacities = [&header.ring_capacity_bytes, &parts.output.lines.capacity_bytes];
        for found_bytes in capacities.map(|word| word.load(Ordering::Relaxed)) {
            if found_bytes != RING_CAPACITY_BYTES {
                let ours_bytes = RING_CAPACITY_BYTES;
                return Err(ChannelError::Capacity { found_bytes, ours_bytes });
            }
        }
        Status::from_code(header.status.load(Ordering::Acquire)).map_err(ChannelError::Status)?;
        Ok(parts)
    }
}
