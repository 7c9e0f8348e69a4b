//! The format of a block file: a header, a table of shards, then the shards.
//!
//! All numbers are little-endian. `H` is `64 + 16 x shards` rounded up to a
//! page, `S` the shard size rounded up to a page, so every shard begins on a
//! page and can be read with direct IO.
//!
//! ```text
//!  0  magic "UCMBLOCK"      24  header length H, u64
//!  8  version, u32          32  block id, 16 bytes
//! 12  shards per block, u32 48  zero, u64
//! 16  shard size, u64       56  xxh3-64 of bytes 0..H with this word as zero
//! 64  per shard: length in bytes, u64 (top bit: it has a checksum) | xxh3-64, u64
//!  H  shard 0     H + S  shard 1     ...     H + shards x S  end of the file
//! ```
//!
//! A file says what it is, but is believed only where the header's own
//! checksum, its name and the store agree.

use ucm_core::key::BlockId;
use ucm_core::limits::PAGE_BYTES;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: [u8; 8] = *b"UCMBLOCK";
const VERSION: u32 = 1;
const FIXED_BYTES: usize = 64;
const ENTRY_BYTES: usize = 16;
const CHECKSUM_AT: usize = 56;
const HAS_CHECKSUM: u64 = 1 << 63;
/// In a block that is being written: the shard's bytes are there.
const IS_WRITTEN: u64 = 1 << 62;

/// More shards than a block can sensibly have; bounds what an untrusted
/// header can make a reader allocate.
pub const MAX_SHARDS_PER_BLOCK: u32 = 1 << 20;

/// What is wrong with a stored object.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BadObject {
    /// It is no regular file.
    #[error("it is not a regular file")]
    NotAFile,
    /// The file is longer or shorter than its header implies.
    #[error("it is {found_bytes} bytes long and should be {expected_bytes}")]
    Length {
        /// How long it is.
        found_bytes: u64,
        /// How long a block of this geometry is.
        expected_bytes: u64,
    },
    /// It does not begin as a block file does.
    #[error("it does not begin with a block file's magic")]
    Magic,
    /// It was written by another version.
    #[error("it has format version {found}, this is version {expected}")]
    Version {
        /// The file's.
        found: u32,
        /// This program's.
        expected: u32,
    },
    /// The header does not match its own checksum.
    #[error("its header is damaged")]
    Header,
    /// It holds another block than its name says.
    #[error("it holds block {found}")]
    OtherBlock {
        /// The block it holds.
        found: BlockId,
    },
    /// Its shards have another size or number than the store's.
    #[error("it has {shards} shards of {shard_bytes} bytes, which the store has not")]
    Geometry {
        /// Its number of shards.
        shards: u32,
        /// Their size.
        shard_bytes: u64,
    },
    /// The table gives a shard a length beyond the shard size.
    #[error("shard {shard} claims {len_bytes} bytes")]
    ShardLength {
        /// Which shard.
        shard: u32,
        /// What the table says.
        len_bytes: u64,
    },
}

/// What the table says of one shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShardEntry {
    /// Its length in bytes, at most the shard size.
    pub len_bytes: u64,
    /// The xxh3-64 of its bytes, if the writer made one.
    pub checksum: Option<u64>,
}

/// What the first bytes of a block that is being written say.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Draft {
    /// There is no header yet; these shards have been written.
    Open(Vec<Option<ShardEntry>>),
    /// There is a header: every shard is there, and nothing changes any more.
    Headed,
}

/// Where things are in the block files of one store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockLayout {
    /// Bytes of a shard.
    pub shard_bytes: u64,
    /// Shards of a block.
    pub shards_per_block: u32,
}

impl BlockLayout {
    /// Bytes before shard 0.
    pub fn header_bytes(&self) -> u64 {
        let table = u64::from(self.shards_per_block) * ENTRY_BYTES as u64;
        (FIXED_BYTES as u64 + table).next_multiple_of(PAGE_BYTES)
    }

    /// Where `shard` begins in the file.
    pub fn shard_offset(&self, shard: u32) -> u64 {
        self.header_bytes() + u64::from(shard) * self.shard_bytes.next_multiple_of(PAGE_BYTES)
    }

    /// How long a file is.
    pub fn file_bytes(&self) -> u64 {
        self.shard_offset(self.shards_per_block)
    }

    /// The header of `block` with this table, one entry a shard.
    pub fn encode(&self, block: BlockId, table: &[ShardEntry]) -> Vec<u8> {
        let mut header = vec![0; self.header_bytes() as usize];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(12, &self.shards_per_block.to_le_bytes());
        put(16, &self.shard_bytes.to_le_bytes());
        put(24, &self.header_bytes().to_le_bytes());
        put(32, &block.0);
        for (shard, entry) in table.iter().enumerate() {
            let at = FIXED_BYTES + shard * ENTRY_BYTES;
            let flag = if entry.checksum.is_some() { HAS_CHECKSUM } else { 0 };
            put(at, &(entry.len_bytes | flag).to_le_bytes());
            put(at + 8, &entry.checksum.unwrap_or(0).to_le_bytes());
        }
        let own = xxh3_64(&header);
        header[CHECKSUM_AT..FIXED_BYTES].copy_from_slice(&own.to_le_bytes());
        header
    }

    /// Checks that `header` ([`header_bytes`](Self::header_bytes) bytes of a
    /// file) is the header of `block` in this layout, and returns its table.
    pub fn decode(&self, block: BlockId, header: &[u8]) -> Result<Vec<ShardEntry>, BadObject> {
        let length = BadObject::Length {
            found_bytes: header.len() as u64,
            expected_bytes: self.header_bytes(),
        };
        if header.len() as u64 != self.header_bytes() {
            return Err(length);
        }
        if take(header, 0) != Some(MAGIC) {
            return Err(BadObject::Magic);
        }
        let version = u32::from_le_bytes(take(header, 8).ok_or(length)?);
        if version != VERSION {
            return Err(BadObject::Version { found: version, expected: VERSION });
        }
        // Before the checksum: another geometry has another header length,
        // and would look damaged instead of foreign.
        let shards = u32::from_le_bytes(take(header, 12).ok_or(length)?);
        let shard_bytes = u64::from_le_bytes(take(header, 16).ok_or(length)?);
        let header_bytes = u64::from_le_bytes(take(header, 24).ok_or(length)?);
        if (shards, shard_bytes) != (self.shards_per_block, self.shard_bytes)
            || header_bytes != self.header_bytes()
        {
            return Err(BadObject::Geometry { shards, shard_bytes });
        }
        let own = u64::from_le_bytes(take(header, CHECKSUM_AT).ok_or(length)?);
        let mut blanked = header.to_vec();
        blanked[CHECKSUM_AT..FIXED_BYTES].fill(0);
        if xxh3_64(&blanked) != own {
            return Err(BadObject::Header);
        }
        let found = BlockId(take(header, 32).ok_or(length)?);
        if found != block {
            return Err(BadObject::OtherBlock { found });
        }
        (0..shards).map(|shard| self.entry(header, shard).ok_or(length)?).collect()
    }

    /// Where the table says of `shard` what there is.
    pub(super) fn entry_offset(shard: u32) -> u64 {
        FIXED_BYTES as u64 + u64::from(shard) * ENTRY_BYTES as u64
    }

    /// The two words of an entry in a block that is being written.
    pub(super) fn draft_entry(entry: Option<ShardEntry>) -> [[u8; 8]; 2] {
        let Some(ShardEntry { len_bytes, checksum }) = entry else { return [[0; 8]; 2] };
        let flag = if checksum.is_some() { HAS_CHECKSUM } else { 0 };
        [(len_bytes | flag | IS_WRITTEN).to_le_bytes(), checksum.unwrap_or(0).to_le_bytes()]
    }

    /// Reads the first bytes of a block that is being written. An entry with
    /// an impossible length counts as missing.
    pub fn draft(&self, header: &[u8]) -> Draft {
        if take(header, 0) == Some(MAGIC) {
            return Draft::Headed;
        }
        let entry = |shard: u32| {
            let at = Self::entry_offset(shard) as usize;
            let word = u64::from_le_bytes(take(header, at)?);
            let checksum = u64::from_le_bytes(take(header, at + 8)?);
            let len_bytes = word & !(HAS_CHECKSUM | IS_WRITTEN);
            let checksum = (word & HAS_CHECKSUM != 0).then_some(checksum);
            let is_there = word & IS_WRITTEN != 0 && len_bytes <= self.shard_bytes;
            is_there.then_some(ShardEntry { len_bytes, checksum })
        };
        Draft::Open((0..self.shards_per_block).map(entry).collect())
    }

    /// `None` if the header is too short for it.
    fn entry(&self, header: &[u8], shard: u32) -> Option<Result<ShardEntry, BadObject>> {
        let at = FIXED_BYTES + shard as usize * ENTRY_BYTES;
        let word = u64::from_le_bytes(take(header, at)?);
        let checksum = u64::from_le_bytes(take(header, at + 8)?);
        let len_bytes = word & !HAS_CHECKSUM;
        Some(if len_bytes > self.shard_bytes {
            Err(BadObject::ShardLength { shard, len_bytes })
        } else {
            let checksum = (word & HAS_CHECKSUM != 0).then_some(checksum);
            Ok(ShardEntry { len_bytes, checksum })
        })
    }
}

fn take<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: BlockLayout = BlockLayout { shard_bytes: 5000, shards_per_block: 3 };
    const BLOCK: BlockId = BlockId(*b"a block's own id");

    fn table() -> Vec<ShardEntry> {
        vec![
            ShardEntry { len_bytes: 5000, checksum: Some(1) },
            ShardEntry { len_bytes: 1, checksum: None },
            ShardEntry { len_bytes: 0, checksum: Some(0) },
        ]
    }

    #[test]
    fn a_header_survives_encoding() {
        let header = LAYOUT.encode(BLOCK, &table());
        assert_eq!(LAYOUT.decode(BLOCK, &header), Ok(table()));
    }

    #[test]
    fn a_draft_says_which_shards_are_there_until_it_has_a_header() {
        let mut draft = vec![0; 4096];
        assert_eq!(LAYOUT.draft(&draft), Draft::Open(vec![None; 3]));
        for (shard, entry) in (0..3).zip(table()) {
            let at = BlockLayout::entry_offset(shard) as usize;
            draft[at..at + 16]
                .copy_from_slice(BlockLayout::draft_entry(Some(entry)).as_flattened());
        }
        assert_eq!(LAYOUT.draft(&draft), Draft::Open(table().into_iter().map(Some).collect()));
        draft[64..72].copy_from_slice(&(5001 | IS_WRITTEN).to_le_bytes());
        let Draft::Open(found) = LAYOUT.draft(&draft) else { panic!("it has no header") };
        assert_eq!(found[0], None);
        assert_eq!(LAYOUT.draft(&LAYOUT.encode(BLOCK, &table())), Draft::Headed);
        assert_eq!(LAYOUT.draft(&[]), Draft::Open(vec![None; 3]));
    }

    #[test]
    fn shards_begin_on_pages_behind_the_table() {
        assert_eq!(LAYOUT.header_bytes(), 4096);
        assert_eq!(
            (0..4).map(|s| LAYOUT.shard_offset(s)).collect::<Vec<_>>(),
            [4096, 12288, 20480, 28672]
        );
        assert_eq!(LAYOUT.file_bytes(), 28672);
        let many = BlockLayout { shard_bytes: 4096, shards_per_block: 300 };
        assert_eq!(many.header_bytes(), 8192);
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_noticed() {
        let header = LAYOUT.encode(BLOCK, &table());
        for at in 0..header.len() {
            for bit in 0..8 {
                let mut bad = header.clone();
                bad[at] ^= 1 << bit;
                assert!(LAYOUT.decode(BLOCK, &bad).is_err(), "byte {at}, bit {bit}");
            }
        }
    }

    #[test]
    fn each_kind_of_foreign_header_is_named() {
        let header = LAYOUT.encode(BLOCK, &table());
        let other = BlockId([9; 16]);
        assert_eq!(LAYOUT.decode(other, &header), Err(BadObject::OtherBlock { found: BLOCK }));
        let wider = BlockLayout { shards_per_block: 4, ..LAYOUT };
        let geometry = BadObject::Geometry { shards: 3, shard_bytes: 5000 };
        assert_eq!(wider.decode(BLOCK, &header), Err(geometry));
        let length = BadObject::Length { found_bytes: 100, expected_bytes: 4096 };
        assert_eq!(LAYOUT.decode(BLOCK, &header[..100]), Err(length));
        let mut newer = header.clone();
        newer[8] = 2;
        assert_eq!(LAYOUT.decode(BLOCK, &newer), Err(BadObject::Version { found: 2, expected: 1 }));
        assert_eq!(LAYOUT.decode(BLOCK, &[0; 4096]), Err(BadObject::Magic));
    }

    #[test]
    fn a_length_beyond_the_shard_size_is_refused_even_with_a_right_checksum() {
        let mut long = table();
        long[1].len_bytes = 5001;
        let header = LAYOUT.encode(BLOCK, &long);
        let expected = BadObject::ShardLength { shard: 1, len_bytes: 5001 };
        assert_eq!(LAYOUT.decode(BLOCK, &header), Err(expected));
    }
}
