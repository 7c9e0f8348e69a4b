//! Commands and outcomes as frames: submissions and completions as records, the rest as JSON.

use ucm_core::BlockId;
use ucm_core::channel::message::{MessageError, encode_block};
use ucm_core::channel::{Completion, Kind, Submission};

use crate::rank::protocol::{Command, Done, Outcome};
use crate::rank::work::Work;

/// Why a frame's payload was not understood.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Its records are wrong.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Its JSON is.
    #[error("a frame that is no JSON of its kind: {0}")]
    Json(#[from] serde_json::Error),
    /// A kind that does not travel in this direction.
    #[error("a frame of kind {0:?}, which does not travel this way")]
    Direction(Kind),
}

/// What a worker is asked to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Asked {
    Work(Work),
    Generate { tokens: u32, pause_us: u64 },
    Stop,
}

/// A command's frame.
///
/// # Errors
/// [`WireError::Json`].
pub fn encode_command(command: &Command, seed: u64) -> Result<(Kind, Vec<u8>), WireError> {
    match Work::of(command, seed) {
        Some(Work::Blocks { kind, blocks, at }) => {
            let mut payload = Vec::with_capacity(16 + 16 * blocks.len());
            payload.extend(Submission::encode_head(kind, blocks.len() as u32, at));
            blocks.iter().for_each(|block| payload.extend(encode_block(block)));
            Ok((Kind::Submit, payload))
        }
        _ => Ok((Kind::Command, serde_json::to_vec(command)?)),
    }
}

/// What a frame of the engine's asks for.
pub(crate) fn decode_command(kind: Kind, payload: &[u8]) -> Result<Asked, WireError> {
    match kind {
        Kind::Submit => {
            let submission = Submission::decode(payload)?;
            let blocks: Vec<BlockId> = submission.blocks().collect();
            let (kind, at) = (submission.kind, submission.at_shard);
            Ok(Asked::Work(Work::Blocks { kind, blocks, at }))
        }
        Kind::Command => Ok(match serde_json::from_slice(payload)? {
            Command::Generate { tokens, pause_us } => Asked::Generate { tokens, pause_us },
            Command::Poison => Asked::Work(Work::Poison),
            Command::Metrics => Asked::Work(Work::Metrics),
            Command::Stop => Asked::Stop,
            // These come as submissions.
            _ => return Err(WireError::Direction(kind)),
        }),
        other => Err(WireError::Direction(other)),
    }
}

/// An outcome's frame.
///
/// # Errors
/// [`WireError::Json`].
pub fn encode_outcome(outcome: &Outcome) -> Result<(Kind, Vec<u8>), WireError> {
    let Outcome::Done(done) = outcome else {
        return Ok((Kind::Reply, serde_json::to_vec(outcome)?));
    };
    let record = Completion {
        began_ns: done.began_ns,
        ended_ns: done.ended_ns,
        hits: done.hits,
        owned: done.owned,
        waited: done.waited,
        failed_shards: done.failed_shards,
        verified_bytes: done.verified_bytes,
        mismatched_shards: done.mismatched_shards,
        ready_blocks: done.ready_blocks,
        found_blocks: done.found_blocks,
    };
    let mut payload = bytemuck::bytes_of(&record).to_vec();
    payload.extend(done.reasons.join("\n").into_bytes());
    Ok((Kind::Complete, payload))
}

/// What a frame of a worker's says.
///
/// # Errors
/// See [`WireError`].
pub fn decode_outcome(kind: Kind, payload: &[u8]) -> Result<Outcome, WireError> {
    match kind {
        Kind::Reply => Ok(serde_json::from_slice(payload)?),
        Kind::Complete => {
            let (record, text) = Completion::decode(payload)?;
            Ok(Outcome::Done(Done {
                began_ns: record.began_ns,
                ended_ns: record.ended_ns,
                hits: record.hits,
                owned: record.owned,
                waited: record.waited,
                failed_shards: record.failed_shards,
                reasons: String::from_utf8_lossy(text).lines().map(str::to_owned).collect(),
                verified_bytes: record.verified_bytes,
                mismatched_shards: record.mismatched_shards,
                ready_blocks: record.ready_blocks,
                found_blocks: record.found_blocks,
            }))
        }
        other => Err(WireError::Direction(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_outcomes_survive_the_wire() {
        let load = Command::Load { blocks: vec![1, 2, 3], at: 5 };
        let (kind, payload) = encode_command(&load, 9).unwrap();
        assert_eq!((kind, payload.len()), (Kind::Submit, 16 + 3 * 16));
        let asked = decode_command(kind, &payload).unwrap();
        assert_eq!(asked, Asked::Work(Work::of(&load, 9).unwrap()));
        let (kind, payload) = encode_command(&Command::Stop, 9).unwrap();
        assert_eq!(decode_command(kind, &payload).unwrap(), Asked::Stop);

        let done = Done { hits: 7, reasons: vec!["a".into(), "b".into()], ..Done::default() };
        let (kind, payload) = encode_outcome(&Outcome::Done(done.clone())).unwrap();
        assert!(matches!(decode_outcome(kind, &payload).unwrap(), Outcome::Done(d) if d == done));
        let (kind, payload) = encode_outcome(&Outcome::Ready).unwrap();
        assert!(matches!(decode_outcome(kind, &payload).unwrap(), Outcome::Ready));
    }

    #[test]
    fn a_frame_that_travels_the_wrong_way_or_holds_nonsense_is_refused() {
        for kind in [Kind::Tokens, Kind::Complete, Kind::Reply] {
            assert!(matches!(decode_command(kind, b"{}"), Err(WireError::Direction(_))));
        }
        for kind in [Kind::Tokens, Kind::Submit, Kind::Command] {
            assert!(matches!(decode_outcome(kind, b"{}"), Err(WireError::Direction(_))));
        }
        assert!(decode_command(Kind::Submit, b"short").is_err());
        assert!(decode_command(Kind::Command, b"{").is_err());
        assert!(decode_outcome(Kind::Complete, &[0; 79]).is_err());
    }
}
