//! The status word: which codes there are, and who may move it from where to where.
//!
//! [`Status::engine_may`] and [`Status::worker_may`] are the whole rule, as pure
//! functions; both ends move by compare-exchange from the status they expect,
//! so a move that is illegal, or that the other side was quicker than, changes
//! nothing and says what was found.

use core::fmt;

use crate::channel::layout::StateHeader;
use crate::host::Waiter;
use crate::sync::{Ordering, seqcst_order, spin_hint};

/// What the worker is doing, or is asked to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Status {
    /// Nothing.
    Idle = 0,
    /// Asked to load weights, or doing so.
    LoadWeights = 1,
    /// Asked to take the input, or working on it.
    ExecInfer = 2,
    /// Sending a stream.
    Streaming = 3,
    /// Wants more input.
    ReqData = 4,
    /// Through with it.
    Done = 5,
    /// Failed; the error code says how.
    Error = 6,
    /// Asked to stop for something more important.
    Interrupt = 7,
    /// Asked to give the device's memory back, or doing so.
    UnloadWeights = 8,
}

/// A number that is no status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IllegalStatus(pub u32);

impl fmt::Display for IllegalStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the channel's status is {}, which is none; its peer is broken", self.0)
    }
}
impl core::error::Error for IllegalStatus {}

impl Status {
    /// All of them, by code.
    pub const ALL: [Self; 9] = [
        Self::Idle,
        Self::LoadWeights,
        Self::ExecInfer,
        Self::Streaming,
        Self::ReqData,
        Self::Done,
        Self::Error,
        Self::Interrupt,
        Self::UnloadWeights,
    ];

    /// The status of a code.
    ///
    /// # Errors
    /// [`IllegalStatus`].
    pub const fn from_code(code: u32) -> Result<Self, IllegalStatus> {
        if code < Self::ALL.len() as u32 {
            Ok(Self::ALL[code as usize])
        } else {
            Err(IllegalStatus(code))
        }
    }

    /// Its code.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// Whether the engine may move from `self` to `to`.
    pub const fn engine_may(self, to: Self) -> bool {
        use Status::*;
        matches!(
            (self, to),
            (Idle, LoadWeights | ExecInfer | UnloadWeights)
                | (ReqData, ExecInfer)
                | (Done | Error, Idle)
                | (LoadWeights | ExecInfer | Streaming | ReqData, Interrupt)
        )
    }

    /// Whether the worker may move from `self` to `to`.
    pub const fn worker_may(self, to: Self) -> bool {
        use Status::*;
        matches!(
            (self, to),
            (LoadWeights | Interrupt | UnloadWeights, Idle | Error)
                | (ExecInfer, Streaming | ReqData | Done | Error)
                | (Streaming, ReqData | Done | Error)
        )
    }
}

/// Why a move did not take place. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveError {
    /// The move is not legal from the status found there.
    NotFrom {
        /// What was found.
        found: Status,
        /// Where it should have gone.
        to: Status,
    },
    /// There is no such status.
    Illegal(IllegalStatus),
}

impl fmt::Display for MoveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFrom { found, to } => {
                write!(f, "the channel's status is {found:?}, from where {to:?} cannot be reached")
            }
            Self::Illegal(error) => error.fmt(f),
        }
    }
}
impl core::error::Error for MoveError {}

/// Why a wait for another status ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitError {
    /// It did not come in time.
    Deadline,
    /// What came is no status.
    Illegal(IllegalStatus),
}

impl fmt::Display for WaitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadline => f.write_str("the channel's status did not change in time"),
            Self::Illegal(error) => error.fmt(f),
        }
    }
}
impl core::error::Error for WaitError {}

/// What both ends do with the status word.
pub(crate) struct StatusWord<'m, H> {
    pub(crate) header: &'m StateHeader,
    pub(crate) host: H,
    /// Looks before the first sleep.
    pub(crate) spins: u32,
}

impl<H: Clone> Clone for StatusWord<'_, H> {
    fn clone(&self) -> Self {
        Self { header: self.header, host: self.host.clone(), spins: self.spins }
    }
}

impl<H: Waiter> StatusWord<'_, H> {
    #[inline]
    pub(crate) fn load(&self) -> Result<Status, IllegalStatus> {
        // SYNC(channel.status): Acquire; pairs with the exchange in
        // `exchange`: what the other side wrote before it moved is visible.
        Status::from_code(self.header.status.load(Ordering::Acquire))
    }

    /// Moves from `from`, if it is there, and wakes who waits.
    pub(crate) fn exchange(&self, from: Status, to: Status) -> Result<(), MoveError> {
        // SYNC(channel.status): the exchange releases what was written before
        // it to the Acquire load in `load`. SeqCst and not AcqRel because of
        // the sleeper: "I move, then look who sleeps" against its "I say that
        // I sleep, then look at the status" (`wait_while`).
        let result = self.header.status.compare_exchange(
            from.code(),
            to.code(),
            Ordering::SeqCst,
            Ordering::Acquire,
        );
        match result {
            Ok(_) => {
                self.wake();
                Ok(())
            }
            Err(code) => Err(match Status::from_code(code) {
                Ok(found) => MoveError::NotFrom { found, to },
                Err(illegal) => MoveError::Illegal(illegal),
            }),
        }
    }

    /// Moves to `to` from wherever `legal` lets it.
    pub(crate) fn advance(
        &self,
        to: Status,
        legal: fn(Status, Status) -> bool,
    ) -> Result<Status, MoveError> {
        let mut found = self.load().map_err(MoveError::Illegal)?;
        // Bounded: each turn the other side has moved, and it runs out of
        // moves that lead from one legal origin to another.
        for _ in 0..Status::ALL.len() {
            if !legal(found, to) {
                break;
            }
            match self.exchange(found, to) {
                Ok(()) => return Ok(found),
                Err(MoveError::NotFrom { found: now, .. }) => found = now,
                Err(illegal) => return Err(illegal),
            }
        }
        Err(MoveError::NotFrom { found, to })
    }

    pub(crate) fn wake(&self) {
        seqcst_order(); // channel.sleepers: I moved, now I look who sleeps
        // SYNC(channel.sleepers): SeqCst; against the add in `wait_while`: in
        // the one order of all, either the sleeper is seen here or the new
        // status there.
        if self.header.sleepers.load(Ordering::SeqCst) != 0 {
            self.header.sleepers.swap(0, Ordering::SeqCst);
            self.host.wake_all(&self.header.status);
        }
    }

    /// Waits until the status is not `seen`; sleeps after a short spin.
    pub(crate) fn wait_while(&self, seen: Status, deadline_ns: u64) -> Result<Status, WaitError> {
        for _ in 0..=self.spins {
            let now = self.load().map_err(WaitError::Illegal)?;
            if now != seen {
                return Ok(now);
            }
            spin_hint();
        }
        loop {
            // SYNC(channel.sleepers): SeqCst; see `wake`. Whoever wakes takes
            // the mark off, so one sleeper never takes off another's.
            self.header.sleepers.swap(1, Ordering::SeqCst);
            seqcst_order(); // channel.sleepers: I say that I sleep, now I look
            let now = self.load().map_err(WaitError::Illegal)?;
            if now != seen {
                return Ok(now);
            }
            let now_ns = self.host.now_ns();
            if now_ns >= deadline_ns {
                return Err(WaitError::Deadline);
            }
            self.host.wait(&self.header.status, seen.code(), deadline_ns - now_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_legal_moves_are_those_of_the_specification_and_no_others() {
        use Status::*;
        let engine: &[(Status, &[Status])] = &[
            (Idle, &[LoadWeights, ExecInfer, UnloadWeights]),
            (ReqData, &[ExecInfer, Interrupt]),
            (Done, &[Idle]),
            (Error, &[Idle]),
            (LoadWeights, &[Interrupt]),
            (ExecInfer, &[Interrupt]),
            (Streaming, &[Interrupt]),
        ];
        let worker: &[(Status, &[Status])] = &[
            (LoadWeights, &[Idle, Error]),
            (ExecInfer, &[Streaming, ReqData, Done, Error]),
            (Streaming, &[ReqData, Done, Error]),
            (Interrupt, &[Idle, Error]),
            (UnloadWeights, &[Idle, Error]),
        ];
        let listed = |table: &[(Status, &[Status])], from: Status, to: Status| {
            table.iter().any(|(origin, targets)| *origin == from && targets.contains(&to))
        };
        for from in Status::ALL {
            for to in Status::ALL {
                assert_eq!(from.engine_may(to), listed(engine, from, to), "{from:?} -> {to:?}");
                assert_eq!(from.worker_may(to), listed(worker, from, to), "{from:?} -> {to:?}");
                assert!(!(from.engine_may(to) && from.worker_may(to)), "one mover per move");
            }
        }
    }

    #[test]
    fn codes_are_those_of_the_specification_and_others_are_refused() {
        for (code, status) in Status::ALL.into_iter().enumerate() {
            assert_eq!((status.code(), Status::from_code(code as u32)), (code as u32, Ok(status)));
        }
        assert_eq!(Status::from_code(9), Err(IllegalStatus(9)));
        assert_eq!(Status::from_code(u32::MAX), Err(IllegalStatus(u32::MAX)));
    }
}
