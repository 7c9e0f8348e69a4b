//! Pure arithmetic: a cache's shape to the offsets of its two planes.

use core::fmt;
use core::mem::size_of;

use crate::describe::fold_numbers;
use crate::index::bucket::Bucket;
use crate::limits::*;
use crate::participant::ParticipantEntry;
use crate::segment::counters::CounterBlock;
use crate::segment::header::Header;
use crate::slot::meta::SlotMeta;
use crate::sync::{AtomicU8, AtomicU16};

/// What every process of a cache must agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheShape {
    /// Slots in the host cache.
    pub slot_count: u32,
    /// Of those, slots that only prefetch and prealloc may take.
    pub reserved_slots: u32,
    /// Payload of one shard, in bytes.
    pub shard_bytes: u64,
    /// Shards of one block.
    pub shards_per_block: u32,
    /// Ranks that share this node; they are participants `0..local_rank_size`.
    pub local_rank_size: u32,
    /// Places in the participant table (a multiple of 32).
    pub participants: u32,
    /// Whatever else must be equal for bytes to mean the same (model, dtype,
    /// checksum kind), folded into one number by the caller.
    pub content_tag: u64,
}

/// Why a shape is not possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ShapeError {
    /// `key` is `value`, but must lie in `min..=max`.
    OutOfRange {
        /// The field.
        key: &'static str,
        /// What it was.
        value: u64,
        /// The smallest that works.
        min: u64,
        /// The largest that works.
        max: u64,
    },
    /// `participants` is not a multiple of 32.
    ParticipantStep {
        /// What it was.
        participants: u32,
    },
    /// Not even one ordinary slot for every rank.
    TooFewSlots {
        /// Slots in all.
        slot_count: u32,
        /// Of those, reserved.
        reserved_slots: u32,
        /// Ranks that need one each.
        local_rank_size: u32,
    },
}

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange { key, value, min, max } => {
                write!(f, "{key} = {value} is outside {min}..={max}")
            }
            Self::ParticipantStep { participants } => {
                write!(f, "participants = {participants} is not a multiple of {PARTICIPANT_STEP}")
            }
            Self::TooFewSlots { slot_count, reserved_slots, local_rank_size } => write!(
                f,
                "{slot_count} slots less {reserved_slots} reserved leave less than one for each \
                 of {local_rank_size} ranks; raise the capacity or lower reserved_slots"
            ),
        }
    }
}

impl core::error::Error for ShapeError {}

/// How a slot's bytes are found: shift and mask when the stride is a power of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotStride {
    /// The stride is `1 << shift` bytes.
    Shift(u32),
    /// Any other stride, in bytes.
    Multiply(u64),
}

impl SlotStride {
    /// The stride that gives every slot `shard_bytes`: whole pages, so that a
    /// slot can be registered and read into with direct IO; below a page, the
    /// next power of two, so that none straddles one.
    pub const fn for_shard(shard_bytes: u64) -> Self {
        let stride = if shard_bytes >= PAGE_BYTES {
            shard_bytes.next_multiple_of(PAGE_BYTES)
        } else if shard_bytes < CACHE_LINE_BYTES {
            CACHE_LINE_BYTES
        } else {
            shard_bytes.next_power_of_two()
        };
        if stride.is_power_of_two() {
            Self::Shift(stride.trailing_zeros())
        } else {
            Self::Multiply(stride)
        }
    }

    /// Bytes from one slot to the next.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Shift(shift) => 1 << shift,
            Self::Multiply(stride) => stride,
        }
    }

    /// Where `slot` begins in the data plane.
    #[inline(always)]
    pub const fn offset_of(self, slot: u32) -> u64 {
        match self {
            Self::Shift(shift) => (slot as u64) << shift,
            Self::Multiply(stride) => slot as u64 * stride,
        }
    }

    /// Which slot the byte at `offset_bytes` of the data plane belongs to, and
    /// where in it.
    #[inline(always)]
    pub const fn slot_at(self, offset_bytes: u64) -> (u64, u64) {
        match self {
            Self::Shift(shift) => (offset_bytes >> shift, offset_bytes & ((1 << shift) - 1)),
            Self::Multiply(stride) => (offset_bytes / stride, offset_bytes % stride),
        }
    }
}

/// A shape with everything that follows from it. All offsets in bytes from the
/// start of the control plane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// What it was made from.
    pub shape: CacheShape,
    /// Slot addressing.
    pub stride: SlotStride,
    /// Index buckets: a power of two.
    pub bucket_count: u32,
    /// The participant table.
    pub participants_offset: u64,
    /// The counter blocks, one per participant.
    pub counters_offset: u64,
    /// The index.
    pub buckets_offset: u64,
    /// The slots' metadata.
    pub slots_offset: u64,
    /// The pins, a row per participant.
    pub pins_offset: u64,
    /// Pins from one row to the next.
    pub pin_row: u32,
    /// The access bytes.
    pub access_offset: u64,
    /// The whole control plane.
    pub control_bytes: u64,
    /// The whole data plane.
    pub data_bytes: u64,
}

fn check(key: &'static str, value: u64, min: u64, max: u64) -> Result<(), ShapeError> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(ShapeError::OutOfRange { key, value, min, max })
    }
}

impl Geometry {
    /// Checks a shape and lays it out.
    pub fn new(shape: CacheShape) -> Result<Self, ShapeError> {
        check("slot_count", shape.slot_count.into(), 1, MAX_SLOTS.into())?;
        check("shard_bytes", shape.shard_bytes, MIN_SHARD_BYTES, MAX_SHARD_BYTES)?;
        check("shards_per_block", shape.shards_per_block.into(), 1, u32::MAX.into())?;
        check(
            "participants",
            shape.participants.into(),
            PARTICIPANT_STEP.into(),
            MAX_PARTICIPANTS.into(),
        )?;
        if !shape.participants.is_multiple_of(PARTICIPANT_STEP) {
            return Err(ShapeError::ParticipantStep { participants: shape.participants });
        }
        // At least one place is left for a scout.
        check(
            "local_rank_size",
            shape.local_rank_size.into(),
            1,
            u64::from(shape.participants) - 1,
        )?;
        if shape.slot_count.saturating_sub(shape.reserved_slots) < shape.local_rank_size {
            return Err(ShapeError::TooFewSlots {
                slot_count: shape.slot_count,
                reserved_slots: shape.reserved_slots,
                local_rank_size: shape.local_rank_size,
            });
        }

        let slots = u64::from(shape.slot_count);
        let participants = u64::from(shape.participants);
        // Eight entries a bucket and at least one bucket for five slots: at
        // most 62 % full, 16 to 26 bytes of index a slot.
        let bucket_count = shape.slot_count.div_ceil(5).next_power_of_two().max(2);
        let pin_row = shape.slot_count.next_multiple_of(PIN_ROW_STEP);

        let mut end = 0_u64;
        let mut part = |len_bytes: u64| {
            let offset = end;
            end = (end + len_bytes).next_multiple_of(PAGE_BYTES);
            offset
        };
        part(size_of::<Header>() as u64);
        let participants_offset = part(participants * size_of::<ParticipantEntry>() as u64);
        let counters_offset = part(participants * size_of::<CounterBlock>() as u64);
        let buckets_offset = part(u64::from(bucket_count) * size_of::<Bucket>() as u64);
        let slots_offset = part(slots * size_of::<SlotMeta>() as u64);
        let pins_offset = part(participants * u64::from(pin_row) * size_of::<AtomicU16>() as u64);
        let access_offset = part(slots * size_of::<AtomicU8>() as u64);
        let stride = SlotStride::for_shard(shape.shard_bytes);
        Ok(Self {
            shape,
            stride,
            bucket_count,
            participants_offset,
            counters_offset,
            buckets_offset,
            slots_offset,
            pins_offset,
            pin_row,
            access_offset,
            control_bytes: end,
            data_bytes: (slots * stride.bytes()).next_multiple_of(PAGE_BYTES),
        })
    }

    /// Slots that ordinary allocation may take.
    pub fn ordinary_slots(&self) -> u32 {
        self.shape.slot_count - self.shape.reserved_slots
    }

    /// A number that two processes share only if they agree on the shape.
    pub fn config_fingerprint(&self) -> u64 {
        let CacheShape {
            slot_count,
            reserved_slots,
            shard_bytes,
            shards_per_block,
            local_rank_size,
            participants,
            content_tag,
        } = self.shape;
        fold_numbers(
            0x5543_4D00_636F_6E66,
            &[
                slot_count.into(),
                reserved_slots.into(),
                shard_bytes,
                shards_per_block.into(),
                local_rank_size.into(),
                participants.into(),
                content_tag,
            ],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> CacheShape {
        CacheShape {
            slot_count: 1024,
            reserved_slots: 64,
            shard_bytes: 4096,
            shards_per_block: 4,
            local_rank_size: 8,
            participants: 32,
            content_tag: 0,
        }
    }

    #[test]
    fn parts_follow_each_other_and_do_not_overlap() {
        let g = Geometry::new(shape()).unwrap();
        let starts = [
            0,
            g.participants_offset,
            g.counters_offset,
            g.buckets_offset,
            g.slots_offset,
            g.pins_offset,
            g.access_offset,
            g.control_bytes,
        ];
        assert!(starts.windows(2).all(|pair| pair[0] < pair[1]), "{starts:?}");
        assert!(starts.iter().all(|offset| offset % PAGE_BYTES == 0));
        assert_eq!(g.data_bytes, 1024 * 4096);
    }

    #[test]
    #[cfg(not(ucm_loom))]
    fn metadata_stays_within_160_bytes_a_slot_when_there_are_many() {
        for slot_count in [1 << 18, 1 << 20, 1_000_000, 6 << 17, (5 << 17) + 1] {
            let g = Geometry::new(CacheShape { slot_count, ..shape() }).unwrap();
            let a_slot = g.control_bytes as f64 / f64::from(slot_count);
            assert!(a_slot <= 160.0, "{a_slot} bytes a slot at {slot_count} slots");
        }
    }

    #[test]
    fn impossible_shapes_name_the_value_and_the_limit() {
        let wrong = |change: fn(&mut CacheShape)| {
            let mut shape = shape();
            change(&mut shape);
            Geometry::new(shape).unwrap_err()
        };
        assert!(matches!(
            wrong(|s| s.shard_bytes = 0),
            ShapeError::OutOfRange { key: "shard_bytes", value: 0, .. }
        ));
        assert!(matches!(
            wrong(|s| s.slot_count = 0),
            ShapeError::OutOfRange { key: "slot_count", .. }
        ));
        assert!(matches!(wrong(|s| s.participants = 40), ShapeError::ParticipantStep { .. }));
        assert!(matches!(wrong(|s| s.participants = 256), ShapeError::OutOfRange { .. }));
        assert!(matches!(wrong(|s| s.local_rank_size = 32), ShapeError::OutOfRange { .. }));
        assert!(matches!(
            wrong(|s| s.reserved_slots = 1017),
            ShapeError::TooFewSlots { slot_count: 1024, .. }
        ));
        assert!(matches!(wrong(|s| s.reserved_slots = 5000), ShapeError::TooFewSlots { .. }));
    }

    #[test]
    fn a_power_of_two_stride_is_addressed_by_shift_and_mask() {
        assert_eq!(SlotStride::for_shard(256 << 10), SlotStride::Shift(18));
        assert_eq!(SlotStride::for_shard(5000), SlotStride::Shift(13));
        assert_eq!(SlotStride::for_shard(12 << 10), SlotStride::Multiply(12 << 10));
        assert_eq!(SlotStride::for_shard(100), SlotStride::Shift(7));
        for stride in [SlotStride::Shift(13), SlotStride::Multiply(12 << 10)] {
            for slot in [0, 1, 77, MAX_SLOTS - 1] {
                let offset = stride.offset_of(slot);
                assert_eq!(offset, u64::from(slot) * stride.bytes());
                assert_eq!(stride.slot_at(offset + 5), (slot.into(), 5));
            }
        }
    }

    #[test]
    fn any_different_field_gives_another_fingerprint() {
        let base = Geometry::new(shape()).unwrap().config_fingerprint();
        let changes: [fn(&mut CacheShape); 6] = [
            |s| s.slot_count += 1,
            |s| s.reserved_slots += 1,
            |s| s.shard_bytes *= 2,
            |s| s.shards_per_block += 1,
            |s| s.local_rank_size -= 1,
            |s| s.content_tag = 1,
        ];
        for change in changes {
            let mut other = shape();
            change(&mut other);
            assert_ne!(Geometry::new(other).unwrap().config_fingerprint(), base);
        }
    }
}
