//! The memory store's shared file: its layout, and checked access to its parts.
//!
//! ```text
//! header page | table: capacity x 2 words | records | pages of shards
//! ```
//! A table word is 0 or `fingerprint << 32 | slot + 1`. A record is the block's
//! id (2 words) and per shard its length (top bit: has a checksum) and checksum.

use std::fs::File;
use std::mem::size_of;
use std::path::{Path, PathBuf};

use memmap2::MmapRaw;
use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use ucm_core::limits::PAGE_BYTES;
use ucm_core::sync::{AtomicU64, Ordering};

use crate::backend::traits::{OpenError, StoreGeometry};

const MAGIC: u64 = u64::from_le_bytes(*b"UCMMEM01");
/// Keys that can be told to fail at the same time.
pub(super) const PLANTED: usize = 64;
/// Bounds what a foreign header can make this process compute with.
const MAX_BLOCKS: u64 = 1 << 30;
const WORD: u64 = size_of::<AtomicU64>() as u64;

/// One key whose next loads fail. `remaining` guards the rest.
#[repr(C)]
pub(super) struct Planted {
    pub(super) key_low: AtomicU64,
    pub(super) key_high: AtomicU64,
    pub(super) shard: AtomicU64,
    pub(super) remaining: AtomicU64,
}

/// The first page. Everything but `magic` to `content_tag` changes at run time.
#[repr(C)]
pub(super) struct Header {
    magic: AtomicU64,
    capacity_blocks: AtomicU64,
    shards_per_block: AtomicU64,
    shard_bytes: AtomicU64,
    content_tag: AtomicU64,
    /// The next slot nobody has had; may run past the capacity.
    pub(super) next_slot: AtomicU64,
    /// Slept before every load.
    pub(super) latency_ns: AtomicU64,
    /// Loads of a million that fail.
    pub(super) failures_ppm: AtomicU64,
    pub(super) failure_seed: AtomicU64,
    /// Loads so far, by all processes.
    pub(super) loads: AtomicU64,
    pub(super) planted: [Planted; PLANTED],
}
const _: () = assert!(size_of::<Header>() as u64 <= PAGE_BYTES);

/// Where the parts are, in bytes from the start of the file.
#[derive(Clone, Copy)]
struct Parts {
    table_words: u64,
    records: u64,
    record_words: u64,
    data: u64,
    stride: u64,
    total: u64,
}

impl Parts {
    /// `None` when the sizes do not fit into 64 bits.
    fn new(geometry: &StoreGeometry, capacity_blocks: u64) -> Option<Self> {
        let shards = u64::from(geometry.shards_per_block);
        let table_words = capacity_blocks.checked_mul(2)?.checked_next_power_of_two()?;
        let records = PAGE_BYTES.checked_add(table_words.checked_mul(WORD)?)?;
        let record_words = 2 + 2 * shards;
        let record_bytes = capacity_blocks.checked_mul(record_words)?.checked_mul(WORD)?;
        let data = records.checked_add(record_bytes)?.checked_next_multiple_of(PAGE_BYTES)?;
        let stride = geometry.shard_bytes.checked_next_multiple_of(PAGE_BYTES)?;
        let data_bytes = capacity_blocks.checked_mul(shards)?.checked_mul(stride)?;
        let total = data.checked_add(data_bytes)?;
        Some(Self { table_words, records, record_words, data, stride, total })
    }
}

/// The mapped file of one store.
pub(super) struct StoreMap {
    map: MmapRaw,
    parts: Parts,
    pub(super) capacity_blocks: u64,
    geometry: StoreGeometry,
}

fn io(operation: &'static str, path: &Path, error: Errno) -> OpenError {
    OpenError::Io { operation, path: path.to_owned(), errno: error.raw_os_error() }
}

impl StoreMap {
    /// Opens the file at `path`, or makes it.
    pub(super) fn open(
        path: &Path,
        geometry: &StoreGeometry,
        capacity_blocks: u64,
    ) -> Result<Self, OpenError> {
        let out = |key, value, max| OpenError::OutOfRange { key, value, min: 1, max };
        if !(1..=MAX_BLOCKS).contains(&capacity_blocks) {
            return Err(out("capacity_blocks", capacity_blocks, MAX_BLOCKS));
        }
        let parts = Parts::new(geometry, capacity_blocks)
            .filter(|parts| parts.total <= i64::MAX as u64)
            .ok_or_else(|| out("capacity_blocks", capacity_blocks, MAX_BLOCKS))?;
        let made = make(path, geometry, capacity_blocks, &parts)?;
        let file = match made {
            Some(file) => file,
            None => open_existing(path)?,
        };
        let length = rustix::fs::fstat(&file).map_err(|error| io("fstat", path, error))?.st_size;
        let map = map(&file, path)?;
        // Only a file that has at least its header may be looked at.
        let store = Self { map, parts, capacity_blocks, geometry: *geometry };
        // SYNC(memory.magic): Acquire; pairs with the Release store in the header's making.
        if (length as u64) < PAGE_BYTES || store.header().magic.load(Ordering::Acquire) != MAGIC {
            return Err(OpenError::NotAStore { path: path.to_owned() });
        }
        let stored = store.header().geometry(path)?;
        let stored_blocks = store.header().capacity_blocks.load(Ordering::Relaxed);
        if stored != *geometry {
            return Err(OpenError::OtherGeometry {
                path: path.to_owned(),
                stored,
                asked: *geometry,
            });
        }
        if stored_blocks != capacity_blocks {
            let (value, only) = (capacity_blocks, stored_blocks);
            return Err(OpenError::OutOfRange {
                key: "capacity_blocks",
                value,
                min: only,
                max: only,
            });
        }
        if length as u64 != parts.total {
            return Err(OpenError::NotAStore { path: path.to_owned() });
        }
        Ok(store)
    }

    /// A pointer `offset` bytes into the file, with `len` bytes behind it.
    fn at(&self, offset: u64, len: u64) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.map.len() as u64));
        // SAFETY: just checked to lie within the mapping.
        unsafe { self.map.as_mut_ptr().add(offset as usize) }
    }

    fn words(&self, offset: u64, count: u64) -> &[AtomicU64] {
        let first = self.at(offset, count * WORD).cast::<AtomicU64>();
        // SAFETY: in bounds by `at`; offsets here are multiples of a word in a
        // page-aligned mapping; any bits are an atomic; the borrow keeps the
        // mapping, whose words every process accesses atomically.
        unsafe { std::slice::from_raw_parts(first, count as usize) }
    }

    /// The header. The mapping is at least a page once `open` has returned.
    pub(super) fn header(&self) -> &Header {
        let header = self.at(0, size_of::<Header>() as u64).cast::<Header>();
        // SAFETY: in bounds by `at`, at the start of a page, atomics only.
        unsafe { &*header }
    }

    /// The hash table.
    pub(super) fn table(&self) -> &[AtomicU64] {
        self.words(PAGE_BYTES, self.parts.table_words)
    }

    /// The record of `slot`, which is below the capacity.
    pub(super) fn record(&self, slot: u32) -> &[AtomicU64] {
        let Parts { records, record_words, .. } = self.parts;
        self.words(records + u64::from(slot) * record_words * WORD, record_words)
    }

    /// The bytes of one shard of `slot`: `len` of them, at most the shard size.
    pub(super) fn shard(&self, slot: u32, shard: u32, len: u64) -> *mut u8 {
        let Parts { data, stride, .. } = self.parts;
        let number = u64::from(slot) * u64::from(self.geometry.shards_per_block) + u64::from(shard);
        self.at(data + number * stride, len)
    }
}

impl Header {
    fn fill(&self, geometry: &StoreGeometry, capacity_blocks: u64) {
        self.capacity_blocks.store(capacity_blocks, Ordering::Relaxed);
        self.shards_per_block.store(geometry.shards_per_block.into(), Ordering::Relaxed);
        self.shard_bytes.store(geometry.shard_bytes, Ordering::Relaxed);
        self.content_tag.store(geometry.content_tag, Ordering::Relaxed);
        // SYNC(memory.magic): Release, so that whoever reads the magic with
        // Acquire in `StoreMap::open` reads the fields above as well.
        self.magic.store(MAGIC, Ordering::Release);
    }

    fn geometry(&self, path: &Path) -> Result<StoreGeometry, OpenError> {
        let shards = self.shards_per_block.load(Ordering::Relaxed);
        Ok(StoreGeometry {
            shard_bytes: self.shard_bytes.load(Ordering::Relaxed),
            shards_per_block: u32::try_from(shards)
                .map_err(|_| OpenError::NotAStore { path: path.to_owned() })?,
            content_tag: self.content_tag.load(Ordering::Relaxed),
        })
    }
}

fn map(file: &File, path: &Path) -> Result<MmapRaw, OpenError> {
    MmapRaw::map_raw(file).map_err(|error| OpenError::Io {
        operation: "mmap",
        path: path.to_owned(),
        errno: error.raw_os_error().unwrap_or(libc::EINVAL),
    })
}

fn open_existing(path: &Path) -> Result<File, OpenError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| io("open", path, e))?;
    let file = File::from(file);
    let length = rustix::fs::fstat(&file).map_err(|error| io("fstat", path, error))?.st_size;
    if length < PAGE_BYTES as i64 {
        return Err(OpenError::NotAStore { path: path.to_owned() });
    }
    Ok(file)
}

/// Makes the file complete and nameless, then gives it its name, so that
/// nobody ever opens half a store. `None` if there is one already.
fn make(
    path: &Path,
    geometry: &StoreGeometry,
    capacity_blocks: u64,
    parts: &Parts,
) -> Result<Option<File>, OpenError> {
    if path.exists() {
        return Ok(None);
    }
    let dir: PathBuf = path.parent().map_or_else(PathBuf::new, Path::to_owned);
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file =
        rustix::fs::open(&dir, flags, Mode::RUSR | Mode::WUSR).map_err(|error| match error {
            Errno::NOENT => OpenError::Missing { path: dir.clone() },
            Errno::NOTDIR => OpenError::NotADirectory { path: dir.clone() },
            _ => io("open", &dir, error),
        })?;
    // Reserved now: a page that cannot be had later would be a SIGBUS.
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, parts.total) {
        Err(Errno::NOSPC) => {
            let free = rustix::fs::fstatvfs(&file).map_err(|error| io("fstatvfs", &dir, error))?;
            let free_bytes = free.f_bavail.saturating_mul(free.f_frsize);
            let (path, needed_bytes) = (path.to_owned(), parts.total);
            return Err(OpenError::NoRoom { path, needed_bytes, free_bytes });
        }
        other => other.map_err(|error| io("fallocate", path, error))?,
    }
    let file = File::from(file);
    let store =
        StoreMap { map: map(&file, path)?, parts: *parts, capacity_blocks, geometry: *geometry };
    store.header().fill(geometry, capacity_blocks);
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
    let nameless = format!("/proc/self/fd/{descriptor}");
    match rustix::fs::linkat(CWD, nameless, CWD, path, AtFlags::SYMLINK_FOLLOW) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::EXIST) => Ok(None),
        Err(error) => Err(io("linkat", path, error)),
    }
}
