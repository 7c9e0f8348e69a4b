//! Files in the shared-memory directory: made whole before they have a name, never truncated.

use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{ForkedError, LockError, OsError, ShmError};
use crate::fork::PrivateFd;
use crate::liveness::{ByteLock, CREATION, LIFECYCLE_WAIT, LockFile, Mode as LockMode};
use crate::mapping::RANGE_BYTES;
use crate::memory;

/// How often a temporary file may be collected before it is protected.
const NAMED_ATTEMPTS: u32 = 8;

/// The directory that segments live in.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ShmDir {
    /// Its path.
    pub path: PathBuf,
}

impl Default for ShmDir {
    /// `/dev/shm`.
    fn default() -> Self {
        Self { path: "/dev/shm".into() }
    }
}

impl ShmDir {
    /// Another directory; a tmpfs, or file writes go to a disk.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Bytes that a file in here may still take; `None` when nothing limits them.
    pub(crate) fn free_bytes(&self) -> Result<Option<u64>, OsError> {
        let stat = rustix::fs::statvfs(&self.path)
            .map_err(|error| OsError::new("statvfs", &self.path, error))?;
        // A tmpfs mounted with size=0 has no limit and says 0 of 0.
        Ok((stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize)))
    }

    /// Refuses what cannot fit, before anything is made.
    pub(crate) fn check_room(&self, needed_bytes: u64) -> Result<(), ShmError> {
        if let Some(free_bytes) = self.free_bytes()?
            && free_bytes < needed_bytes
        {
            return Err(self.no_space(needed_bytes, free_bytes));
        }
        memory::check(needed_bytes)
    }

    fn no_space(&self, needed_bytes: u64, free_bytes: u64) -> ShmError {
        ShmError::NoSpace { dir: self.path.clone(), needed_bytes, free_bytes }
    }
}

/// What identifies a file, whatever it is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

/// What `fstat` says of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileStat {
    pub(crate) id: FileId,
    pub(crate) len_bytes: u64,
    pub(crate) links: u64,
    pub(crate) owner: u32,
    pub(crate) is_regular: bool,
}

impl From<rustix::fs::Stat> for FileStat {
    // The fields' types differ from one architecture to the next.
    #[allow(clippy::unnecessary_cast, clippy::useless_conversion)]
    fn from(stat: rustix::fs::Stat) -> Self {
        Self {
            id: FileId { device: stat.st_dev as u64, inode: stat.st_ino as u64 },
            len_bytes: u64::try_from(stat.st_size).unwrap_or(0),
            links: stat.st_nlink as u64,
            owner: stat.st_uid,
            is_regular: FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
        }
    }
}

pub(crate) fn stat_fd(fd: &PrivateFd, path: &Path) -> Result<FileStat, LockError> {
    let stat = rustix::fs::fstat(fd.get()?).map_err(|error| OsError::new("fstat", path, error))?;
    Ok(stat.into())
}

/// The file at `path`, not followed; `None` when there is none.
pub(crate) fn stat_path(path: &Path) -> Result<Option<FileStat>, OsError> {
    match rustix::fs::lstat(path) {
        Ok(stat) => Ok(Some(stat.into())),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(OsError::new("lstat", path, error)),
    }
}

/// Whether `path` is still the name of the file behind `fd`.
pub(crate) fn is_named(fd: &PrivateFd, path: &Path) -> Result<bool, LockError> {
    let open = stat_fd(fd, path)?;
    Ok(open.links > 0 && stat_path(path)?.is_some_and(|named| named.id == open.id))
}

/// Opens what is there; `None` when nothing is. Never follows a link, never
/// waits for a pipe's other end.
pub(crate) fn open_existing(path: &Path, writable: bool) -> Result<Option<PrivateFd>, LockError> {
    let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    match PrivateFd::open(path, access | OFlags::NOFOLLOW | OFlags::NONBLOCK, Mode::empty()) {
        Ok(fd) => Ok(Some(fd)),
        Err(LockError::Os(error)) if error.errno() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Takes a name away, if it is there.
pub(crate) fn unlink(path: &Path) -> Result<(), OsError> {
    match rustix::fs::unlink(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(OsError::new("unlink", path, error)),
    }
}

/// A file that nobody else can see yet. Dropped without a name, it is gone.
///
/// Its creation byte is held from the beginning, so that `gc` leaves it alone
/// under whatever name it has before the segment is complete.
#[derive(Debug)]
pub(crate) struct Draft {
    file: LockFile,
    _creation: ByteLock,
    dir: ShmDir,
    len_bytes: u64,
    /// Where it stands while it is made, on file systems that cannot do without.
    temporary: Option<PathBuf>,
}

impl Draft {
    /// An unnamed file of `len_bytes`, mode 0600, without a page yet. `name`
    /// is used only where the file system has no unnamed files.
    pub(crate) fn create(dir: &ShmDir, name: &str, len_bytes: u64) -> Result<Self, ShmError> {
        let flags = OFlags::RDWR | OFlags::TMPFILE;
        match PrivateFd::open(&dir.path, flags, Mode::RUSR | Mode::WUSR) {
            // What file systems and old kernels say that do not have it.
            Err(LockError::Os(error))
                if matches!(
                    error.errno(),
                    Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)
                ) =>
            {
                Self::create_named(dir, name, len_bytes)
            }
            Err(error) => Err(error.into()),
            Ok(fd) => Self::guard(fd, dir, len_bytes, None)?.size(),
        }
    }

    /// The same with a temporary name.
    fn create_named(dir: &ShmDir, name: &str, len_bytes: u64) -> Result<Self, ShmError> {
        let path = dir.path.join(format!(".{name}.tmp"));
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        for _ in 0..NAMED_ATTEMPTS {
            let fd = PrivateFd::open(&path, flags, Mode::RUSR | Mode::WUSR)?;
            let draft = Self::guard(fd, dir, len_bytes, Some(path.clone()))?;
            // A collection may have seen the file before its byte was held.
            if is_named(draft.fd(), &path)? {
                return draft.size();
            }
        }
        Err(ShmError::AlreadyExists { path })
    }

    fn guard(
        fd: PrivateFd,
        dir: &ShmDir,
        len_bytes: u64,
        temporary: Option<PathBuf>,
    ) -> Result<Self, ShmError> {
        let file = LockFile::new(fd, temporary.clone().unwrap_or_else(|| dir.path.clone()));
        let creation = file.lock(CREATION, LockMode::Exclusive, LIFECYCLE_WAIT)?;
        Ok(Self { file, _creation: creation, dir: dir.clone(), len_bytes, temporary })
    }

    fn size(self) -> Result<Self, ShmError> {
        let path = &self.dir.path;
        let fd = self.fd().get().map_err(LockError::from)?;
        // The umask may have taken more than it should.
        rustix::fs::fchmod(fd, Mode::RUSR | Mode::WUSR)
            .map_err(|error| OsError::new("fchmod", path, error))?;
        // Ours alone and empty: the only file that is ever given a length so.
        rustix::fs::ftruncate(fd, self.len_bytes)
            .map_err(|error| OsError::new("ftruncate", path, error))?;
        Ok(self)
    }

    pub(crate) fn fd(&self) -> &PrivateFd {
        self.file.anchor()
    }

    /// Gives every page to the file, so that no later touch can fail: on a
    /// full file system `ftruncate` succeeds and the touch is SIGBUS.
    pub(crate) fn reserve(&self) -> Result<(), ShmError> {
        let fd = self.fd().get().map_err(LockError::from)?;
        let mut start = 0;
        while start < self.len_bytes {
            let len = RANGE_BYTES.min(self.len_bytes - start);
            match rustix::fs::fallocate(fd, FallocateFlags::empty(), start, len) {
                Ok(()) => start += len,
                Err(Errno::INTR) => {}
                Err(Errno::NOSPC) => {
                    // What this file has taken so far comes back with it.
                    let rest = self.dir.free_bytes()?.unwrap_or(0);
                    let free_bytes = rest.saturating_add(self.allocated_bytes());
                    return Err(self.dir.no_space(self.len_bytes, free_bytes));
                }
                Err(error) => return Err(OsError::new("fallocate", &self.dir.path, error).into()),
            }
        }
        Ok(())
    }

    fn allocated_bytes(&self) -> u64 {
        let stat = self.fd().get().ok().and_then(|fd| rustix::fs::fstat(fd).ok());
        stat.map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512))
    }

    /// Gives the file its name. Whoever opens it from now on finds it whole.
    ///
    /// # Errors
    /// [`ShmError::AlreadyExists`] when the name is taken; nothing has changed then.
    pub(crate) fn link(&mut self, path: &Path) -> Result<(), ShmError> {
        let result = match &self.temporary {
            Some(temporary) => rustix::fs::link(temporary, path),
            None => {
                let unnamed = self.proc_path().map_err(LockError::from)?;
                rustix::fs::linkat(CWD, &unnamed, CWD, path, AtFlags::SYMLINK_FOLLOW)
            }
        };
        match result {
            Ok(()) => {
                if let Some(temporary) = self.temporary.take() {
                    unlink(&temporary)?;
                }
                Ok(())
            }
            Err(Errno::EXIST) => Err(ShmError::AlreadyExists { path: path.to_path_buf() }),
            Err(error) => Err(OsError::new("linkat", path, error).into()),
        }
    }

    fn proc_path(&self) -> Result<PathBuf, ForkedError> {
        self.fd().proc_path()
    }

    /// The descriptor alone, once the file has its name.
    pub(crate) fn reopen(&self, path: &Path) -> Result<PrivateFd, LockError> {
        self.fd().reopen(path, OFlags::RDWR)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // A forked child has not made it, so it does not take it away.
        if let (Some(temporary), Ok(_)) = (&self.temporary, self.fd().get())
            && let Err(error) = unlink(temporary)
        {
            tracing::warn!(%error, "a temporary file is left; `ucm gc` removes it");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &ShmDir) -> Vec<String> {
        let entries = std::fs::read_dir(&dir.path).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_draft_has_no_name_until_it_is_linked_and_a_taken_name_is_refused() {
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        let dir = ShmDir::new(temp.path());
        for make in [Draft::create, Draft::create_named] {
            let path = dir.path.join("name");
            let mut first = make(&dir, "a", 8192).unwrap();
            let mut second = make(&dir, "b", 8192).unwrap();
            first.reserve().unwrap();
            assert!(!path.exists());
            first.link(&path).unwrap();
            assert!(matches!(second.link(&path), Err(ShmError::AlreadyExists { .. })));
            drop((first, second));
            assert_eq!(names(&dir), ["name"]);
            let stat = stat_path(&path).unwrap().unwrap();
            assert_eq!((stat.len_bytes, stat.links), (8192, 1));
            unlink(&path).unwrap();
            unlink(&path).unwrap();
        }
    }

    #[test]
    fn a_dropped_draft_leaves_nothing() {
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        let dir = ShmDir::new(temp.path());
        drop(Draft::create(&dir, "a", 4096).unwrap());
        drop(Draft::create_named(&dir, "b", 4096).unwrap());
        assert!(names(&dir).is_empty());
    }

    #[test]
    fn what_cannot_fit_is_refused_before_anything_is_made() {
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        let error = ShmDir::new(temp.path()).check_room(1 << 62).unwrap_err();
        assert!(matches!(error, ShmError::NoSpace { needed_bytes, .. } if needed_bytes == 1 << 62));
        assert!(error.to_string().contains("--shm-size"), "{error}");
    }

    #[test]
    fn a_file_system_that_fills_up_meanwhile_is_an_error_and_no_fatal_signal() {
        let temp = tempfile::tempdir().unwrap();
        let mount = |arguments: &[&str]| {
            let status = std::process::Command::new(arguments[0])
                .args(&arguments[1..])
                .arg(temp.path())
                .status();
            status.is_ok_and(|status| status.success())
        };
        if !mount(&["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "ucm-test"]) {
            eprintln!("SKIPPED: mounting a tmpfs is not permitted here, so nothing was tested");
            return;
        }
        let dir = ShmDir::new(temp.path());
        let needed = 8 << 20;
        let result = Draft::create(&dir, "a", needed).and_then(|draft| {
            let map = crate::mapping::Mapping::new(draft.fd(), &dir.path, needed, true)?;
            map.populate();
            draft.reserve()
        });
        let left = (names(&dir), dir.free_bytes().unwrap());
        assert!(mount(&["umount", "-l"]));
        match result.unwrap_err() {
            ShmError::NoSpace { needed_bytes, free_bytes, .. } => {
                assert_eq!(needed_bytes, needed);
                assert!((1..=1 << 20).contains(&free_bytes), "{free_bytes}");
            }
            other => panic!("{other}"),
        }
        assert_eq!(left, (Vec::new(), Some(1 << 20)));
    }
}
