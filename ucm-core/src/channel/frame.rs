//! Frames: what the ring's bytes and the input's messages consist of.
//!
//! ```text
//! payload_bytes u32 | kind u16 | version u8 | flags u8 | tag u64 | payload
//! ```
//!
//! A frame is published whole, so whoever sees its header sees all of it. What
//! is longer than [`MAX_PAYLOAD_BYTES`] is sent as several frames of one tag,
//! all but the last marked [`FLAG_MORE`].

use core::fmt;

use bytemuck::{Pod, Zeroable};

use crate::channel::consumer::ByteConsumer;
use crate::channel::producer::{ByteProducer, WriteError};
use crate::channel::ring::WildIndex;
use crate::channel::sleep::Bell;

/// Grows with every change of a frame or of a record in one.
pub const FRAME_VERSION: u8 = 1;
/// Another frame of the same message follows.
pub const FLAG_MORE: u8 = 1;
/// What a header takes.
pub const HEADER_BYTES: usize = 16;
/// The longest payload of one frame: four of them fit into the ring.
pub const MAX_PAYLOAD_BYTES: usize = (1 << 18) - HEADER_BYTES;

/// What a frame carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Kind {
    /// Token records.
    Tokens = 1,
    /// A load, a dump, a lookup that is asked for.
    Submit = 2,
    /// What came of one.
    Complete = 3,
    /// A command that is not worth a format of its own, as JSON.
    Command = 4,
    /// The answer to one, as JSON.
    Reply = 5,
    /// What weights are loaded with, as JSON.
    Setup = 6,
}

impl Kind {
    const fn from_code(code: u16) -> Option<Self> {
        match code {
            1 => Some(Self::Tokens),
            2 => Some(Self::Submit),
            3 => Some(Self::Complete),
            4 => Some(Self::Command),
            5 => Some(Self::Reply),
            6 => Some(Self::Setup),
            _ => None,
        }
    }
}

/// A header, as it lies in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct FrameHeader {
    /// What follows it.
    pub payload_bytes: u32,
    /// A [`Kind`].
    pub kind: u16,
    /// [`FRAME_VERSION`].
    pub version: u8,
    /// [`FLAG_MORE`] or nothing.
    pub flags: u8,
    /// Which request it belongs to.
    pub tag: u64,
}

static_assertions::const_assert_eq!(size_of::<FrameHeader>(), HEADER_BYTES);

/// A frame that was read; its payload is in the reader's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame {
    /// What it carries.
    pub kind: Kind,
    /// Which request it belongs to.
    pub tag: u64,
    /// Whether another frame of the same message follows.
    pub more: bool,
    /// How much of the buffer is its payload.
    pub payload_bytes: usize,
    /// Whether a worker wrote it that has died since.
    pub stale: bool,
}

/// Why a frame was not read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FrameError {
    /// The ring itself is wrong.
    Wild(WildIndex),
    /// Another version.
    Version(u8),
    /// No kind of this version.
    Kind(u16),
    /// Flags that this version does not know.
    Flags(u8),
    /// A length that no frame has, or that is not what is there.
    Length {
        /// What the header says.
        payload_bytes: u32,
        /// What there is room for, or what there is.
        limit_bytes: usize,
    },
    /// A message that ends before its header does.
    Short {
        /// How long it is.
        length_bytes: usize,
    },
    /// A dead worker's stream ended in the middle of a frame; the piece was
    /// passed over, and reading may go on.
    CutOff {
        /// How long the piece was.
        bytes: u32,
    },
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wild(error) => error.fmt(f),
            Self::Version(found) => {
                write!(f, "a frame of version {found}, this build has {FRAME_VERSION}")
            }
            Self::Kind(found) => write!(f, "a frame of kind {found}, which there is not"),
            Self::Flags(found) => write!(f, "a frame with flags {found:#x}, which there are not"),
            Self::Length { payload_bytes, limit_bytes } => {
                write!(f, "a frame of {payload_bytes} bytes where {limit_bytes} are possible")
            }
            Self::Short { length_bytes } => {
                write!(f, "a message of {length_bytes} bytes, shorter than a frame's header")
            }
            Self::CutOff { bytes } => {
                write!(f, "{bytes} bytes of a frame that a dead worker did not finish")
            }
        }
    }
}
impl core::error::Error for FrameError {}

impl From<WildIndex> for FrameError {
    fn from(error: WildIndex) -> Self {
        Self::Wild(error)
    }
}

impl FrameHeader {
    /// A header for a payload that is no longer than a frame's may be.
    #[inline]
    pub fn new(kind: Kind, tag: u64, payload_bytes: usize, more: bool) -> Self {
        Self {
            payload_bytes: payload_bytes as u32,
            kind: kind as u16,
            version: FRAME_VERSION,
            flags: if more { FLAG_MORE } else { 0 },
            tag,
        }
    }

    /// What the header says, if it can be one's of this version.
    ///
    /// # Errors
    /// See [`FrameError`].
    #[inline]
    pub fn check(&self) -> Result<Frame, FrameError> {
        if self.version != FRAME_VERSION {
            return Err(FrameError::Version(self.version));
        }
        let Some(kind) = Kind::from_code(self.kind) else {
            return Err(FrameError::Kind(self.kind));
        };
        if self.flags & !FLAG_MORE != 0 {
            return Err(FrameError::Flags(self.flags));
        }
        Ok(Frame {
            kind,
            tag: self.tag,
            more: self.flags & FLAG_MORE != 0,
            payload_bytes: self.payload_bytes as usize,
            stale: false,
        })
    }

    /// The frame that a whole message (the input's) consists of.
    ///
    /// # Errors
    /// See [`FrameError`].
    pub fn parse(message: &[u8]) -> Result<(Frame, &[u8]), FrameError> {
        let short = FrameError::Short { length_bytes: message.len() };
        let (header, payload) = message.split_at_checked(HEADER_BYTES).ok_or(short)?;
        let header: Self = bytemuck::pod_read_unaligned(header);
        let frame = header.check()?;
        if frame.payload_bytes != payload.len() {
            return Err(FrameError::Length {
                payload_bytes: header.payload_bytes,
                limit_bytes: payload.len(),
            });
        }
        Ok((frame, payload))
    }
}

impl<H: Bell> ByteProducer<'_, H> {
    /// Writes a frame, whole or not at all; visible once it is published.
    ///
    /// # Errors
    /// See [`WriteError`]; a payload beyond [`MAX_PAYLOAD_BYTES`] is too large.
    #[inline]
    pub fn try_write_frame(
        &mut self,
        kind: Kind,
        tag: u64,
        more: bool,
        payload: &[u8],
    ) -> Result<(), WriteError> {
        if payload.len() > MAX_PAYLOAD_BYTES {
            return Err(WriteError::TooLarge);
        }
        let header = FrameHeader::new(kind, tag, payload.len(), more);
        self.try_write_pair(bytemuck::bytes_of(&header), payload)
    }

    /// Writes a frame and publishes it; waits for room until the deadline.
    ///
    /// # Errors
    /// See [`WriteError`].
    pub fn send_frame(
        &mut self,
        kind: Kind,
        tag: u64,
        more: bool,
        payload: &[u8],
        deadline_ns: u64,
    ) -> Result<(), WriteError> {
        match self.try_write_frame(kind, tag, more, payload) {
            Err(WriteError::Full) => {
                self.wait_room(HEADER_BYTES + payload.len(), deadline_ns)?;
                self.try_write_frame(kind, tag, more, payload)?;
            }
            other => other?,
        }
        self.publish();
        Ok(())
    }
}

impl<H: Bell> ByteConsumer<'_, H> {
    /// Takes the next frame, its payload into `buffer`; `None` while there is
    /// none.
    ///
    /// # Errors
    /// See [`FrameError`]. After all of them but [`FrameError::CutOff`] the
    /// stream cannot be trusted any more.
    #[inline]
    pub fn try_read_frame(&mut self, buffer: &mut [u8]) -> Result<Option<Frame>, FrameError> {
        let stale_bytes = if self.has_boundary() { self.stale_bytes() } else { 0 };
        if stale_bytes > 0 && (stale_bytes as usize) < HEADER_BYTES {
            return Err(self.cut_off(stale_bytes));
        }
        let mut header = [0; HEADER_BYTES];
        if !self.try_peek(0, &mut header)? {
            return Ok(None);
        }
        let header: FrameHeader = bytemuck::cast(header);
        let mut frame = header.check()?;
        let limit_bytes = buffer.len().min(MAX_PAYLOAD_BYTES);
        let wrong = FrameError::Length { payload_bytes: header.payload_bytes, limit_bytes };
        if frame.payload_bytes > limit_bytes {
            return Err(wrong);
        }
        let whole = HEADER_BYTES + frame.payload_bytes;
        if stale_bytes > 0 {
            frame.stale = true;
            if (stale_bytes as usize) < whole {
                return Err(self.cut_off(stale_bytes));
            }
        }
        // Published whole, so what is not there will not come.
        if !self.try_peek(HEADER_BYTES as u32, &mut buffer[..frame.payload_bytes])? {
            return Err(wrong);
        }
        self.skip(whole as u32);
        Ok(Some(frame))
    }

    fn cut_off(&mut self, stale_bytes: u32) -> FrameError {
        FrameError::CutOff { bytes: self.skip(stale_bytes) }
    }
}
