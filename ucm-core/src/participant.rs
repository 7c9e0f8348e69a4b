//! The participant table: who takes part, in which role, and since which epoch.

use crate::describe::describe;
use crate::limits::MAX_PARTICIPANTS;
use crate::ptr::Shared;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// A participant's place in the table, which is also its byte of the lock file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ParticipantId(pub(crate) u8);

impl ParticipantId {
    /// The participant at `index`, if a table can be that long.
    pub fn new(index: u32) -> Option<Self> {
        (index < MAX_PARTICIPANTS).then_some(Self(index as u8))
    }

    /// Its place.
    pub fn index(self) -> u32 {
        u32::from(self.0)
    }
}

impl core::fmt::Display for ParticipantId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What a participant may do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Drives a device: both planes.
    Rank,
    /// Control plane only: may pin and touch, never gets data (a scheduler).
    Scout,
}

impl Role {
    fn code(self) -> u32 {
        match self {
            Self::Rank => 1,
            Self::Scout => 2,
        }
    }

    fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self::Rank),
            2 => Some(Self::Scout),
            _ => None,
        }
    }
}

/// One entry of the table: a cache line.
///
/// Only `state` decides anything; the rest is for people to read.
#[repr(C, align(64))]
pub struct ParticipantEntry {
    /// Bit 0: live. The rest: the epoch, which grows with every departure.
    state: AtomicU32,
    role: AtomicU32,
    pid: AtomicU32,
    device: AtomicU32,
    start_time: AtomicU64,
    reserved: [u64; 5],
}

// SAFETY: atomics only.
unsafe impl Shared for ParticipantEntry {}

describe!(ParticipantEntry, size 64, align 64, {
    0: state: AtomicU32,
    4: role: AtomicU32,
    8: pid: AtomicU32,
    12: device: AtomicU32,
    16: start_time: AtomicU64,
    24: reserved: [u64; 5],
});

/// What a joiner says of itself, for people to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Introduction {
    /// What it may do.
    pub role: Role,
    /// Its process id, in its own namespace.
    pub pid: u32,
    /// The device it drives; `u32::MAX` for none.
    pub device: u32,
    /// When its process began, in clock ticks since boot.
    pub start_time: u64,
}

/// A look at one entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParticipantView {
    /// Whether the entry is taken. Whether its holder is *alive* only its lock
    /// byte can tell.
    pub live: bool,
    /// How often this place was left.
    pub epoch: u32,
    /// The role, if the entry holds a known one.
    pub role: Option<Role>,
    /// Process id.
    pub pid: u32,
    /// Device.
    pub device: u32,
    /// Start time in clock ticks since boot.
    pub start_time: u64,
}

impl ParticipantEntry {
    #[cfg(ucm_loom)]
    pub(crate) unsafe fn init(at: *mut Self) {
        // SAFETY: the caller owns `at`.
        unsafe {
            at.write(Self {
                state: AtomicU32::new(0),
                role: AtomicU32::new(0),
                pid: AtomicU32::new(0),
                device: AtomicU32::new(0),
                start_time: AtomicU64::new(0),
                reserved: [0; 5],
            });
        }
    }

    /// Whether the entry is taken.
    pub(crate) fn is_live(&self) -> bool {
        self.state.load(Ordering::SeqCst) & 1 == 1
    }

    /// Takes the entry. The caller holds the entry's lock byte and found it free.
    pub(crate) fn occupy(&self, who: &Introduction) {
        self.role.store(who.role.code(), Ordering::Relaxed);
        self.pid.store(who.pid, Ordering::Relaxed);
        self.device.store(who.device, Ordering::Relaxed);
        self.start_time.store(who.start_time, Ordering::Relaxed);
        // SYNC(participant.state): publishes the four words above to the
        // Acquire load in `view`.
        self.state.fetch_or(1, Ordering::SeqCst);
    }

    /// Frees the entry and begins the next epoch. The caller holds the byte.
    pub(crate) fn vacate(&self) {
        let state = self.state.load(Ordering::SeqCst);
        self.state.store((state & !1).wrapping_add(2), Ordering::SeqCst);
    }

    /// What stands in the entry now.
    pub fn view(&self) -> ParticipantView {
        // SYNC(participant.state): pairs with the SeqCst RMW in `occupy`.
        let state = self.state.load(Ordering::Acquire);
        ParticipantView {
            live: state & 1 == 1,
            epoch: state >> 1,
            role: Role::from_code(self.role.load(Ordering::Relaxed)),
            pid: self.pid.load(Ordering::Relaxed),
            device: self.device.load(Ordering::Relaxed),
            start_time: self.start_time.load(Ordering::Relaxed),
        }
    }
}
