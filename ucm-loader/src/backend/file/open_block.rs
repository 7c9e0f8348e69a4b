//! A verified block file that is open, and how its bytes are read: direct where that works.
//!
//! Direct IO wants file offset, length and memory address on page boundaries.
//! Shards begin on pages, so a read goes direct as far as whole pages go, and
//! the rest of it (a tail, or everything when the memory is not aligned)
//! through the page cache. The two descriptors are of one and the same file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{Advice, FileType, Mode, OFlags};
use rustix::io::Errno;
use ucm_core::limits::PAGE_BYTES;
use ucm_core::sync::{AtomicU32, Ordering};

use super::layout::ShardEntry;

/// A link or a pipe under a block's name is not ours: it must neither lead
/// elsewhere nor block a thread.
const OPEN_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK);

/// A block file whose header has been checked.
pub(super) struct OpenBlock {
    pub(super) plain: File,
    pub(super) direct: Option<File>,
    pub(super) table: Vec<ShardEntry>,
}

/// One read of a shard's next bytes.
pub(super) struct Step<'a> {
    pub(super) file: &'a File,
    pub(super) len_bytes: usize,
    pub(super) is_direct: bool,
}

/// Whether a store reads directly, and whether that was ever refused.
pub(super) struct DirectIo {
    wanted: bool,
    refusals: AtomicU32,
}

impl DirectIo {
    pub(super) fn new(wanted: bool) -> Self {
        Self { wanted, refusals: AtomicU32::new(0) }
    }

    /// Notes that a file system does not do it; says so once.
    pub(super) fn refused(&self, path: &Path, errno: Errno) {
        if self.refusals.fetch_add(1, Ordering::Relaxed) == 0 {
            let errno = errno.raw_os_error();
            tracing::warn!(path = %path.display(), errno, "direct_io is not possible here; reading through the page cache");
        }
    }

    /// Opens `path`, for reading without following it anywhere.
    pub(super) fn open_plain(&self, path: &Path) -> Result<File, Errno> {
        let file = rustix::fs::open(path, OPEN_FLAGS, Mode::empty())?;
        if self.wanted {
            // The header is all that comes through the page cache; reading
            // ahead behind it would be read twice.
            rustix::fs::fadvise(&file, 0, None, Advice::Random).ok();
        }
        Ok(File::from(file))
    }

    /// The same file once more, for direct IO. `None` where it cannot be had.
    pub(super) fn open_direct(&self, path: &Path, plain: &File) -> Option<File> {
        if !self.wanted {
            return None;
        }
        let file = match rustix::fs::open(path, OPEN_FLAGS | OFlags::DIRECT, Mode::empty()) {
            Ok(file) => File::from(file),
            // Gone or replaced since: the plain descriptor still reads it.
            Err(Errno::NOENT) => return None,
            Err(errno) => {
                self.refused(path, errno);
                return None;
            }
        };
        let (one, two) = (rustix::fs::fstat(plain).ok()?, rustix::fs::fstat(&file).ok()?);
        let is_same = (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino);
        is_same.then_some(file)
    }
}

/// Whether `file` is what a block can be; its length if so.
pub(super) fn regular_length(file: &File) -> Result<Option<u64>, Errno> {
    let found = rustix::fs::fstat(file)?;
    let is_regular = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    Ok(is_regular.then_some(found.st_size as u64))
}

impl OpenBlock {
    /// How to read the next bytes of a shard: `left` of them to `address`.
    pub(super) fn step(&self, address: usize, offset: u64, left: usize, direct: bool) -> Step<'_> {
        let page = PAGE_BYTES as usize;
        let whole = left - left % page;
        match &self.direct {
            Some(file)
                if direct
                    && whole > 0
                    && address.is_multiple_of(page)
                    && offset.is_multiple_of(PAGE_BYTES) =>
            {
                Step { file, len_bytes: whole, is_direct: true }
            }
            _ => Step { file: &self.plain, len_bytes: left, is_direct: false },
        }
    }

    /// Reads until `target` is full or the file ends; says how much came.
    pub(super) fn read(
        &self,
        target: &mut [u8],
        offset: u64,
        path: &Path,
        io: &DirectIo,
    ) -> io::Result<u64> {
        let mut got = 0;
        let mut direct = true;
        while got < target.len() {
            let rest = &mut target[got..];
            let at = offset + got as u64;
            let Step { file, len_bytes, is_direct } =
                self.step(rest.as_ptr() as usize, at, rest.len(), direct);
            match file.read_at(&mut rest[..len_bytes], at) {
                Ok(0) => break,
                Ok(more) => got += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_direct && is_refusal(error.raw_os_error()) => {
                    io.refused(path, Errno::INVAL);
                    direct = false;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(got as u64)
    }
}

/// What file systems and devices say that cannot do a direct read.
pub(super) fn is_refusal(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// Reads through the page cache until `target` is full or the file ends.
pub(super) fn read_at(file: &File, target: &mut [u8], offset: u64) -> io::Result<u64> {
    let mut got = 0;
    while got < target.len() {
        match file.read_at(&mut target[got..], offset + got as u64) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got as u64)
}
