//! A rank over its standard streams: one JSON object a line. For harnesses that
//! script single ranks; the tool itself drives its ranks through channels.

use std::io::{BufRead, Write};
use std::sync::{Mutex, PoisonError};

use crate::rank::protocol::{Command, Outcome, Reply, Request, Setup};
use crate::rank::work::{Rank, Work};

/// Runs a rank over `input` and `output` until it is told to stop, or `input`
/// ends. Commands run side by side, each answered when it is done.
///
/// # Errors
/// When the streams fail, or the first line is no [`Setup`].
pub fn run(input: impl BufRead, output: impl Write + Send) -> std::io::Result<()> {
    let output = Mutex::new(output);
    let answer = |id: u64, outcome: Outcome| -> std::io::Result<()> {
        let line = serde_json::to_string(&Reply { id, outcome })?;
        let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(output, "{line}")?;
        output.flush()
    };
    let mut lines = input.lines();
    let Some(first) = lines.next() else { return Ok(()) };
    let setup = serde_json::from_str::<Setup>(&first?).map_err(|e| e.to_string());
    let rank = match setup.and_then(Rank::start) {
        Ok(rank) => rank,
        Err(reason) => return answer(0, Outcome::Error(reason)),
    };
    answer(0, Outcome::Ready)?;
    let mut stop_id = None;
    std::thread::scope(|scope| -> std::io::Result<()> {
        for line in lines {
            let Request { id, command } = serde_json::from_str(&line?)?;
            if matches!(command, Command::Stop) {
                stop_id = Some(id);
                break;
            }
            let Some(work) = Work::of(&command, rank.seed()) else {
                answer(id, Outcome::Error("only a channel carries tokens".to_owned()))?;
                continue;
            };
            let (rank, answer) = (&rank, &answer);
            scope.spawn(move || {
                if let Err(error) = answer(id, rank.run(&work)) {
                    tracing::error!(%error, "the parent does not listen");
                }
            });
        }
        Ok(())
    })?;
    let drained = rank.shutdown();
    match stop_id {
        Some(id) => answer(id, Outcome::Stopped { drained }),
        None => Ok(()),
    }
}
