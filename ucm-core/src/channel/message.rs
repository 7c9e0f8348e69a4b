//! What frames carry, where it has a format of its own: tokens, submissions, completions.
//!
//! Records are plain data of fixed size, in the byte order of the one machine that
//! both sides run on; they are copied out, never pointed into.

use core::fmt;

use bytemuck::{Pod, Zeroable};

use crate::key::BlockId;

/// The stream's last token.
pub const TOKEN_LAST: u32 = 1;
/// The sampler stopped because of the token limit.
pub const TOKEN_LIMIT: u32 = 2;
const TOKEN_FLAGS: u32 = TOKEN_LAST | TOKEN_LIMIT;

/// One token of a stream.
#[derive(Clone, Copy, PartialEq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct TokenRecord {
    /// Its number in the vocabulary.
    pub id: u32,
    /// The logarithm of its probability.
    pub logprob: f32,
    /// [`TOKEN_LAST`], [`TOKEN_LIMIT`].
    pub flags: u32,
    /// Its place in the stream.
    pub index: u32,
}

static_assertions::const_assert_eq!(size_of::<TokenRecord>(), 16);

/// Token records as a payload.
#[inline]
pub fn token_bytes(tokens: &[TokenRecord]) -> &[u8] {
    bytemuck::cast_slice(tokens)
}

/// Why a payload is not what its frame's kind says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum MessageError {
    /// Not of a length that its records could have.
    Length {
        /// Its length.
        found_bytes: usize,
    },
    /// A flag, a kind or an outcome that there is not.
    Code(u32),
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { found_bytes } => write!(f, "a message of {found_bytes} bytes is none"),
            Self::Code(code) => write!(f, "a message with code {code:#x}, which there is not"),
        }
    }
}
impl core::error::Error for MessageError {}

/// The tokens of a payload.
///
/// # Errors
/// [`MessageError`] when it is not made of token records.
pub fn tokens(payload: &[u8]) -> Result<impl Iterator<Item = TokenRecord> + '_, MessageError> {
    let records = payload.chunks_exact(size_of::<TokenRecord>());
    if !records.remainder().is_empty() {
        return Err(MessageError::Length { found_bytes: payload.len() });
    }
    let tokens = records.map(bytemuck::pod_read_unaligned::<TokenRecord>);
    if let Some(token) = tokens.clone().find(|token| token.flags & !TOKEN_FLAGS != 0) {
        return Err(MessageError::Code(token.flags));
    }
    Ok(tokens)
}

/// What a submission asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum SubmissionKind {
    /// Blocks onto the device.
    Load = 1,
    /// Blocks from the device, into cache and backend.
    Dump = 2,
    /// How far a chain of blocks is known.
    Lookup = 3,
    /// Blocks on the device against what they must hold.
    Verify = 4,
    /// Load and verify.
    Serve = 5,
}

/// The head of a submission; `block_count` ids of 16 bytes follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
struct SubmissionHead {
    kind: u32,
    block_count: u32,
    at_shard: u64,
}

/// A load, a dump, a lookup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Submission<'a> {
    /// What.
    pub kind: SubmissionKind,
    /// Where on the device, in shards; the blocks lie one behind the other.
    pub at_shard: u64,
    blocks: &'a [u8],
}

impl<'a> Submission<'a> {
    /// Reads a payload.
    ///
    /// # Errors
    /// See [`MessageError`].
    pub fn decode(payload: &'a [u8]) -> Result<Self, MessageError> {
        let wrong = MessageError::Length { found_bytes: payload.len() };
        let (head, blocks) = payload.split_at_checked(size_of::<SubmissionHead>()).ok_or(wrong)?;
        let head: SubmissionHead = bytemuck::pod_read_unaligned(head);
        if (head.block_count as usize).checked_mul(16) != Some(blocks.len()) {
            return Err(wrong);
        }
        let kind = match head.kind {
            1 => SubmissionKind::Load,
            2 => SubmissionKind::Dump,
            3 => SubmissionKind::Lookup,
            4 => SubmissionKind::Verify,
            5 => SubmissionKind::Serve,
            code => return Err(MessageError::Code(code)),
        };
        Ok(Self { kind, at_shard: head.at_shard, blocks })
    }

    /// The head of a submission of `block_count` blocks, whose ids follow as
    /// [`encode_block`] has them.
    pub fn encode_head(kind: SubmissionKind, block_count: u32, at_shard: u64) -> [u8; 16] {
        bytemuck::cast(SubmissionHead { kind: kind as u32, block_count, at_shard })
    }

    /// Which.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = BlockId> + 'a {
        self.blocks.chunks_exact(16).map(|bytes| {
            let [low, high]: [u64; 2] = bytemuck::pod_read_unaligned(bytes);
            BlockId::from_words(low, high)
        })
    }
}

/// A block's id, as a submission carries it.
pub fn encode_block(block: &BlockId) -> [u8; 16] {
    let (low, high) = block.words();
    bytemuck::cast([low, high])
}

/// What came of a submission. Text may follow: reasons, one a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Completion {
    /// When it began (`CLOCK_MONOTONIC`).
    pub began_ns: u64,
    /// When it ended.
    pub ended_ns: u64,
    /// Shards found READY.
    pub hits: u64,
    /// Shards this worker loaded.
    pub owned: u64,
    /// Shards another worker loaded meanwhile.
    pub waited: u64,
    /// Shards that failed.
    pub failed_shards: u64,
    /// Bytes that were compared and are right.
    pub verified_bytes: u64,
    /// Shards with a wrong byte.
    pub mismatched_shards: u64,
    /// Of a lookup: blocks from the front that the cache has.
    pub ready_blocks: u64,
    /// Of a lookup: blocks from the front that the cache or the backend has.
    pub found_blocks: u64,
}

impl Completion {
    /// Reads a payload: the figures, and the text behind them.
    ///
    /// # Errors
    /// See [`MessageError`].
    pub fn decode(payload: &[u8]) -> Result<(Self, &[u8]), MessageError> {
        let wrong = MessageError::Length { found_bytes: payload.len() };
        let (figures, text) = payload.split_at_checked(size_of::<Self>()).ok_or(wrong)?;
        Ok((bytemuck::pod_read_unaligned(figures), text))
    }
}
