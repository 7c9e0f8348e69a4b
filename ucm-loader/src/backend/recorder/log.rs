//! A process's event log: fixed records in a shared mapping of a file.
//!
//! A record that has been written to the mapping is in the file, whatever
//! then happens to the process: the pages are the kernel's. The file grows by
//! chunks; the unused rest of the last chunk is zero and is skipped by readers.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytemuck::{Pod, Zeroable};
use memmap2::{MmapMut, MmapOptions};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::time::{ClockId, clock_gettime};
use ucm_core::key::{BlockId, ShardKey};
use ucm_core::slot::meta::LoadErrorCode;
use ucm_core::sync::{Ordering, fence};

use super::OK;

const RECORD_BYTES: usize = 64;
/// Grown by so much at a time: 16,384 records.
const CHUNK_BYTES: usize = 1 << 20;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u32)]
pub enum EventKind {
    /// A load was handed to the backend.
    LoadStart = 1,
    /// It has ended, with its outcome.
    LoadEnd = 2,
    /// A copy of the key became READY.
    Published = 3,
    /// A READY copy ceased to be (evicted, or withdrawn to be loaded anew).
    Evicted = 4,
    /// The process `outcome` names was found dead: its loads are over.
    Died = 5,
    /// The whole cache was emptied, or another one begins.
    Cleared = 6,
}

impl EventKind {
    const ALL: [Self; 6] =
        [Self::LoadStart, Self::LoadEnd, Self::Published, Self::Evicted, Self::Died, Self::Cleared];
}

/// A record as it lies in the file. `kind` 0 is a record that was never written.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Record {
    time_ns: u64,
    /// Which load of the process, for a start and its end; else its own number.
    number: u64,
    block: [u8; 16],
    shard: u32,
    rank: u32,
    pid: u32,
    outcome: i32,
    reserved: [u32; 3],
    /// Written last.
    kind: u32,
}
const _: () =
    assert!(size_of::<Record>() == RECORD_BYTES && CHUNK_BYTES.is_multiple_of(RECORD_BYTES));

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// When, on CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// What.
    pub kind: EventKind,
    /// To which key (the default key for [`EventKind::Died`] and
    /// [`EventKind::Cleared`]).
    pub key: ShardKey,
    /// In which rank.
    pub rank: u32,
    /// In which process.
    pub pid: u32,
    /// A number that a load's start and end share within their process.
    pub number: u64,
    /// 0 or a load's error; for [`EventKind::Died`], the dead process's id.
    pub outcome: LoadErrorCode,
}

/// Why a log could not be made or read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation} failed with errno {errno} on event log {}", path.display())]
pub struct LogError {
    /// The call.
    pub operation: &'static str,
    /// The log, or the directory of logs.
    pub path: PathBuf,
    /// Its error number.
    pub errno: i32,
}

impl LogError {
    fn new(operation: &'static str, path: &Path, error: &io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        Self { operation, path: path.to_owned(), errno }
    }
}

/// Nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

struct Chunk {
    map: MmapMut,
    used: usize,
    /// Where in the file the next chunk begins.
    end: u64,
    /// Records so far, which number the next one.
    count: u64,
    lost: u64,
}

/// The log that this process writes.
pub struct EventLog {
    path: PathBuf,
    file: File,
    rank: u32,
    pid: u32,
    chunk: Mutex<Chunk>,
}

/// A chunk of the file at `offset`, with its pages reserved: one that could
/// not be had when it is written to would be a SIGBUS.
fn grow(file: &File, path: &Path, offset: u64) -> Result<MmapMut, LogError> {
    rustix::fs::fallocate(file, FallocateFlags::empty(), offset, CHUNK_BYTES as u64)
        .map_err(|error| LogError::new("fallocate", path, &error.into()))?;
    // SAFETY: this process made the file under a name of its own and is its
    // only writer; readers copy it with `read`; nobody shortens it.
    unsafe { MmapOptions::new().offset(offset).len(CHUNK_BYTES).map_mut(file) }
        .map_err(|error| LogError::new("mmap", path, &error))
}

impl EventLog {
    /// Makes `events.<rank>.<pid>.bin` in `dir`, or goes on with another
    /// number behind it if this process has made that one already.
    pub fn create(dir: &Path, rank: u32) -> Result<Self, LogError> {
        let pid = std::process::id();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let (path, file) = (0_u32..)
            .find_map(|again| {
                let suffix = if again == 0 { String::new() } else { format!(".{again}") };
                let path = dir.join(format!("events.{rank}.{pid}{suffix}.bin"));
                match rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR) {
                    Ok(file) => Some(Ok((path, File::from(file)))),
                    Err(rustix::io::Errno::EXIST) if again < 1000 => None,
                    Err(error) => Some(Err(LogError::new("open", &path, &error.into()))),
                }
            })
            .unwrap_or_else(|| {
                let errno = libc::EEXIST;
                Err(LogError { operation: "open", path: dir.to_owned(), errno })
            })?;
        let map = grow(&file, &path, 0)?;
        let chunk = Chunk { map, used: 0, end: CHUNK_BYTES as u64, count: 0, lost: 0 };
        Ok(Self { path, file, rank, pid, chunk: Mutex::new(chunk) })
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Events that could not be written because the file could not grow. A
    /// count from a log that has lost some proves nothing.
    pub fn lost(&self) -> u64 {
        self.lock().lost
    }

    /// Writes an event of now and returns its number.
    pub fn record(&self, kind: EventKind, key: &ShardKey, outcome: LoadErrorCode) -> u64 {
        self.write(kind, key, outcome, None, None)
    }

    /// Writes an event that happened at `time_ns` (see [`now_ns`]).
    ///
    /// For an event whose success is known only afterwards: the clock is read
    /// before an eviction is committed, and the event written if it was. Read
    /// after it, the next load of the key could seem to come first.
    pub fn record_at(&self, kind: EventKind, key: &ShardKey, time_ns: u64) -> u64 {
        self.write(kind, key, OK, None, Some(time_ns))
    }

    /// Notes that the process `pid` was found dead.
    pub fn record_death(&self, pid: u32) -> u64 {
        self.record(EventKind::Died, &ShardKey::default(), LoadErrorCode(pid as i32))
    }

    /// Writes the end of the load whose start has the number `start`.
    pub fn record_end(&self, start: u64, key: &ShardKey, outcome: LoadErrorCode) {
        self.write(EventKind::LoadEnd, key, outcome, Some(start), None);
    }

    fn lock(&self) -> MutexGuard<'_, Chunk> {
        self.chunk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(
        &self,
        kind: EventKind,
        key: &ShardKey,
        outcome: LoadErrorCode,
        number: Option<u64>,
        time_ns: Option<u64>,
    ) -> u64 {
        let mut chunk = self.lock();
        chunk.count += 1;
        let number = number.unwrap_or(chunk.count);
        if chunk.used == CHUNK_BYTES {
            match grow(&self.file, &self.path, chunk.end) {
                Ok(map) => {
                    chunk.map = map;
                    chunk.used = 0;
                    chunk.end += CHUNK_BYTES as u64;
                }
                Err(error) => {
                    if chunk.lost == 0 {
                        tracing::error!(%error, "events are lost from here on");
                    }
                    chunk.lost += 1;
                    return number;
                }
            }
        }
        let record = Record {
            // Read under the lock, so that a file is in the order of its clock
            // (but for events that bring an earlier time along).
            time_ns: time_ns.unwrap_or_else(now_ns),
            number,
            block: key.block.0,
            shard: key.shard,
            rank: self.rank,
            pid: self.pid,
            outcome: outcome.0,
            reserved: [0; 3],
            kind: kind as u32,
        };
        let bytes = bytemuck::bytes_of(&record);
        let (body, kind) = bytes.split_at(RECORD_BYTES - size_of::<u32>());
        let at = chunk.used;
        chunk.map[at..at + body.len()].copy_from_slice(body);
        // A kill between the two leaves a record of kind 0, which is skipped;
        // the fence keeps the compiler from turning the order round.
        fence(Ordering::Release);
        chunk.map[at + body.len()..at + RECORD_BYTES].copy_from_slice(kind);
        chunk.used += RECORD_BYTES;
        number
    }
}

/// The events of all logs in `dir`, in the order of their times. Records that
/// were never finished are skipped.
pub fn read_events(dir: &Path) -> Result<Vec<Event>, LogError> {
    let mut events = Vec::new();
    let entries = std::fs::read_dir(dir).map_err(|error| LogError::new("opendir", dir, &error))?;
    for entry in entries {
        let path = entry.map_err(|error| LogError::new("readdir", dir, &error))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with("events.") && name.ends_with(".bin") {
            read_log(&path, &mut events)?;
        }
    }
    // At equal times an end comes before a start, so that back to back is not
    // taken for side by side.
    let order = |kind| EventKind::ALL.len() - kind as usize;
    events.sort_by_key(|event: &Event| (event.time_ns, order(event.kind)));
    Ok(events)
}

fn read_log(path: &Path, events: &mut Vec<Event>) -> Result<(), LogError> {
    let failed = |operation| move |error: io::Error| LogError::new(operation, path, &error);
    let mut file = File::open(path).map_err(failed("open"))?;
    let mut chunk = Vec::new();
    loop {
        chunk.clear();
        let part = (&mut file).take(CHUNK_BYTES as u64);
        let got = { part }.read_to_end(&mut chunk).map_err(failed("read"))?;
        if got == 0 {
            return Ok(());
        }
        let records = chunk.chunks_exact(RECORD_BYTES).map(bytemuck::pod_read_unaligned::<Record>);
        events.extend(records.filter_map(event));
    }
}

/// `None` for a record that is not one.
fn event(record: Record) -> Option<Event> {
    let kind = EventKind::ALL.into_iter().find(|kind| *kind as u32 == record.kind)?;
    Some(Event {
        time_ns: record.time_ns,
        kind,
        key: ShardKey::new(BlockId(record.block), record.shard),
        rank: record.rank,
        pid: record.pid,
        number: record.number,
        outcome: LoadErrorCode(record.outcome),
    })
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn key(number: u64) -> ShardKey {
        ShardKey::new(BlockId::from_words(number, 0), 1)
    }

    #[test]
    fn events_of_several_logs_come_back_merged_by_time() {
        let dir = tempfile::tempdir().unwrap();
        let logs =
            [EventLog::create(dir.path(), 0).unwrap(), EventLog::create(dir.path(), 1).unwrap()];
        for number in 0..10 {
            logs[number as usize % 2].record(EventKind::Published, &key(number), OK);
        }
        logs[0].record_at(EventKind::Evicted, &key(99), 1);
        let events = read_events(dir.path()).unwrap();
        let numbers: Vec<u64> = events.iter().map(|event| event.key.block.words().0).collect();
        assert_eq!(numbers, [99, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert!(events[1..].iter().enumerate().all(|(n, event)| event.rank == n as u32 % 2));
        assert!(events.iter().all(|event| event.pid == std::process::id() && event.key.shard == 1));
    }

    #[test]
    fn a_log_outgrows_its_first_chunk_without_losing_an_event() {
        let dir = tempfile::tempdir().unwrap();
        let log = EventLog::create(dir.path(), 0).unwrap();
        let many = 2 * (CHUNK_BYTES / RECORD_BYTES) as u64 + 5;
        (0..many).for_each(|number| _ = log.record(EventKind::LoadStart, &key(number), OK));
        let events = read_events(dir.path()).unwrap();
        assert_eq!(events.len() as u64, many);
        assert!(events.iter().zip(0..).all(|(event, number)| event.key == key(number)));
        assert_eq!(log.lost(), 0);
    }

    #[test]
    fn a_second_log_of_the_same_rank_and_process_has_its_own_file() {
        let dir = tempfile::tempdir().unwrap();
        let logs =
            [EventLog::create(dir.path(), 0).unwrap(), EventLog::create(dir.path(), 0).unwrap()];
        logs.iter().for_each(|log| _ = log.record(EventKind::Cleared, &key(0), OK));
        assert_eq!(read_events(dir.path()).unwrap().len(), 2);
    }

    #[test]
    fn a_missing_directory_is_a_typed_error() {
        let dir = tempfile::tempdir().unwrap();
        let nowhere = dir.path().join("nowhere");
        assert_eq!(
            EventLog::create(&nowhere, 0).err().map(|error| error.errno),
            Some(libc::ENOENT)
        );
        assert_eq!(read_events(&nowhere).unwrap_err().errno, libc::ENOENT);
    }

    const CHILD: &str = "UCM_TEST_EVENT_LOG_DIR";

    /// Does nothing by itself: the next test runs it as another process.
    #[test]
    fn the_child_that_is_killed_while_it_records() {
        let Some(dir) = std::env::var_os(CHILD) else { return };
        let log = EventLog::create(Path::new(&dir), 3).unwrap();
        (0..1000).for_each(|number| _ = log.record(EventKind::LoadStart, &key(number), OK));
        let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
    }

    #[test]
    fn a_killed_process_has_left_every_event_it_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let me = std::env::current_exe().unwrap();
        let child = "backend::recorder::log::tests::the_child_that_is_killed_while_it_records";
        let status = Command::new(me)
            .args(["--exact", child])
            .env(CHILD, dir.path())
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(!status.success());
        let events = read_events(dir.path()).unwrap();
        assert_eq!(events.len(), 1000);
        assert!(events.iter().all(|event| event.rank == 3));
    }
}
