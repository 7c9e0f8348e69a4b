//! Files of any content: block files and traces.

use ucm_core::key::BlockId;
use ucm_loader::backend::file::layout::{BlockLayout, ShardEntry};
use ucm_loader::replay::trace::TraceReader;
use xxhash_rust::xxh3::xxh3_64;

use crate::fuzz_targets::Input;

const LAYOUT: BlockLayout = BlockLayout { shard_bytes: 5000, shards_per_block: 5 };
const BLOCK: BlockId = BlockId(*b"a block's own id");
/// Where a header has its own checksum.
const CHECKSUM: std::ops::Range<usize> = 56..64;

/// A block file's header and table.
///
/// # Panics
/// That is the finding.
pub fn block_file(data: &[u8]) {
    let mut input = Input::new(data);
    let kind = input.byte();
    let table = vec![ShardEntry { len_bytes: 5000, checksum: Some(3) }; 5];
    let mut header = LAYOUT.encode(BLOCK, &table);
    if kind & 1 == 0 {
        let len = header.len();
        input.patch(len, 32, |at, byte| header[at] = byte);
    } else {
        header = input.bytes(usize::MAX).to_vec();
        header.resize(if kind & 4 == 0 { LAYOUT.header_bytes() as usize } else { header.len() }, 0);
    }
    if kind & 2 == 0 && header.len() >= CHECKSUM.end {
        // A checksum that is right, so that what it covers is looked at.
        header[CHECKSUM].fill(0);
        let own = xxh3_64(&header);
        header[CHECKSUM].copy_from_slice(&own.to_le_bytes());
    }
    match LAYOUT.decode(BLOCK, &header) {
        Ok(table) => {
            assert_eq!(table.len(), 5);
            assert!(table.iter().all(|entry| entry.len_bytes <= LAYOUT.shard_bytes));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A trace of requests.
///
/// # Panics
/// That is the finding.
pub fn trace(data: &[u8]) {
    let mut errors = 0;
    for request in TraceReader::new(data) {
        match request {
            Ok(request) => assert!(request.hash_ids.len() <= data.len()),
            Err(error) => {
                assert!(error.line > 0 && !error.to_string().is_empty());
                errors += 1;
            }
        }
    }
    assert!(errors <= 1, "it ends after the first error");
}
