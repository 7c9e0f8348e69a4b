//! The channel's layout, to the byte.
//!
//! The first three parts lie where the source has them. The ring begins with a
//! line that never changes, so that its index lines, 128 bytes apart, begin on
//! multiples of 128: processors fetch lines in pairs, and two indices on one
//! pair would still travel together.

use crate::channel::control::ControlBlock;
use crate::describe::{StructLayout, describe, fingerprint};
use crate::ptr::Shared;
use crate::sync::{AtomicU32, AtomicU64};

/// What a channel begins its identity with: "UCMCHAN" and a digit that never changes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"UCMCHAN1");
/// Grows with every change of the layout, of a message or of what a field means.
pub const CHANNEL_VERSION: u32 = 1;

/// Where the status is.
pub const STATE_HEADER_OFFSET: u64 = 0;
/// Where the control block is.
pub const CONTROL_BLOCK_OFFSET: u64 = 0x40;
/// Where the input buffer is.
pub const INPUT_BUFFER_OFFSET: u64 = 0x440;
/// Where the output ring is.
pub const OUTPUT_RING_OFFSET: u64 = 0x10_0440;
/// The input buffer, its length prefix included.
pub const INPUT_BUFFER_BYTES: usize = 1 << 20;
/// The longest message the input buffer holds; longer ones come in pieces.
pub const MAX_INPUT_BYTES: usize = INPUT_BUFFER_BYTES - 4;
/// What the ring holds.
pub const RING_CAPACITY_BYTES: u32 = 1 << 20;
/// The whole channel.
pub const CHANNEL_BYTES: u64 = 0x20_0680;

/// The first line. The worker writes `heartbeat`, `attached`, `worker_mode`
/// and `error_code`; the engine writes the identity, `epoch` and
/// `engine_mode`; both move `status` and use `sleepers`.
#[repr(C, align(64))]
pub struct StateHeader {
    pub(crate) status: AtomicU32,
    pub(crate) epoch: AtomicU32,
    pub(crate) heartbeat: AtomicU64,
    pub(crate) magic: AtomicU64,
    pub(crate) version: AtomicU32,
    pub(crate) ring_capacity_bytes: AtomicU32,
    pub(crate) fingerprint: AtomicU64,
    pub(crate) attached: AtomicU32,
    pub(crate) engine_mode: AtomicU32,
    pub(crate) worker_mode: AtomicU32,
    pub(crate) sleepers: AtomicU32,
    pub(crate) error_code: AtomicU32,
    pub(crate) reserved: AtomicU32,
}

// SAFETY: atomics only.
unsafe impl Shared for StateHeader {}

describe!(StateHeader, size 64, align 64, {
    0: status: AtomicU32,
    4: epoch: AtomicU32,
    8: heartbeat: AtomicU64,
    16: magic: AtomicU64,
    24: version: AtomicU32,
    28: ring_capacity_bytes: AtomicU32,
    32: fingerprint: AtomicU64,
    40: attached: AtomicU32,
    44: engine_mode: AtomicU32,
    48: worker_mode: AtomicU32,
    52: sleepers: AtomicU32,
    56: error_code: AtomicU32,
    60: reserved: AtomicU32,
});

impl StateHeader {
    /// An idle channel's, for models and tests; in shared memory it is made in place.
    #[allow(clippy::new_without_default, reason = "a header is not a value to be had anywhere")]
    pub fn new() -> Self {
        let n = || AtomicU32::new(0);
        Self {
            status: n(),
            epoch: AtomicU32::new(1),
            heartbeat: AtomicU64::new(0),
            magic: AtomicU64::new(MAGIC),
            version: AtomicU32::new(CHANNEL_VERSION),
            ring_capacity_bytes: n(),
            fingerprint: AtomicU64::new(LAYOUT_FINGERPRINT),
            attached: n(),
            engine_mode: n(),
            worker_mode: n(),
            sleepers: n(),
            error_code: n(),
            reserved: n(),
        }
    }
}

/// The ring's words. Each line after the first is written by one side and read
/// by the other, but for the two sleep words, which the sleeper sets and the
/// waker clears.
#[repr(C, align(64))]
pub struct RingLines {
    pub(crate) capacity_bytes: AtomicU32,
    pub(crate) capacity_padding: [u32; 15],
    /// Next byte to read. Written by the engine.
    pub(crate) head: AtomicU32,
    /// Where the stream of the current epoch begins. Written by the engine.
    pub(crate) epoch_start: AtomicU32,
    pub(crate) head_padding: [u32; 30],
    /// Next byte to write. Written by the worker.
    pub(crate) tail: AtomicU32,
    pub(crate) tail_padding: [u32; 31],
    /// Set while the engine sleeps because the ring is empty.
    pub(crate) reader_sleeps: AtomicU32,
    pub(crate) reader_padding: [u32; 31],
    /// Set while the worker sleeps because the ring is full.
    pub(crate) writer_sleeps: AtomicU32,
    pub(crate) writer_padding: [u32; 31],
}

// SAFETY: atomics, and padding that nobody reads.
unsafe impl Shared for RingLines {}

describe!(RingLines, size 576, align 64, {
    0: capacity_bytes: AtomicU32,
    4: capacity_padding: [u32; 15],
    64: head: AtomicU32,
    68: epoch_start: AtomicU32,
    72: head_padding: [u32; 30],
    192: tail: AtomicU32,
    196: tail_padding: [u32; 31],
    320: reader_sleeps: AtomicU32,
    324: reader_padding: [u32; 31],
    448: writer_sleeps: AtomicU32,
    452: writer_padding: [u32; 31],
});

impl RingLines {
    /// An empty ring's of `capacity_bytes` whose positions begin at `position`.
    pub fn new(capacity_bytes: u32, position: u32) -> Self {
        Self {
            capacity_bytes: AtomicU32::new(capacity_bytes),
            capacity_padding: [0; 15],
            head: AtomicU32::new(position),
            epoch_start: AtomicU32::new(position),
            head_padding: [0; 30],
            tail: AtomicU32::new(position),
            tail_padding: [0; 31],
            reader_sleeps: AtomicU32::new(0),
            reader_padding: [0; 31],
            writer_sleeps: AtomicU32::new(0),
            writer_padding: [0; 31],
        }
    }
}

/// The input buffer: how long the message is, then the message.
#[repr(C, align(4))]
pub struct InputBuffer {
    length_bytes: AtomicU32,
    message: [u8; MAX_INPUT_BYTES],
}

describe!(InputBuffer, size 1_048_576, align 4, {
    0: length_bytes: AtomicU32,
    4: message: [u8; MAX_INPUT_BYTES],
});

/// The output ring: its words, then its bytes.
#[repr(C, align(64))]
pub struct OutputRing {
    lines: RingLines,
    bytes: [u8; RING_CAPACITY_BYTES as usize],
}

describe!(OutputRing, size 1_049_152, align 64, {
    0: lines: RingLines,
    576: bytes: [u8; RING_CAPACITY_BYTES as usize],
});

/// The whole channel. Never a value: it says where things are.
#[repr(C, align(64))]
pub struct Channel {
    header: StateHeader,
    control: ControlBlock,
    input: InputBuffer,
    output: OutputRing,
}

describe!(Channel, size 2_098_816, align 64, {
    0x0: header: StateHeader,
    0x40: control: ControlBlock,
    0x440: input: InputBuffer,
    0x10_0440: output: OutputRing,
});

#[cfg(not(ucm_loom))]
const _: () = {
    use core::mem::size_of;
    assert!(size_of::<StateHeader>() == 64);
    assert!(size_of::<ControlBlock>() == 1024);
    assert!(OUTPUT_RING_OFFSET - INPUT_BUFFER_OFFSET == INPUT_BUFFER_BYTES as u64);
    assert!(size_of::<Channel>() as u64 == CHANNEL_BYTES);
    // The index lines begin on pairs of cache lines (a mapping on a page).
    assert!((OUTPUT_RING_OFFSET + 64).is_multiple_of(128));
};

/// Every shared structure of the channel.
pub const LAYOUTS: [StructLayout; 6] = [
    Channel::LAYOUT,
    StateHeader::LAYOUT,
    ControlBlock::LAYOUT,
    InputBuffer::LAYOUT,
    OutputRing::LAYOUT,
    RingLines::LAYOUT,
];

/// The fingerprint of every shared structure of the channel.
pub const LAYOUT_FINGERPRINT: u64 = fingerprint(&LAYOUTS);
