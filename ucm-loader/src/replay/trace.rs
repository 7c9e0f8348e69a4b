//! Reads request traces: one JSON object a line, as Mooncake's releases have them.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use serde::{Deserialize, Serialize};
use ucm_core::key::BlockId;

use crate::content::mix;

/// Tokens of a block in these traces.
pub const BLOCK_TOKENS: u64 = 512;
/// No request has a line this long; a file without newlines is no trace.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// One request of a trace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TraceRequest {
    /// When it came, in milliseconds from the trace's beginning.
    pub timestamp: u64,
    /// Its prompt, in tokens.
    pub input_length: u64,
    /// Its answer, in tokens.
    pub output_length: u64,
    /// Its prompt's blocks: equal numbers stand for equal prefixes.
    pub hash_ids: Vec<u64>,
}

/// Which line is wrong, counted from 1, and how.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct TraceError {
    /// The line's number.
    pub line: u64,
    /// What is wrong with it.
    pub reason: TraceReason,
}

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceReason {
    /// It ends in the middle: the trace was cut off.
    #[error("it ends at column {column}, in the middle of a request; the trace is truncated")]
    Truncated {
        /// Where it ends.
        column: usize,
    },
    /// It is not JSON.
    #[error("it is not JSON from column {column} on")]
    Syntax {
        /// Where it stops being JSON.
        column: usize,
    },
    /// A field is missing or has another type.
    #[error("it is not a request: {0}")]
    Field(#[source] serde_json::Error),
    /// It is longer than any request.
    #[error("it is longer than {limit_bytes} bytes")]
    TooLong {
        /// What a line may have.
        limit_bytes: u64,
    },
    /// It is not UTF-8.
    #[error("it is not text")]
    NotText,
    /// The file could not be read.
    #[error("it cannot be read (errno {errno})")]
    Io {
        /// Why.
        errno: i32,
    },
}

/// The requests of a trace, read as they are asked for. Ends after the first error.
pub struct TraceReader<R> {
    reader: R,
    line: u64,
    buffer: Vec<u8>,
    ended: bool,
}

impl TraceReader<BufReader<File>> {
    /// Opens a trace file.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self::new(BufReader::with_capacity(1 << 18, File::open(path)?)))
    }
}

impl<R: BufRead> TraceReader<R> {
    /// Reads requests from `reader`.
    pub fn new(reader: R) -> Self {
        Self { reader, line: 0, buffer: Vec::new(), ended: false }
    }

    /// Fills the buffer with the next line; `false` at the end.
    fn next_line(&mut self) -> Result<bool, TraceReason> {
        self.buffer.clear();
        self.line += 1;
        let mut limited = io::Read::take(&mut self.reader, MAX_LINE_BYTES + 1);
        let got = limited.read_until(b'\n', &mut self.buffer).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            TraceReason::Io { errno }
        })?;
        if got as u64 > MAX_LINE_BYTES {
            return Err(TraceReason::TooLong { limit_bytes: MAX_LINE_BYTES });
        }
        Ok(got > 0)
    }

    fn read(&mut self) -> Result<Option<TraceRequest>, TraceReason> {
        while self.next_line()? {
            let text = std::str::from_utf8(&self.buffer).map_err(|_| TraceReason::NotText)?;
            if !text.trim().is_empty() {
                return parse(text).map(Some);
            }
        }
        Ok(None)
    }
}

fn parse(text: &str) -> Result<TraceRequest, TraceReason> {
    use serde_json::error::Category;
    // Without the line's end, so that a column is one of the line.
    serde_json::from_str(text.trim_end()).map_err(|error| match error.classify() {
        Category::Eof => TraceReason::Truncated { column: error.column() },
        Category::Data => TraceReason::Field(error),
        Category::Syntax | Category::Io => TraceReason::Syntax { column: error.column() },
    })
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<TraceRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.read().map_err(|reason| TraceError { line: self.line, reason }).transpose();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

/// The block a trace's number stands for. Traces replayed with different
/// seeds share no block.
pub fn block_id(seed: u64, hash_id: u64) -> BlockId {
    let low = mix(mix(seed).wrapping_add(hash_id));
    // The number itself is mixed in a second way, so that two numbers whose
    // low halves meet differ in the high one.
    let high = mix(mix(!seed) ^ hash_id.rotate_left(32));
    BlockId::from_words(low, high)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const GOOD: &str =
        r#"{"timestamp": 27, "input_length": 600, "output_length": 3, "hash_ids": [0, 46]}"#;

    fn read(text: &str) -> Vec<Result<TraceRequest, TraceError>> {
        TraceReader::new(text.as_bytes()).collect()
    }

    fn error_of(text: &str) -> TraceError {
        let mut results = read(text);
        let last = results.pop().unwrap();
        assert!(results.iter().all(Result::is_ok));
        last.unwrap_err()
    }

    #[test]
    fn requests_are_read_in_order_and_empty_lines_are_skipped() {
        let requests = read(&format!("{GOOD}\n\n  \r\n{}\r\n", GOOD.replace("27", "28")));
        let expected = TraceRequest {
            timestamp: 27,
            input_length: 600,
            output_length: 3,
            hash_ids: vec![0, 46],
        };
        assert_eq!(requests.len(), 2);
        assert_eq!(requests[0].as_ref().unwrap(), &expected);
        assert_eq!(requests[1].as_ref().unwrap().timestamp, 28);
    }

    #[test]
    fn a_trace_that_is_cut_off_anywhere_in_a_line_is_truncated_there() {
        for cut in 1..GOOD.len() - 1 {
            let error = error_of(&format!("{GOOD}\n\n{}", &GOOD[..cut]));
            assert_eq!(error.line, 3);
            assert!(matches!(error.reason, TraceReason::Truncated { .. }), "cut at {cut}: {error}");
        }
    }

    #[test]
    fn a_malformed_line_is_an_error_with_its_number_and_nothing_comes_after_it() {
        let error = error_of(&format!("{GOOD}\n{{\"timestamp\": x}}\n{GOOD}\n"));
        assert_eq!(error.line, 2);
        assert!(matches!(error.reason, TraceReason::Syntax { column: 15 }), "{error}");
    }

    #[test]
    fn missing_and_mistyped_fields_are_named() {
        let missing = error_of(&GOOD.replace("hash_ids", "hashes"));
        assert!(matches!(missing.reason, TraceReason::Field(_)));
        assert!(missing.to_string().contains("hash_ids"), "{missing}");
        let negative = error_of(&GOOD.replace("46", "-46"));
        assert!(matches!(negative.reason, TraceReason::Field(_)), "{negative}");
        let array = error_of("[1, 2");
        assert!(array.line == 1, "{array}");
    }

    #[test]
    fn endless_lines_and_bytes_that_are_no_text_end_the_trace() {
        let endless = vec![b' '; MAX_LINE_BYTES as usize + 2];
        let error = TraceReader::new(&endless[..]).next().unwrap().unwrap_err();
        assert!(matches!(error.reason, TraceReason::TooLong { .. }));
        let error = TraceReader::new(&b"\xff\xfe\n"[..]).next().unwrap().unwrap_err();
        assert!(matches!(error.reason, TraceReason::NotText));
    }

    #[test]
    fn a_request_survives_being_written_and_read() {
        let request = read(GOOD).remove(0).unwrap();
        let line = serde_json::to_string(&request).unwrap();
        assert_eq!(read(&line).remove(0).unwrap(), request);
    }

    #[test]
    fn block_ids_are_stable_and_differ_by_number_and_seed() {
        assert_eq!(block_id(1, 2), block_id(1, 2));
        let ids: HashSet<_> =
            (0..4).flat_map(|seed| (0..10_000).map(move |n| block_id(seed, n))).collect();
        assert_eq!(ids.len(), 40_000);
        let first_bytes: HashSet<_> = (0..10_000).map(|n| block_id(0, n).0[0]).collect();
        assert_eq!(first_bytes.len(), 256);
    }
}
