//! The control plane's first page: identity, shape, and the few words all participants share.

use crate::describe::{StructLayout, describe, fingerprint};
use crate::index::bucket::Bucket;
use crate::participant::ParticipantEntry;
use crate::ptr::Shared;
use crate::segment::counters::CounterBlock;
use crate::slot::meta::SlotMeta;
use crate::sync::{AtomicU32, AtomicU64};

/// What a control plane begins with: "UCMCTRL" and a digit that never changes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"UCMCTRL1");
/// Grows with every change of a shared layout or of what a field means.
pub const ABI_VERSION: u32 = 1;
/// `Header::health`: the segment was found wrong while in use.
pub(crate) const HEALTH_POISONED: u32 = 1;

/// Every shared structure of the cache.
pub const LAYOUTS: [StructLayout; 5] = [
    Header::LAYOUT,
    ParticipantEntry::LAYOUT,
    CounterBlock::LAYOUT,
    Bucket::LAYOUT,
    SlotMeta::LAYOUT,
];

/// The fingerprint of every shared structure of the cache.
pub const LAYOUT_FINGERPRINT: u64 = fingerprint(&LAYOUTS);

/// The first page.
///
/// Line 0 and 1 are written once, before the segment has a name. The words
/// that change while it lives have a line each: `health` (read by everybody,
/// written once if ever), `high_water` (read by every evictor), and the two
/// hands (one atomic add per step).
#[repr(C, align(64))]
pub struct Header {
    pub(crate) magic: AtomicU64,
    pub(crate) abi_version: AtomicU32,
    pub(crate) header_bytes: AtomicU32,
    pub(crate) layout_fingerprint: AtomicU64,
    pub(crate) config_fingerprint: AtomicU64,
    pub(crate) control_bytes: AtomicU64,
    pub(crate) data_bytes: AtomicU64,
    pub(crate) nonce: AtomicU64,
    pub(crate) content_tag: AtomicU64,

    pub(crate) slot_count: AtomicU32,
    pub(crate) reserved_slots: AtomicU32,
    pub(crate) shard_bytes: AtomicU64,
    pub(crate) shards_per_block: AtomicU32,
    pub(crate) local_rank_size: AtomicU32,
    pub(crate) participants: AtomicU32,
    pub(crate) flags: AtomicU32,
    pub(crate) boot_id: [AtomicU64; 2],
    pub(crate) created_unix_s: AtomicU64,
    pub(crate) io_quarantine_ns: AtomicU64,

    pub(crate) health: AtomicU32,
    pub(crate) health_padding: [u32; 15],
    pub(crate) high_water: AtomicU32,
    pub(crate) high_water_padding: [u32; 15],
    pub(crate) hand: AtomicU32,
    pub(crate) hand_padding: [u32; 15],
    pub(crate) reserve_hand: AtomicU32,
    pub(crate) reserve_hand_padding: [u32; 15],
}

// SAFETY: atomics only.
unsafe impl Shared for Header {}

describe!(Header, size 384, align 64, {
    0: magic: AtomicU64,
    8: abi_version: AtomicU32,
    12: header_bytes: AtomicU32,
    16: layout_fingerprint: AtomicU64,
    24: config_fingerprint: AtomicU64,
    32: control_bytes: AtomicU64,
    40: data_bytes: AtomicU64,
    48: nonce: AtomicU64,
    56: content_tag: AtomicU64,
    64: slot_count: AtomicU32,
    68: reserved_slots: AtomicU32,
    72: shard_bytes: AtomicU64,
    80: shards_per_block: AtomicU32,
    84: local_rank_size: AtomicU32,
    88: participants: AtomicU32,
    92: flags: AtomicU32,
    96: boot_id: [AtomicU64; 2],
    112: created_unix_s: AtomicU64,
    120: io_quarantine_ns: AtomicU64,
    128: health: AtomicU32,
    132: health_padding: [u32; 15],
    192: high_water: AtomicU32,
    196: high_water_padding: [u32; 15],
    256: hand: AtomicU32,
    260: hand_padding: [u32; 15],
    320: reserve_hand: AtomicU32,
    324: reserve_hand_padding: [u32; 15],
});

impl Header {
    #[cfg(ucm_loom)]
    pub(crate) unsafe fn init(at: *mut Self) {
        let n = || AtomicU32::new(0);
        let w = || AtomicU64::new(0);
        let header = Self {
            magic: w(),
            abi_version: n(),
            header_bytes: n(),
            layout_fingerprint: w(),
            config_fingerprint: w(),
            control_bytes: w(),
            data_bytes: w(),
            nonce: w(),
            content_tag: w(),
            slot_count: n(),
            reserved_slots: n(),
            shard_bytes: w(),
            shards_per_block: n(),
            local_rank_size: n(),
            participants: n(),
            flags: n(),
            boot_id: [w(), w()],
            created_unix_s: w(),
            io_quarantine_ns: w(),
            health: n(),
            health_padding: [0; 15],
            high_water: n(),
            high_water_padding: [0; 15],
            hand: n(),
            hand_padding: [0; 15],
            reserve_hand: n(),
            reserve_hand_padding: [0; 15],
        };
        // SAFETY: the caller owns `at`.
        unsafe { at.write(header) }
    }
}
