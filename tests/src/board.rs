//! A table of the harness that all its processes share: who owns what, what went wrong.
//!
//! It is not part of what is tested, and decides nothing there. An owner
//! writes itself beside its key between getting ownership and publishing. If
//! it finds somebody else there when it is done, two owners lived at once: a
//! duplicate load. A dead one never comes back to look, and is forgiven.

use std::fs::OpenOptions;
use std::io;
use std::ops::Deref;
use std::path::Path;

use memmap2::MmapRaw;
use ucm_core::crash::Point;
use ucm_core::sync::{AtomicU32, AtomicU64, Ordering};

use crate::keys::KEYS;

/// Pending transfers one rank can have left behind.
const TRANSFERS_PER_RANK: usize = 64;
/// Ranks that can have some.
const RANKS: usize = 32;
const POINTS: usize = 64;
const STOP_HAMMERING: u32 = 1;
const STOP_TRANSFERS: u32 = 2;
const _: () = assert!(Point::ALL.len() <= POINTS);

macro_rules! tallies {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What is counted over all actors.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Tally { $($(#[$doc])* $name),* }

        impl Tally {
            /// All of them, in order.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
        }
    };
}

tallies! {
    /// Loads published READY.
    Loads,
    /// Loads published FAILED, on purpose.
    Failures,
    /// Gets that were hits.
    Hits,
    /// Waits that ended with the shard.
    Waited,
    /// Waits and gets that ended with somebody's failure.
    FailuresSeen,
    /// Waits whose owner died.
    OwnerDeaths,
    /// Gets that gave up after several deaths.
    GaveUp,
    /// Gets that found every slot in use until their deadline.
    NothingEvictable,
    /// Gets that found both buckets in use.
    BucketsPinned,
    /// Gets and waits whose deadline passed otherwise.
    Deadlines,
    /// Slots prepared.
    Prepared,
    /// Transfers written by the helper process.
    Transfers,
    /// Transfers it was asked for too late and did not write.
    TransfersRefused,
    /// Transfers that ended later than a quarantine lasts: the helper was not
    /// scheduled, and bytes prove nothing in this run.
    TransfersOverran,
    /// Owners that found another one beside the key when they came.
    Overtaken,
    /// WRONG: bytes that are not the key's.
    WrongBytes,
    /// WRONG: an owner that was overtaken while it lived.
    Duplicates,
    /// WRONG: a publication that was refused to a living owner.
    LatePublishes,
    /// WRONG: anything else that cannot be.
    Impossible,
}

/// A transfer's stages.
pub mod stage {
    /// Nobody's.
    pub const IDLE: u32 = 0;
    /// Asked for.
    pub const SUBMITTED: u32 = 1;
    /// Written.
    pub const DONE: u32 = 2;
    /// Not written, because it came too late.
    pub const REFUSED: u32 = 3;
}

/// A write into a slot that another process does, now or later, whether or
/// not the one that asked for it still lives.
#[repr(C)]
pub struct Transfer {
    /// One of [`stage`].
    pub stage: AtomicU32,
    /// The slot.
    pub slot: AtomicU32,
    /// The key's number.
    pub id: AtomicU64,
    /// When it was asked for, on the monotonic clock.
    pub submitted_ns: AtomicU64,
    /// When it is to be done.
    pub due_ns: AtomicU64,
}

/// The table. All zero is its beginning.
#[repr(C)]
pub struct Table {
    stop: AtomicU32,
    /// Incarnations given out.
    pub incarnations: AtomicU32,
    /// Arrivals at the starting line of a race.
    pub arrivals: AtomicU32,
    /// Padding.
    pub reserved: AtomicU32,
    tallies: [AtomicU64; 64],
    points: [AtomicU64; POINTS],
    owners: [AtomicU32; KEYS],
    wins: [AtomicU32; KEYS],
    transfers: [Transfer; RANKS * TRANSFERS_PER_RANK],
}

impl Table {
    /// Everybody ends what they are hammering.
    pub fn stop_hammering(&self) {
        self.stop.fetch_or(STOP_HAMMERING, Ordering::SeqCst);
    }

    /// The helper ends too. Not before everybody else has: somebody may be
    /// waiting for it.
    pub fn stop_transfers(&self) {
        self.stop.fetch_or(STOP_TRANSFERS, Ordering::SeqCst);
    }

    /// Whether hammering is over.
    pub fn hammering_is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst) & STOP_HAMMERING != 0
    }

    /// Whether transfers are over.
    pub fn transfers_are_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst) & STOP_TRANSFERS != 0
    }

    /// Counts one.
    pub fn count(&self, tally: Tally) {
        self.tallies[tally as usize].fetch_add(1, Ordering::SeqCst);
    }

    /// How many there are.
    pub fn tally(&self, tally: Tally) -> u64 {
        self.tallies[tally as usize].load(Ordering::SeqCst)
    }

    /// A number for this life of a participant.
    pub fn next_incarnation(&self) -> u32 {
        self.incarnations.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// `incarnation` has become the owner of key `id`.
    pub fn own(&self, id: u64, incarnation: u32) {
        if self.owners[id as usize].swap(incarnation, Ordering::SeqCst) != 0 {
            self.count(Tally::Overtaken);
        }
    }

    /// `incarnation` is about to publish. `false`: it was overtaken.
    pub fn disown(&self, id: u64, incarnation: u32) -> bool {
        let owner = &self.owners[id as usize];
        owner.compare_exchange(incarnation, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Somebody won the race for key `id`.
    pub fn win(&self, id: u64) {
        self.wins[id as usize].fetch_add(1, Ordering::SeqCst);
    }

    /// How many won the race for key `id`.
    pub fn wins(&self, id: u64) -> u32 {
        self.wins[id as usize].load(Ordering::SeqCst)
    }

    /// A point was passed.
    pub fn pass(&self, point: Point) {
        self.points[point as usize].fetch_add(1, Ordering::SeqCst);
    }

    /// How often a point was passed.
    pub fn passed(&self, point: Point) -> u64 {
        self.points[point as usize].load(Ordering::SeqCst)
    }

    /// The transfer of this life of a rank.
    pub fn transfer(&self, rank: u32, incarnation: u32) -> &Transfer {
        let at = rank as usize % RANKS * TRANSFERS_PER_RANK;
        &self.transfers[at + incarnation as usize % TRANSFERS_PER_RANK]
    }

    /// All of them.
    pub fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }
}

/// The table in memory that all processes map.
pub struct Board {
    map: MmapRaw,
}

impl Board {
    /// Creates the file, or opens it where it is.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        file.set_len(size_of::<Table>() as u64)?;
        Ok(Self { map: MmapRaw::map_raw(&file)? })
    }
}

impl Deref for Board {
    type Target = Table;

    fn deref(&self) -> &Table {
        let table = self.map.as_mut_ptr().cast_const().cast::<Table>();
        // SAFETY: the mapping is page aligned, at least as long as a table
        // (`open`), lives as long as `self`, and holds atomics only, for which
        // any bytes are valid.
        unsafe { &*table }
    }
}
