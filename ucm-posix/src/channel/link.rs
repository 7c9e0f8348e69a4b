//! What both ends hold of the file: its mapping, their byte, and who removes it.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ucm_core::channel::layout::CHANNEL_BYTES;
use ucm_core::channel::{ChannelError, ChannelMemory};
use ucm_core::limits::PAGE_BYTES;

use crate::channel::error::ChannelOpenError;
use crate::error::{LockError, OsError};
use crate::identity::effective_uid;
use crate::liveness::{ByteLock, LockFile, Mode, PARTICIPANTS};
use crate::mapping::Mapping;
use crate::names::SegmentId;
use crate::shm::{ShmDir, is_named, open_existing, stat_path, unlink};

/// The file's length: whole pages.
pub(crate) const FILE_BYTES: u64 = CHANNEL_BYTES.next_multiple_of(PAGE_BYTES);
/// The engine's lock byte.
pub(crate) const ENGINE_BYTE: i64 = PARTICIPANTS.start;
/// The worker's.
pub(crate) const WORKER_BYTE: i64 = PARTICIPANTS.start + 1;

/// How often an end looks before it sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spins(pub u32);

impl Default for Spins {
    /// A few microseconds, below what a futex round trip costs.
    fn default() -> Self {
        Self(200)
    }
}

impl Spins {
    /// For ends that are to stay awake: tens of milliseconds.
    pub const MANY: Self = Self(1 << 20);
}

pub(crate) fn path(dir: &ShmDir, id: &SegmentId) -> PathBuf {
    dir.path.join(format!("ucm.{id}.chan"))
}

/// One end's hold of the file. Everything an end hands out keeps it alive.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) mapping: Mapping,
    pub(crate) file: LockFile,
    /// Whether this is the engine's end.
    engine: bool,
    /// Held as long as the end lives; `None` only while it is dropped.
    byte: Mutex<Option<ByteLock>>,
}

impl Link {
    pub(crate) fn new(mapping: Mapping, file: LockFile, byte: ByteLock, engine: bool) -> Self {
        Self { mapping, file, engine, byte: Mutex::new(Some(byte)) }
    }

    /// The memory. What is borrowed from it must not outlive the link; every
    /// holder keeps the link beside it.
    pub(crate) fn memory(mapping: &Mapping) -> Result<ChannelMemory<'static>, ChannelError> {
        // SAFETY: the mapping is page aligned and valid for its length; its
        // file is ours (mode 0600) and reached through channels' ends; holders
        // drop what they borrowed before the mapping.
        unsafe { ChannelMemory::new(mapping.base(), mapping.len_bytes() as u64) }
    }

    /// Whether somebody holds the byte. Nobody is declared dead by an error.
    pub(crate) fn is_held(&self, at: i64) -> bool {
        self.file.is_held(at..at + 1).unwrap_or_else(|error| {
            warn_once!(%error, "cannot ask who is alive; the channel's other end counts as alive");
            true
        })
    }

    /// Refuses a forked child, where the memory is not mapped.
    ///
    /// # Panics
    /// There.
    #[inline]
    pub(crate) fn check(&self) {
        assert!(
            self.mapping.stamp().is_current(),
            "a channel was used in a forked child of the process that opened it"
        );
    }

    /// Takes the name away, if it is still ours to take.
    fn remove(&self) -> Result<(), LockError> {
        if !self.engine {
            // The engine's business, as long as there is one.
            let Some(_engine) = self.file.try_lock(ENGINE_BYTE, Mode::Exclusive)? else {
                return Ok(());
            };
            return remove_named(&self.file);
        }
        remove_named(&self.file)
    }
}

fn remove_named(file: &LockFile) -> Result<(), LockError> {
    if is_named(file.anchor(), file.path())? {
        unlink(file.path())?;
    }
    Ok(())
}

impl Drop for Link {
    fn drop(&mut self) {
        if !self.mapping.stamp().is_current() {
            return;
        }
        if let Err(error) = self.remove() {
            tracing::warn!(%error, "a channel's file is left; `ucm gc` removes it");
        }
        let byte = self.byte.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        drop(byte.take());
    }
}

/// Opens a channel's file, if it is one that this user may have.
pub(crate) fn open(path: &Path) -> Result<LockFile, ChannelOpenError> {
    let not_found = || ChannelOpenError::NotFound { path: path.to_owned() };
    let stat = stat_path(path)?.ok_or_else(not_found)?;
    if stat.owner != effective_uid() || !stat.is_regular {
        return Err(ChannelOpenError::NotOurs { path: path.to_owned() });
    }
    let fd = open_existing(path, true)?.ok_or_else(not_found)?;
    Ok(LockFile::new(fd, path.to_owned()))
}

/// Removes the channels of `dir` whose engine and worker are both gone. Returns
/// how many that were.
///
/// # Errors
/// When the directory cannot be read; files that cannot be looked at are left.
pub fn collect(dir: &ShmDir) -> Result<u32, ChannelOpenError> {
    let failed = |error| OsError::new("readdir", &dir.path, error);
    let mut removed = 0;
    for entry in std::fs::read_dir(&dir.path).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let id = name.strip_prefix("ucm.").and_then(|rest| rest.strip_suffix(".chan"));
        if id.is_none_or(|id| SegmentId::new(id).is_err()) {
            continue;
        }
        let Ok(file) = open(&path) else { continue };
        let worker = file.is_held(WORKER_BYTE..WORKER_BYTE + 1)?;
        if let (false, Some(_engine)) = (worker, file.try_lock(ENGINE_BYTE, Mode::Exclusive)?) {
            remove_named(&file)?;
            removed += 1;
        }
    }
    Ok(removed)
}
