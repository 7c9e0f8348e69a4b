//! Every size and count of the shared structures, with where it comes from.

use static_assertions::const_assert;

/// What shared lines are padded to.
pub const CACHE_LINE_BYTES: u64 = 64;
/// What large parts of a segment are aligned to.
pub const PAGE_BYTES: u64 = 4096;
/// Entries of an index bucket: eight 64-bit words are one cache line.
#[cfg(not(ucm_loom))]
pub const BUCKET_ENTRIES: usize = 8;
/// Models are small.
#[cfg(ucm_loom)]
pub const BUCKET_ENTRIES: usize = 2;

/// Participants come in multiples of this.
#[cfg(not(ucm_loom))]
pub const PARTICIPANT_STEP: u32 = 32;
/// Models are small.
#[cfg(ucm_loom)]
pub const PARTICIPANT_STEP: u32 = 1;
/// A slot's owner field has 8 bits and 0 means nobody, so 254 would fit; the
/// last multiple of [`PARTICIPANT_STEP`] below that is the limit.
pub const MAX_PARTICIPANTS: u32 = 224;
const_assert!(MAX_PARTICIPANTS.is_multiple_of(PARTICIPANT_STEP) && MAX_PARTICIPANTS <= 254);

/// Bits of a slot's generation. It wraps after a million changes of one slot.
/// Harmless to whoever holds a pin (a pinned slot changes generation at most
/// once or twice), and to a watcher negligible: one slot would have to be
/// taken and refilled a million times between two of its loads.
pub const GENERATION_BITS: u32 = 20;

/// Pins one participant may hold on one slot. The counter has 16 bits, and
/// threads that are refused add one for a moment, so half of it is room for
/// 32,768 threads that overshoot at the same instant.
pub const MAX_PINS_PER_SLOT: u16 = 0x8000;

/// A slot index is stored plus one in 32 bits, with a margin for sentinels.
pub const MAX_SLOTS: u32 = 1 << 30;
/// The smallest shard: below a cache line two slots would share one.
pub const MIN_SHARD_BYTES: u64 = 8;
/// A generous ceiling that keeps `slots x stride` far from 64 bits.
pub const MAX_SHARD_BYTES: u64 = 1 << 32;
const_assert!((MAX_SLOTS as u128) * (MAX_SHARD_BYTES as u128) < (1 << 63));

/// How long a waiter sleeps before it looks whether its owner is still alive.
pub const WAIT_SLICE_NS: u64 = 20_000_000;
/// How often a waiter looks at the word before it sleeps: about a microsecond,
/// well below the 12 us that a futex round trip costs.
pub const WAIT_SPINS: u32 = 50;
/// How often a reader looks at somebody's half-made insertion before it aborts it.
pub const INSERT_SPINS: u32 = 200;
/// And how often it then gives the processor away first.
pub const INSERT_PAUSES: u32 = 20;
/// One such pause.
pub const INSERT_PAUSE_NS: u64 = 50_000;
/// Owners of one key that a request sees die before it gives up.
pub const MAX_OWNER_DEATHS: u32 = 3;
/// Counters of a participant.
#[cfg(not(ucm_loom))]
pub const COUNTERS: usize = 32;
/// Counting decides nothing, so a model does without.
#[cfg(ucm_loom)]
pub const COUNTERS: usize = 1;

/// Pins of a row are padded to this many: two lines, so that neither the
/// line of one participant nor the one the prefetcher brings along is shared.
#[cfg(not(ucm_loom))]
pub const PIN_ROW_STEP: u32 = (2 * CACHE_LINE_BYTES / 2) as u32;
/// Models are small.
#[cfg(ucm_loom)]
pub const PIN_ROW_STEP: u32 = 1;
