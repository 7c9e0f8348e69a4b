//! Making a control plane, and checking one that somebody else made.

use core::fmt;

use crate::index::bucket::Bucket;
use crate::index::probe::Index;
use crate::participant::{ParticipantEntry, ParticipantId, ParticipantView, Role};
use crate::pin::table::PinTable;
use crate::ptr::{OutOfRegion, Region};
use crate::segment::counters::{Counter, CounterBlock};
use crate::segment::geometry::{CacheShape, Geometry, ShapeError};
use crate::segment::header::{ABI_VERSION, Header, LAYOUT_FINGERPRINT, MAGIC};
use crate::slot::meta::SlotMeta;
use crate::sync::{AtomicU8, AtomicU16, Ordering, wide_atomics_are_lock_free};

const FLAG_PERSIST: u32 = 1;

/// What a segment says of itself besides its shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentIdentity {
    /// Ties the control plane to its data files.
    pub nonce: u64,
    /// The boot it belongs to: clocks and locks of another mean nothing.
    pub boot_id: [u8; 16],
    /// When it was made, in seconds since 1970, for people.
    pub created_unix_s: u64,
    /// How long a slot stays untouched after its loader died, because IO that
    /// the kernel still has may write into it.
    pub io_quarantine_ns: u64,
    /// Whether it stays when the last participant leaves.
    pub persist: bool,
}

/// Why a control plane cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AttachError {
    /// Not a control plane at all.
    NotASegment {
        /// The first eight bytes.
        found: u64,
    },
    /// Made by a build with another ABI.
    Version {
        /// The segment's.
        found: u32,
        /// This build's.
        ours: u32,
    },
    /// The same ABI number, but structures laid out differently.
    Layout {
        /// The segment's fingerprint.
        found: u64,
        /// This build's.
        ours: u64,
    },
    /// Configured differently: the first field that differs.
    Configuration {
        /// The field.
        key: &'static str,
        /// The segment's value.
        found: u64,
        /// The value asked for.
        ours: u64,
    },
    /// Made before the machine was started again.
    ForeignBoot {
        /// The segment's boot id.
        found: [u8; 16],
        /// The running system's.
        ours: [u8; 16],
    },
    /// Its own header does not describe a possible cache.
    BadShape(ShapeError),
    /// Shorter (or longer) than its header says.
    Length {
        /// What the header demands, in bytes.
        expected_bytes: u64,
        /// What is mapped.
        mapped_bytes: u64,
    },
    /// A part does not lie inside the mapping.
    OutOfRegion(OutOfRegion),
    /// 64-bit atomics are not lock-free on this target.
    AtomicsNotLockFree,
}

impl From<OutOfRegion> for AttachError {
    fn from(error: OutOfRegion) -> Self {
        Self::OutOfRegion(error)
    }
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotASegment { found } => {
                write!(f, "not a UCM segment (it begins with {found:#018x})")
            }
            Self::Version { found, ours } => write!(
                f,
                "the segment was made by ABI version {found}, this build has {ours}; \
                 stop the old processes or use another id"
            ),
            Self::Layout { found, ours } => write!(
                f,
                "the segment's layout fingerprint is {found:#018x}, this build's {ours:#018x}; \
                 run the same build in every process or use another id"
            ),
            Self::Configuration { key, found, ours } => write!(
                f,
                "the segment has {key} = {found}, this process wants {key} = {ours}; \
                 configure every process alike or use another id"
            ),
            Self::ForeignBoot { .. } => {
                f.write_str("the segment is of an earlier boot of this machine")
            }
            Self::BadShape(error) => write!(f, "the segment's header is corrupt: {error}"),
            Self::Length { expected_bytes, mapped_bytes } => write!(
                f,
                "the segment is corrupt: {mapped_bytes} bytes long where its header says {expected_bytes}"
            ),
            Self::OutOfRegion(error) => write!(
                f,
                "the segment is corrupt: {} bytes at {} do not fit in {}",
                error.len_bytes, error.offset_bytes, error.region_bytes
            ),
            Self::AtomicsNotLockFree => f.write_str(
                "64-bit atomics are not lock-free on this target, so memory cannot be shared \
                 between processes",
            ),
        }
    }
}

impl core::error::Error for AttachError {}

/// A checked view of a control plane: cheap to copy, borrowed from the mapping.
#[derive(Clone, Copy)]
pub struct ControlPlane<'m> {
    pub(crate) header: &'m Header,
    pub(crate) participants: &'m [ParticipantEntry],
    pub(crate) counters: &'m [CounterBlock],
    pub(crate) index: Index<'m>,
    pub(crate) slots: &'m [SlotMeta],
    pub(crate) pins: PinTable<'m>,
    pub(crate) access: &'m [AtomicU8],
    geometry: Geometry,
    fixed: Fixed,
}

/// What the header said when it was checked, and what a stray write into it
/// cannot change any more for this process.
#[derive(Clone, Copy)]
struct Fixed {
    nonce: u64,
    persist: bool,
    created_unix_s: u64,
    io_quarantine_ns: u64,
}

impl<'m> ControlPlane<'m> {
    /// Makes a new, empty control plane. The magic is written last.
    ///
    /// # Safety
    /// The region is zeroed, writable, and nobody else looks at it yet.
    pub unsafe fn create(
        region: Region<'m>,
        geometry: &Geometry,
        identity: &SegmentIdentity,
    ) -> Result<Self, AttachError> {
        if !wide_atomics_are_lock_free() {
            return Err(AttachError::AtomicsNotLockFree);
        }
        #[cfg(ucm_loom)]
        // SAFETY: ours alone, says the caller.
        unsafe {
            construct(&region, geometry)?;
        }
        let fixed = Fixed {
            nonce: identity.nonce,
            persist: identity.persist,
            created_unix_s: identity.created_unix_s,
            io_quarantine_ns: identity.io_quarantine_ns,
        };
        let plane = Self::view(region, geometry, fixed)?;
        let shape = geometry.shape;
        let header = plane.header;
        let low = u64::from_le_bytes(first_half(&identity.boot_id));
        let high = u64::from_le_bytes(second_half(&identity.boot_id));
        // Relaxed throughout: the segment gets its name after this returns, and
        // opening it synchronises.
        let relaxed = Ordering::Relaxed;
        header.abi_version.store(ABI_VERSION, relaxed);
        header.header_bytes.store(size_of::<Header>() as u32, relaxed);
        header.layout_fingerprint.store(LAYOUT_FINGERPRINT, relaxed);
        header.config_fingerprint.store(geometry.config_fingerprint(), relaxed);
        header.control_bytes.store(geometry.control_bytes, relaxed);
        header.data_bytes.store(geometry.data_bytes, relaxed);
        header.nonce.store(identity.nonce, relaxed);
        header.content_tag.store(shape.content_tag, relaxed);
        header.slot_count.store(shape.slot_count, relaxed);
        header.reserved_slots.store(shape.reserved_slots, relaxed);
        header.shard_bytes.store(shape.shard_bytes, relaxed);
        header.shards_per_block.store(shape.shards_per_block, relaxed);
        header.local_rank_size.store(shape.local_rank_size, relaxed);
        header.participants.store(shape.participants, relaxed);
        header.flags.store(if identity.persist { FLAG_PERSIST } else { 0 }, relaxed);
        header.boot_id[0].store(low, relaxed);
        header.boot_id[1].store(high, relaxed);
        header.created_unix_s.store(identity.created_unix_s, relaxed);
        header.io_quarantine_ns.store(identity.io_quarantine_ns, relaxed);
        // SYNC(header.magic): Release; pairs with the Acquire load in `attach`.
        header.magic.store(MAGIC, Ordering::Release);
        Ok(plane)
    }

    /// Checks a control plane that somebody else made. With `expected`, a
    /// different configuration is refused and the first differing field named;
    /// without, the shape is taken from the header.
    pub fn attach(
        region: Region<'m>,
        expected: Option<&Geometry>,
        boot_id: &[u8; 16],
    ) -> Result<Self, AttachError> {
        if !wide_atomics_are_lock_free() {
            return Err(AttachError::AtomicsNotLockFree);
        }
        let relaxed = Ordering::Relaxed;
        let header: &Header = region.at(0)?;
        // SYNC(header.magic): pairs with the Release store in `create`.
        let magic = header.magic.load(Ordering::Acquire);
        if magic != MAGIC {
            return Err(AttachError::NotASegment { found: magic });
        }
        let version = header.abi_version.load(relaxed);
        if version != ABI_VERSION {
            return Err(AttachError::Version { found: version, ours: ABI_VERSION });
        }
        let layout = header.layout_fingerprint.load(relaxed);
        if layout != LAYOUT_FINGERPRINT {
            return Err(AttachError::Layout { found: layout, ours: LAYOUT_FINGERPRINT });
        }
        let shape = CacheShape {
            slot_count: header.slot_count.load(relaxed),
            reserved_slots: header.reserved_slots.load(relaxed),
            shard_bytes: header.shard_bytes.load(relaxed),
            shards_per_block: header.shards_per_block.load(relaxed),
            local_rank_size: header.local_rank_size.load(relaxed),
            participants: header.participants.load(relaxed),
            content_tag: header.content_tag.load(relaxed),
        };
        let geometry = Geometry::new(shape).map_err(AttachError::BadShape)?;
        if let Some(expected) = expected {
            same_configuration(&shape, &expected.shape)?;
        }
        let found = header.config_fingerprint.load(relaxed);
        let ours = geometry.config_fingerprint();
        if found != ours {
            return Err(AttachError::Configuration { key: "config_fingerprint", found, ours });
        }
        let mut boot = [0; 16];
        boot[..8].copy_from_slice(&header.boot_id[0].load(relaxed).to_le_bytes());
        boot[8..].copy_from_slice(&header.boot_id[1].load(relaxed).to_le_bytes());
        if boot != *boot_id {
            return Err(AttachError::ForeignBoot { found: boot, ours: *boot_id });
        }
        if region.len_bytes() as u64 != geometry.control_bytes {
            return Err(AttachError::Length {
                expected_bytes: geometry.control_bytes,
                mapped_bytes: region.len_bytes() as u64,
            });
        }
        let fixed = Fixed {
            nonce: header.nonce.load(relaxed),
            persist: header.flags.load(relaxed) & FLAG_PERSIST != 0,
            created_unix_s: header.created_unix_s.load(relaxed),
            io_quarantine_ns: header.io_quarantine_ns.load(relaxed),
        };
        Ok(Self::view(region, &geometry, fixed)?)
    }

    fn view(region: Region<'m>, geometry: &Geometry, fixed: Fixed) -> Result<Self, OutOfRegion> {
        let shape = &geometry.shape;
        let participants = u64::from(shape.participants);
        let slots = u64::from(shape.slot_count);
        let header: &Header = region.at(0)?;
        let buckets: &[Bucket] =
            region.slice(geometry.buckets_offset, geometry.bucket_count.into())?;
        let pins: &[AtomicU16] =
            region.slice(geometry.pins_offset, participants * u64::from(geometry.pin_row))?;
        Ok(Self {
            header,
            participants: region.slice(geometry.participants_offset, participants)?,
            counters: region.slice(geometry.counters_offset, participants)?,
            index: Index::new(buckets, shape.slot_count),
            slots: region.slice(geometry.slots_offset, slots)?,
            pins: PinTable::new(pins, geometry.pin_row, shape.participants, header),
            access: region.slice(geometry.access_offset, slots)?,
            geometry: *geometry,
            fixed,
        })
    }

    /// The layout.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// What ties the control plane to its data files.
    pub fn nonce(&self) -> u64 {
        self.fixed.nonce
    }

    /// Whether the segment outlives its last participant.
    pub fn is_persistent(&self) -> bool {
        self.fixed.persist
    }

    /// When it was made, in seconds since 1970.
    pub fn created_unix_s(&self) -> u64 {
        self.fixed.created_unix_s
    }

    /// How long the slot of a dead loader stays untouched.
    pub fn io_quarantine_ns(&self) -> u64 {
        self.fixed.io_quarantine_ns
    }

    /// What stands in a place of the participant table.
    pub fn participant(&self, id: ParticipantId) -> Option<ParticipantView> {
        self.participants.get(id.index() as usize).map(ParticipantEntry::view)
    }

    /// Every place of the participant table.
    pub fn participants(&self) -> impl Iterator<Item = (ParticipantId, ParticipantView)> {
        (0..)
            .map_while(ParticipantId::new)
            .zip(self.participants.iter().map(ParticipantEntry::view))
    }

    /// Ranks that are in the table now.
    pub fn attached_ranks(&self) -> u32 {
        let is_rank = |view: &ParticipantView| view.live && view.role == Some(Role::Rank);
        self.participants().filter(|(_, view)| is_rank(view)).count() as u32
    }

    /// The sum of a counter over all participants, past ones included.
    pub fn count(&self, counter: Counter) -> u64 {
        // Shared bytes are claims: a sum of nonsense is nonsense, and no panic.
        self.counters.iter().fold(0, |sum, block| block.get(counter).wrapping_add(sum))
    }
}

fn same_configuration(found: &CacheShape, ours: &CacheShape) -> Result<(), AttachError> {
    let fields: [(&'static str, u64, u64); 7] = [
        ("shard_bytes", found.shard_bytes, ours.shard_bytes),
        ("shards_per_block", found.shards_per_block.into(), ours.shards_per_block.into()),
        ("slot_count", found.slot_count.into(), ours.slot_count.into()),
        ("reserved_slots", found.reserved_slots.into(), ours.reserved_slots.into()),
        ("local_rank_size", found.local_rank_size.into(), ours.local_rank_size.into()),
        ("participants", found.participants.into(), ours.participants.into()),
        ("content_tag", found.content_tag, ours.content_tag),
    ];
    match fields.into_iter().find(|(_, found, ours)| found != ours) {
        Some((key, found, ours)) => Err(AttachError::Configuration { key, found, ours }),
        None => Ok(()),
    }
}

fn first_half(id: &[u8; 16]) -> [u8; 8] {
    core::array::from_fn(|i| id[i])
}

fn second_half(id: &[u8; 16]) -> [u8; 8] {
    core::array::from_fn(|i| id[i + 8])
}

/// The model checker's atomics are not zeroes: make each one in place.
#[cfg(ucm_loom)]
unsafe fn construct(region: &Region<'_>, geometry: &Geometry) -> Result<(), AttachError> {
    use crate::sync::AtomicCell;
    fn each<T>(
        region: &Region<'_>,
        offset: u64,
        count: u64,
        init: unsafe fn(*mut T),
    ) -> Result<(), AttachError> {
        let first = region.place::<T>(offset, count)?;
        for i in 0..count as usize {
            // SAFETY: `place` checked the whole range, and the caller owns it.
            unsafe { init(first.add(i)) }
        }
        Ok(())
    }
    let shape = &geometry.shape;
    let participants = u64::from(shape.participants);
    let slots = u64::from(shape.slot_count);
    each(region, 0, 1, Header::init)?;
    each(region, geometry.participants_offset, participants, ParticipantEntry::init)?;
    each(region, geometry.counters_offset, participants, CounterBlock::init)?;
    each(region, geometry.buckets_offset, geometry.bucket_count.into(), Bucket::init)?;
    each(region, geometry.slots_offset, slots, SlotMeta::init)?;
    let pins = participants * u64::from(geometry.pin_row);
    each(region, geometry.pins_offset, pins, <AtomicU16 as AtomicCell>::init)?;
    each(region, geometry.access_offset, slots, <AtomicU8 as AtomicCell>::init)
}
