//! What a stage's segment looks like, as a test says it and as an actor is told.

use std::path::{Path, PathBuf};

use ucm_core::CacheShape;
use ucm_posix::{SegmentError, SegmentId, SegmentOptions, ShmDir};

use crate::keys::{SHARDS_PER_BLOCK, SLOT_WORDS};

/// A segment's measures.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Slots.
    pub slots: u32,
    /// Of those, reserved ones.
    pub reserved: u32,
    /// Ranks.
    pub ranks: u32,
    /// How long a dead loader's slot rests, in milliseconds.
    pub quarantine_ms: u64,
}

impl Default for Setup {
    fn default() -> Self {
        Self { slots: 16, reserved: 0, ranks: 8, quarantine_ms: 50 }
    }
}

/// Where an actor acts: the setup, the directory, and the segment's name.
#[derive(Clone, Debug)]
pub struct Place {
    /// The directory of the segment and of the board.
    pub dir: PathBuf,
    /// The segment's name.
    pub id: String,
    /// Its measures.
    pub setup: Setup,
}

impl Place {
    /// As command-line arguments.
    pub fn to_arguments(&self) -> Vec<String> {
        let Setup { slots, reserved, ranks, quarantine_ms } = self.setup;
        let numbers = [u64::from(slots), reserved.into(), ranks.into(), quarantine_ms];
        let words = [self.dir.to_string_lossy().into_owned(), self.id.clone()];
        words.into_iter().chain(numbers.iter().map(u64::to_string)).collect()
    }

    /// Back from command-line arguments.
    pub fn from_arguments(mut arguments: impl Iterator<Item = String>) -> Option<Self> {
        let dir = arguments.next()?.into();
        let id = arguments.next()?;
        let mut number = || arguments.next()?.parse::<u64>().ok();
        let setup = Setup {
            slots: number()? as u32,
            reserved: number()? as u32,
            ranks: number()? as u32,
            quarantine_ms: number()?,
        };
        Some(Self { dir, id, setup })
    }

    /// The segment that all actors of the stage open.
    ///
    /// # Errors
    /// A name that no segment can have.
    pub fn options(&self) -> Result<SegmentOptions, SegmentError> {
        let shape = CacheShape {
            slot_count: self.setup.slots,
            reserved_slots: self.setup.reserved,
            shard_bytes: (SLOT_WORDS * size_of::<u64>()) as u64,
            shards_per_block: SHARDS_PER_BLOCK as u32,
            local_rank_size: self.setup.ranks,
            participants: 32,
            content_tag: 0,
        };
        Ok(SegmentOptions {
            dir: ShmDir::new(&self.dir),
            io_quarantine_ns: self.setup.quarantine_ms * 1_000_000,
            ..SegmentOptions::new(SegmentId::new(&self.id)?, shape)
        })
    }

    /// The file behind the board.
    pub fn board_path(&self) -> PathBuf {
        board_path(&self.dir)
    }
}

fn board_path(dir: &Path) -> PathBuf {
    dir.join("board")
}
