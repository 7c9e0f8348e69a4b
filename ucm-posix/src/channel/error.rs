//! Why a channel could not be made, joined or renewed.

use std::path::PathBuf;

use thiserror::Error;
use ucm_core::channel::{ChannelError, WildIndex, WorkerAttachError};

use crate::error::{ForkedError, LockError, OsError, ShmError};

/// Why a channel could not be made, joined or renewed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ChannelOpenError {
    /// There is no such channel.
    #[error("there is no channel {}; start its engine first, or check the id", path.display())]
    NotFound {
        /// Where it should be.
        path: PathBuf,
    },
    /// Somebody else's, or no regular file.
    #[error("{} is not a file of this user", path.display())]
    NotOurs {
        /// Where it is.
        path: PathBuf,
    },
    /// The file has another length than a channel.
    #[error("{} has {found_bytes} bytes, a channel {needed_bytes}", path.display())]
    Length {
        /// Where it is.
        path: PathBuf,
        /// What `fstat` says.
        found_bytes: u64,
        /// What it should be.
        needed_bytes: u64,
    },
    /// What is in it is not a channel of this build.
    #[error("channel {}: {error}", path.display())]
    Refused {
        /// Where it is.
        path: PathBuf,
        /// What is wrong.
        error: ChannelError,
    },
    /// The channel has a worker that lives.
    #[error("channel {} has a worker, which is alive", path.display())]
    WorkerAlive {
        /// Where it is.
        path: PathBuf,
    },
    /// The channel's engine is gone.
    #[error("the engine of channel {} is gone", path.display())]
    EngineGone {
        /// Where it is.
        path: PathBuf,
    },
    /// The worker's end cannot be taken.
    #[error(transparent)]
    Attach(#[from] WorkerAttachError),
    /// The ring's indices contradict each other: make the channel anew.
    #[error(transparent)]
    Wild(#[from] WildIndex),
    /// A lock byte.
    #[error(transparent)]
    Lock(LockError),
    /// The file.
    #[error(transparent)]
    Shm(ShmError),
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

impl From<LockError> for ChannelOpenError {
    fn from(error: LockError) -> Self {
        match error {
            LockError::Os(error) => Self::Os(error),
            other => Self::Lock(other),
        }
    }
}

impl From<ShmError> for ChannelOpenError {
    fn from(error: ShmError) -> Self {
        match error {
            ShmError::Os(error) => Self::Os(error),
            ShmError::Lock(error) => Self::Lock(error),
            other => Self::Shm(other),
        }
    }
}

impl From<ForkedError> for ChannelOpenError {
    fn from(error: ForkedError) -> Self {
        Self::Lock(error.into())
    }
}
