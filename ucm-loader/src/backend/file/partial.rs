//! The file in which a block is assembled, by one process or by several.
//!
//! Every process that puts shards of a block has `tmp/<id>.part` open with a
//! shared `flock`, which says that somebody lives who may finish it. The last
//! one out removes it; so does the next opening of the store when all died.
//!
//! Each shard has a byte that is locked (open file description locks) while
//! its bytes and then its entry are written, so an entry that is there stands
//! for bytes that are there: a dead writer's half shard has none, and another
//! writer puts it again. A locked byte more, and one publishes: header (its
//! first page last), sync, rename. Nobody writes to a file that has a header.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno as LockErrno;
use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use ucm_core::key::{BlockId, ShardKey};
use ucm_core::limits::PAGE_BYTES;

use super::layout::{BlockLayout, Draft, ShardEntry};
#[cfg(test)]
use super::power;
use super::store::{Fsync, StoreDir, make_dir};
use crate::crash::crash_point;

/// Locked bytes: far behind the end, so that they lock nothing but names.
const LOCKS: i64 = 1 << 40;
/// The publisher's, behind those of the shards.
const PUBLISHER: i64 = LOCKS + (1 << 32);
/// Between two tries at a lock: waits are rare and as long as one write.
const LOCK_PAUSE: Duration = Duration::from_millis(1);

/// An open partial file. Dropping the last one of an unfinished block removes it.
pub(super) struct Partial {
    path: PathBuf,
    file: File,
    layout: BlockLayout,
    block: BlockId,
}

/// Why something was not done.
pub(super) enum Obstacle {
    /// A call failed.
    Io(&'static str, io::Error),
    /// Somebody else held the lock until the deadline.
    Late,
}

/// Names the call that failed.
fn at(call: &'static str) -> impl FnOnce(io::Error) -> Obstacle {
    move |error| Obstacle::Io(call, error)
}

impl Partial {
    /// Opens the block's partial file, or makes it.
    pub(super) fn open(
        dir: &StoreDir,
        block: BlockId,
        layout: BlockLayout,
        deadline: Instant,
    ) -> Result<Self, Obstacle> {
        let path = dir.root().join(format!("tmp/{block}.part"));
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        loop {
            let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR);
            let file = File::from(file.map_err(io::Error::from).map_err(at("open"))?);
            match flock(&file, FlockOperation::NonBlockingLockShared) {
                // Whoever has it alone is about to remove it.
                Err(Errno::WOULDBLOCK) => {}
                other => {
                    other.map_err(io::Error::from).map_err(at("flock"))?;
                    let found = rustix::fs::fstat(&file);
                    let found = found.map_err(io::Error::from).map_err(at("fstat"))?;
                    if found.st_nlink > 0 {
                        crash_point!(FileMade);
                        let length = layout.file_bytes();
                        if (found.st_size as u64) < length {
                            file.set_len(length).map_err(at("ftruncate"))?;
                            #[cfg(test)]
                            power::note(|| power::Op::Length(path.clone(), length));
                        }
                        return Ok(Self { path, file, layout, block });
                    }
                }
            }
            pause(deadline)?;
        }
    }

    /// Its name while it is unfinished.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Puts one shard, unless another process has put it.
    pub(super) fn put(
        &self,
        key: ShardKey,
        bytes: &[u8],
        checksum: Option<u64>,
        deadline: Instant,
    ) -> Result<(), Obstacle> {
        let _locked = self.lock(LOCKS + i64::from(key.shard), deadline)?;
        match self.draft()? {
            Draft::Headed => return Ok(()),
            Draft::Open(table) if table[key.shard as usize].is_some() => return Ok(()),
            Draft::Open(_) => {}
        }
        let offset = self.layout.shard_offset(key.shard);
        self.write(bytes, offset).map_err(at("pwrite"))?;
        crash_point!(FileShardWritten);
        let entry = ShardEntry { len_bytes: bytes.len() as u64, checksum };
        self.set_entry(key.shard, Some(entry))
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        #[cfg(test)]
        power::note(|| power::Op::Write(self.path.clone(), offset, bytes.to_vec()));
        self.file.write_all_at(bytes, offset)
    }

    /// The word that says that an entry is there comes last, and is one write
    /// of eight aligned bytes: no reader sees half of it.
    fn set_entry(&self, shard: u32, entry: Option<ShardEntry>) -> Result<(), Obstacle> {
        let [word, checksum] = BlockLayout::draft_entry(entry);
        let offset = BlockLayout::entry_offset(shard);
        self.write(&checksum, offset + 8).map_err(at("pwrite"))?;
        self.write(&word, offset).map_err(at("pwrite"))
    }

    /// What there is so far.
    pub(super) fn draft(&self) -> Result<Draft, Obstacle> {
        Ok(self.layout.draft(&self.header()?))
    }

    fn header(&self) -> Result<Vec<u8>, Obstacle> {
        let mut header = vec![0; self.layout.header_bytes() as usize];
        self.file.read_exact_at(&mut header, 0).map_err(at("pread"))?;
        Ok(header)
    }

    /// Which block it is going to be.
    pub(super) fn block(&self) -> BlockId {
        self.block
    }

    /// Whether this file has become the block.
    fn is_published(&self, dir: &StoreDir) -> Result<bool, Obstacle> {
        self.is_named(&dir.block_path(&self.block))
    }

    /// Whether it has a name: its own, or the block's.
    pub(super) fn is_reachable(&self, dir: &StoreDir) -> Result<bool, Obstacle> {
        Ok(self.is_published(dir)? || self.is_named(&self.path)?)
    }

    fn is_named(&self, path: &Path) -> Result<bool, Obstacle> {
        let mine = rustix::fs::fstat(&self.file).map_err(io::Error::from).map_err(at("fstat"))?;
        match rustix::fs::lstat(path) {
            Ok(named) => Ok((named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(Obstacle::Io("stat", error.into())),
        }
    }

    /// Makes the block visible if every shard is there; on return it is, by
    /// whomever. Not to be called by two threads of one opening at once.
    pub(super) fn publish(
        &self,
        dir: &StoreDir,
        fsync: Fsync,
        deadline: Instant,
    ) -> Result<(), Obstacle> {
        let _locked = self.lock(PUBLISHER, deadline)?;
        if self.is_published(dir)? {
            return Ok(());
        }
        let header = self.header()?;
        let table = match self.layout.draft(&header) {
            Draft::Open(table) => table.into_iter().collect::<Option<Vec<_>>>(),
            // Its publisher died, or failed, before the renaming.
            Draft::Headed => self.layout.decode(self.block, &header).ok(),
        };
        let Some(table) = table else {
            return Err(Obstacle::Io("publish", io::ErrorKind::InvalidData.into()));
        };
        let header = self.layout.encode(self.block, &table);
        let (first, rest) = header.split_at(PAGE_BYTES as usize);
        self.write(rest, PAGE_BYTES).map_err(at("pwrite"))?;
        self.write(first, 0).map_err(at("pwrite"))?;
        crash_point!(FileHeaderWritten);
        match fsync {
            Fsync::None => Ok(()),
            Fsync::Data => self.file.sync_data(),
            Fsync::Full => self.file.sync_all(),
        }
        .map_err(at("fsync"))?;
        #[cfg(test)]
        if fsync != Fsync::None {
            power::note(|| power::Op::Sync(self.path.clone()));
        }
        let name = dir.block_path(&self.block);
        // A file of that name holds the same block, and whoever has it open keeps it.
        rename(&self.path, &name).map_err(at("rename"))?;
        #[cfg(test)]
        power::note(|| power::Op::Rename(self.path.clone(), name.clone()));
        crash_point!(FileRenamed);
        if fsync == Fsync::Full {
            for parent in name.ancestors().skip(1).take(2) {
                File::open(parent).and_then(|dir| dir.sync_all()).map_err(at("fsync"))?;
            }
        }
        Ok(())
    }

    /// Takes back the entries of `shards`, unless the block is being published.
    pub(super) fn forget(
        &self,
        shards: impl Iterator<Item = u32>,
        deadline: Instant,
    ) -> Result<(), Obstacle> {
        let _locked = self.lock(PUBLISHER, deadline)?;
        if let Draft::Open(_) = self.draft()? {
            for shard in shards {
                self.set_entry(shard, None)?;
            }
        }
        Ok(())
    }

    /// Locks one byte against other openings, until the guard goes.
    fn lock(&self, byte: i64, deadline: Instant) -> Result<Locked<'_>, Obstacle> {
        loop {
            match set_lock(&self.file, byte, libc::F_WRLCK) {
                Ok(()) => return Ok(Locked { file: &self.file, byte }),
                Err(LockErrno::EAGAIN | LockErrno::EACCES) => pause(deadline)?,
                Err(error) => return Err(Obstacle::Io("fcntl", error.into())),
            }
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // Alone, and still unfinished under this name: then it goes. Nobody
        // can publish it meanwhile, because nobody else has it open.
        if flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_ok()
            && matches!(self.is_named(&self.path), Ok(true))
            && let Err(error) = fs::remove_file(&self.path)
        {
            // The next opening of the store finds it unlocked and tries again.
            tracing::warn!(path = %self.path.display(), %error, "cannot remove an unfinished block");
        }
    }
}

struct Locked<'a> {
    file: &'a File,
    byte: i64,
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if let Err(error) = set_lock(self.file, self.byte, libc::F_UNLCK) {
            tracing::warn!(%error, "a lock on a partial block was not given back");
        }
    }
}

fn set_lock(file: &File, byte: i64, kind: libc::c_int) -> Result<(), LockErrno> {
    let lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).map(|_| ())
}

fn pause(deadline: Instant) -> Result<(), Obstacle> {
    if Instant::now() >= deadline {
        return Err(Obstacle::Late);
    }
    std::thread::sleep(LOCK_PAUSE);
    Ok(())
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // The first block with this first byte.
            to.parent().map_or(Ok(()), make_dir)?;
            fs::rename(from, to)
        }
        other => other,
    }
}
