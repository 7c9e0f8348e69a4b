//! The directory of a store: its parts, its description, what dead writers left.
//!
//! ```text
//! DIR/store.toml          what the store was made for; written once
//! DIR/blocks/ab/<id>.kv   complete blocks, by the id's first byte
//! DIR/tmp/                blocks being written, each locked by its writers
//! DIR/gc.lock             held by whoever removes cold blocks
//! DIR/bad/                objects that turned out wrong, for people to look at
//! ```

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ucm_core::key::BlockId;
use ucm_core::limits::{MAX_SHARD_BYTES, MIN_SHARD_BYTES};
use ucm_core::sync::{AtomicU64, Ordering};

use super::layout::{BlockLayout, MAX_SHARDS_PER_BLOCK};
use crate::backend::traits::{BackendError, OpenError, StoreGeometry};

const FORMAT: u32 = 1;
const DESCRIPTION: &str = "store.toml";
/// Longer than any description, shorter than a mistake that hurts.
const MAX_DESCRIPTION_BYTES: u64 = 64 << 10;

/// How hard a block is pressed onto the medium before it becomes visible.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fsync {
    /// Not at all: after a crash of the machine a visible block may be
    /// damaged, which its checksums find.
    None,
    /// The block's bytes, before its name.
    #[default]
    Data,
    /// The bytes, then the directory, so that the name survives as well.
    Full,
}

/// `store.toml`. The tag is text because TOML's integers are signed.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    format: u32,
    shard_bytes: u64,
    shards_per_block: u32,
    content_tag: String,
}

/// An opened store directory.
#[derive(Debug)]
pub struct StoreDir {
    root: PathBuf,
    /// Distinguishes this opening's temporary files from all others'.
    nonce: u64,
    next_file: AtomicU64,
}

/// A failed call on one of a store's files.
pub(super) fn io_error(operation: &'static str, path: &Path, error: &io::Error) -> BackendError {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    BackendError::Io { operation, path: path.to_owned(), errno }
}

fn open_error(operation: &'static str, path: &Path, error: &io::Error) -> OpenError {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    let path = path.to_owned();
    match errno {
        libc::EROFS | libc::EACCES | libc::EPERM => OpenError::ReadOnly { path, errno },
        _ => OpenError::Io { operation, path, errno },
    }
}

fn check(key: &'static str, value: u64, min: u64, max: u64) -> Result<(), OpenError> {
    let out = OpenError::OutOfRange { key, value, min, max };
    if (min..=max).contains(&value) { Ok(()) } else { Err(out) }
}

/// Refuses sizes that no store can have.
pub(in crate::backend) fn check_geometry(geometry: &StoreGeometry) -> Result<(), OpenError> {
    check("shard_bytes", geometry.shard_bytes, MIN_SHARD_BYTES, MAX_SHARD_BYTES)?;
    let shards = geometry.shards_per_block.into();
    check("shards_per_block", shards, 1, MAX_SHARDS_PER_BLOCK.into())
}

impl StoreDir {
    /// Opens the store in `root`, or makes an empty directory into one.
    pub fn open(root: &Path, geometry: &StoreGeometry) -> Result<Self, OpenError> {
        check_geometry(geometry)?;
        let found = match fs::metadata(root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(OpenError::Missing { path: root.to_owned() });
            }
            other => other.map_err(|error| open_error("stat", root, &error))?,
        };
        if !found.is_dir() {
            return Err(OpenError::NotADirectory { path: root.to_owned() });
        }
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let nonce =
            crate::content::mix(since_epoch.as_nanos() as u64 ^ u64::from(std::process::id()));
        let store = Self { root: root.to_owned(), nonce, next_file: AtomicU64::new(0) };
        for part in ["blocks", "tmp", "bad"] {
            let path = root.join(part);
            make_dir(&path).map_err(|error| open_error("mkdir", &path, &error))?;
        }
        store.describe(geometry)?;
        store.sweep();
        Ok(store)
    }

    /// Compares the description with `geometry`, or writes the first one.
    /// Making its temporary file is also the probe for a read-only store.
    fn describe(&self, geometry: &StoreGeometry) -> Result<(), OpenError> {
        let path = self.root.join(DESCRIPTION);
        let (temporary, mut file) =
            self.temporary("store").map_err(|error| open_error("open", &self.root, &error))?;
        let written = self.link_description(geometry, &temporary, &mut file, &path);
        let removed = fs::remove_file(&temporary);
        written?;
        removed.map_err(|error| open_error("unlink", &temporary, &error))?;
        let stored = read_description(&path)?;
        if stored == *geometry {
            Ok(())
        } else {
            Err(OpenError::OtherGeometry { path: self.root.clone(), stored, asked: *geometry })
        }
    }

    /// Links a description into place unless there is one: the first opener's stays.
    fn link_description(
        &self,
        geometry: &StoreGeometry,
        temporary: &Path,
        file: &mut File,
        path: &Path,
    ) -> Result<(), OpenError> {
        if path.exists() {
            return Ok(());
        }
        let text = format!(
            "format = {FORMAT}\nshard_bytes = {}\nshards_per_block = {}\ncontent_tag = \"{:#018x}\"\n",
            geometry.shard_bytes, geometry.shards_per_block, geometry.content_tag
        );
        io::Write::write_all(file, text.as_bytes())
            .and_then(|()| file.sync_all())
            .map_err(|error| open_error("write", temporary, &error))?;
        match fs::hard_link(temporary, path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other.map_err(|error| open_error("link", path, &error)),
        }
    }

    /// Removes temporary files whose writers are dead. Nothing depends on it
    /// succeeding, so a file that resists is left for the next opening.
    fn sweep(&self) {
        let Ok(entries) = fs::read_dir(self.root.join("tmp")) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let Ok(file) = rustix::fs::open(&path, flags, Mode::empty()) else { continue };
            // The kernel frees a writer's lock when its last thread is gone,
            // so nobody is called dead by mistake; see `temporary` for the
            // writer that has made its file but not yet locked it.
            // And since it can be published and its name be taken by another
            // before the lock is had, the name is looked at again.
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
                && is_named(&file, &path)
                && fs::remove_file(&path).is_ok()
            {
                tracing::info!(path = %path.display(), "removed a dead writer's unfinished block");
            }
        }
    }

    /// A new locked file in `tmp/`. The lock says that its writer lives.
    pub(super) fn temporary(&self, stem: &str) -> io::Result<(PathBuf, File)> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        loop {
            let number = self.next_file.fetch_add(1, Ordering::Relaxed);
            let (pid, nonce) = (std::process::id(), self.nonce);
            let path = self.root.join(format!("tmp/{stem}.{pid}.{nonce:016x}.{number}"));
            let file = match rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR) {
                Err(Errno::EXIST) => continue,
                other => other?,
            };
            // A sweeper may have come between the two calls: then it holds
            // the lock, or the file has lost its name. Each such loss is
            // somebody's opening of the store, so this ends.
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => continue,
                other => other?,
            }
            if rustix::fs::fstat(&file)?.st_nlink > 0 {
                return Ok((path, File::from(file)));
            }
        }
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where `block` is, or would be.
    pub fn block_path(&self, block: &BlockId) -> PathBuf {
        self.root.join(format!("blocks/{:02x}/{block}.kv", block.0[0]))
    }

    /// Moves an object that turned out wrong out of the way. `false` if
    /// somebody else has already replaced or moved it.
    pub(super) fn put_aside(&self, block: &BlockId, bad: &File) -> io::Result<bool> {
        let path = self.block_path(block);
        // Another writer may have put a good copy in its place meanwhile.
        // Between this look and the rename one more could: then that copy is
        // lost and the block is a miss, which is safe.
        let (named, held) = match rustix::fs::stat(&path) {
            Err(Errno::NOENT) => return Ok(false),
            named => (named?, rustix::fs::fstat(bad)?),
        };
        if (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino) {
            return Ok(false);
        }
        let number = self.next_file.fetch_add(1, Ordering::Relaxed);
        let aside = format!("bad/{block}.{}.{:016x}.{number}", std::process::id(), self.nonce);
        fs::rename(&path, self.root.join(aside))?;
        Ok(true)
    }
}

/// Whether `path` is the name of `file`.
fn is_named(file: &impl AsFd, path: &Path) -> bool {
    let (Ok(named), Ok(held)) = (rustix::fs::lstat(path), rustix::fs::fstat(file)) else {
        return false;
    };
    (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
}

/// Makes a directory unless it is there.
pub(super) fn make_dir(path: &Path) -> io::Result<()> {
    match rustix::fs::mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn read_description(path: &Path) -> Result<StoreGeometry, OpenError> {
    let not_a_store = || OpenError::NotAStore { path: path.to_owned() };
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(MAX_DESCRIPTION_BYTES).read_to_string(&mut text))
        .map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => not_a_store(),
            _ => open_error("read", path, &error),
        })?;
    let found: Description = toml::from_str(&text).map_err(|_| not_a_store())?;
    let tag = found.content_tag.strip_prefix("0x").ok_or_else(not_a_store)?;
    if found.format != FORMAT {
        return Err(not_a_store());
    }
    Ok(StoreGeometry {
        shard_bytes: found.shard_bytes,
        shards_per_block: found.shards_per_block,
        content_tag: u64::from_str_radix(tag, 16).map_err(|_| not_a_store())?,
    })
}

impl From<StoreGeometry> for BlockLayout {
    fn from(geometry: StoreGeometry) -> Self {
        let StoreGeometry { shard_bytes, shards_per_block, .. } = geometry;
        Self { shard_bytes, shards_per_block }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: StoreGeometry =
        StoreGeometry { shard_bytes: 4096, shards_per_block: 2, content_tag: u64::MAX };

    #[test]
    fn a_missing_directory_and_a_file_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("nowhere");
        let error = StoreDir::open(&missing, &GEOMETRY).unwrap_err();
        assert_eq!(error, OpenError::Missing { path: missing.clone() });
        fs::write(&missing, "").unwrap();
        let error = StoreDir::open(&missing, &GEOMETRY).unwrap_err();
        assert_eq!(error, OpenError::NotADirectory { path: missing });
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_refused_as_read_only() {
        // Even root cannot make directories in sysfs.
        let path = Path::new("/sys/kernel");
        if !path.is_dir() {
            eprintln!("SKIPPED a_directory_that_cannot_be_written: no {}", path.display());
            return;
        }
        let error = StoreDir::open(path, &GEOMETRY).unwrap_err();
        assert!(matches!(error, OpenError::ReadOnly { .. }), "{error}");
    }

    #[test]
    fn a_store_of_another_geometry_is_refused_with_both_named() {
        let dir = tempfile::tempdir().unwrap();
        StoreDir::open(dir.path(), &GEOMETRY).unwrap();
        StoreDir::open(dir.path(), &GEOMETRY).unwrap();
        let changes: [fn(&mut StoreGeometry); 3] =
            [|g| g.shard_bytes = 8192, |g| g.shards_per_block = 4, |g| g.content_tag = 1];
        for change in changes {
            let mut asked = GEOMETRY;
            change(&mut asked);
            let error = StoreDir::open(dir.path(), &asked).unwrap_err();
            let path = dir.path().to_owned();
            assert_eq!(error, OpenError::OtherGeometry { path, stored: GEOMETRY, asked });
        }
    }

    #[test]
    fn a_garbled_description_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(DESCRIPTION);
        for garbage in ["", "format = 1", "format = 2\nshard_bytes = 1", "\u{0}\u{1}"] {
            fs::write(&path, garbage).unwrap();
            let error = StoreDir::open(dir.path(), &GEOMETRY).unwrap_err();
            assert_eq!(error, OpenError::NotAStore { path: path.clone() });
            assert_eq!(fs::read_to_string(&path).unwrap(), garbage);
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused_with_their_limits() {
        let dir = tempfile::tempdir().unwrap();
        let zero = StoreGeometry { shard_bytes: 0, ..GEOMETRY };
        let error = StoreDir::open(dir.path(), &zero).unwrap_err();
        assert!(matches!(error, OpenError::OutOfRange { key: "shard_bytes", value: 0, .. }));
        let none = StoreGeometry { shards_per_block: 0, ..GEOMETRY };
        let error = StoreDir::open(dir.path(), &none).unwrap_err();
        assert!(matches!(error, OpenError::OutOfRange { key: "shards_per_block", .. }));
    }

    #[test]
    fn opening_removes_only_the_temporary_files_of_the_dead() {
        let dir = tempfile::tempdir().unwrap();
        let store = StoreDir::open(dir.path(), &GEOMETRY).unwrap();
        let (living, _lock) = store.temporary("living").unwrap();
        let (dead, lock) = store.temporary("dead").unwrap();
        drop(lock);
        StoreDir::open(dir.path(), &GEOMETRY).unwrap();
        assert!(living.exists());
        assert!(!dead.exists());
    }
}
