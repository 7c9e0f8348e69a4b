//! The product in places of its own: its setup, its ranks, and the audit of what it leaves.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use tempfile::TempDir;
use ucm_core::cache::Audit;
use ucm_core::participant::Role;
use ucm_core::slot::word::Status;
use ucm_core::{BlockId, ShardKey};
use ucm_loader::LoaderConfig;
use ucm_loader::backend::file::store::Fsync;
use ucm_loader::backend::file::{FileOptions, FileStore};
use ucm_loader::backend::threaded::BlockingStore;
use ucm_loader::content;
use ucm_loader::rank::protocol::{Outcome, Setup};
use ucm_loader::replay::trace::block_id;
use ucm_posix::{Attachment, Segment, SegmentOptions, ShmDir};

use crate::audit::violations;
use crate::rank_process::{RankProcess, Silence, Target};

/// A shard is small: deaths are what counts here, not bytes.
pub const SHARD_BYTES: u64 = 4096;
/// Shards of a block.
pub const SHARDS_PER_BLOCK: u64 = 4;
/// Blocks that fit on a rank's device.
pub const DEVICE_BLOCKS: u64 = 64;
/// Shorter than a hang, much longer than any stall that may be.
const TIMEOUT_MS: u64 = 4_000;

/// A segment in a directory of its own, a store in another, and the program.
pub struct Product {
    /// What every rank is told.
    pub setup: Setup,
    program: PathBuf,
    shm: TempDir,
    store: TempDir,
}

impl Product {
    /// Places for `ranks` ranks of `program`. Nothing is started.
    ///
    /// # Errors
    /// When a directory cannot be made, in words.
    pub fn new(program: PathBuf, ranks: u32, slots: u64, seed: u64) -> Result<Self, String> {
        let temp = |parent: PathBuf| {
            let made = tempfile::Builder::new().prefix("ucm-tests-").tempdir_in(&parent);
            made.map_err(|error| format!("a directory in {}: {error}", parent.display()))
        };
        let (shm, store) = (temp("/dev/shm".into())?, temp(std::env::temp_dir())?);
        let config = LoaderConfig {
            segment_id: "product".to_owned(),
            shm_dir: shm.path().to_owned(),
            capacity_bytes: slots * SHARD_BYTES,
            shard_bytes: SHARD_BYTES,
            block_bytes: SHARDS_PER_BLOCK * SHARD_BYTES,
            local_rank_size: ranks,
            backend: format!("posix:{}", store.path().display()),
            backend_workers: 2,
            claim_window: Some(4),
            running_queue_depth: 4096,
            timeout_ms: TIMEOUT_MS,
            // The backend's IO ends with its process: the lock byte, which is
            // what says that it is dead, goes after its last thread.
            io_quarantine_ms: Some(TIMEOUT_MS),
            fsync: Fsync::None,
            ..LoaderConfig::default()
        };
        let device_shards = DEVICE_BLOCKS * SHARDS_PER_BLOCK;
        let setup = Setup { config, events_dir: None, device_shards, seed };
        Ok(Self { setup, program, shm, store })
    }

    /// Begins a process of rank `rank`; the first thing to be heard of it is
    /// whether it has started.
    ///
    /// # Errors
    /// When there can be no process.
    pub fn begin(
        &self,
        rank: u32,
        crash: Option<&str>,
        target: &Target,
    ) -> std::io::Result<RankProcess> {
        RankProcess::start(&self.program, &self.setup, rank, crash, target)
    }

    /// A rank that has started.
    ///
    /// # Errors
    /// How it died instead.
    ///
    /// # Panics
    /// When there can be no process, or it refuses to start.
    pub fn rank(&self, rank: u32, crash: Option<&str>) -> Result<RankProcess, Silence> {
        let begun = self.begin(rank, crash, &Target::default());
        let mut process = begun.expect("a process can be started");
        match process.hear()? {
            Outcome::Ready => Ok(process),
            other => panic!("rank {rank} does not start: {other:?}"),
        }
    }

    /// The options that every rank opens the segment with.
    ///
    /// # Errors
    /// Those of the configuration, in words.
    pub fn segment_options(&self) -> Result<SegmentOptions, String> {
        let config = self.setup.config.clone().check().map_err(|error| error.to_string())?;
        config.segment_options().map_err(|error| error.to_string())
    }

    /// The segment, held open by the caller: made if it is not there.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn segment(&self) -> Result<Arc<Segment>, String> {
        let options = self.segment_options()?;
        Segment::open_or_create(&options).map(Arc::new).map_err(|error| error.to_string())
    }

    /// Where segments are.
    pub fn shm_dir(&self) -> ShmDir {
        ShmDir::new(self.shm.path())
    }

    /// Where blocks are.
    pub fn store_dir(&self) -> &std::path::Path {
        self.store.path()
    }

    /// What is in the shared-memory directory.
    pub fn shm_names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.shm.path()).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Checks everything, of which `stored` blocks must be in the store;
    /// everybody has left or is dead. Says what is wrong.
    pub fn audit(&self, stored: &[u64]) -> Vec<String> {
        let mut findings = Vec::new();
        let mut wrong = Vec::new();
        match self.segment() {
            Ok(segment) => {
                audit_segment(&segment, &mut findings);
                compare_slots(&segment, self.setup.seed, &mut wrong);
            }
            Err(error) => findings.push(error),
        }
        audit_store(&self.setup, stored, &mut findings, &mut wrong);
        findings.extend(wrong);
        findings
    }
}

/// No violation, no pin, nothing in the middle of something, nobody's place left.
pub fn audit_segment(segment: &Arc<Segment>, findings: &mut Vec<String>) {
    match Attachment::join(Arc::clone(segment), Role::Scout, None, None) {
        Ok(scout) => {
            scout.cache().reap_dead();
        }
        Err(error) => findings.push(format!("the auditor cannot join: {error}")),
    }
    findings.extend(violations(segment).iter().map(|violation| format!("{violation:?}")));
    let plane = segment.plane();
    let audit = Audit::new(&plane);
    let (census, pins) = (audit.census(), audit.pins());
    if pins != 0 {
        findings.push(format!("{pins} pins leaked"));
    }
    if census.total() != plane.geometry().shape.slot_count {
        findings.push(format!("slots are missing: {census:?}"));
    }
    if census.claimed + census.inserting + census.loading + census.tagged != 0 {
        findings.push(format!("somebody's work was left: {census:?}"));
    }
    if plane.attached_ranks() != 0 {
        findings.push(format!("{} places were left", plane.attached_ranks()));
    }
}

/// Every READY slot holds what its key demands.
pub fn compare_slots(segment: &Segment, seed: u64, wrong: &mut Vec<String>) -> u64 {
    let plane = segment.plane();
    let shape = plane.geometry().shape;
    let audit = Audit::new(&plane);
    let mut ready = 0;
    for slot in 0..shape.slot_count {
        let Some((key, Status::Ready)) = audit.slot(slot) else { continue };
        let Some(first) = segment.slot_ptr(slot) else { continue };
        ready += 1;
        // SAFETY: `slot_ptr` is valid for `shard_bytes` while the segment is
        // held, and everybody who could write has left or is dead.
        let bytes =
            unsafe { std::slice::from_raw_parts(first.as_ptr(), shape.shard_bytes as usize) };
        if let Some(at) = content::verify(bytes, seed, &key, 0) {
            wrong.push(format!("slot {slot}, {key:?}: byte {at} is wrong"));
        }
    }
    ready
}

/// What was stored is there whole, nothing half made is visible, nothing was
/// put aside, and what dead writers left is swept by the next opening. Returns
/// how many blocks are visible.
pub fn audit_store(
    setup: &Setup,
    stored: &[u64],
    findings: &mut Vec<String>,
    wrong: &mut Vec<String>,
) -> u64 {
    let config = match setup.config.clone().check() {
        Ok(config) => config,
        Err(error) => {
            findings.push(error.to_string());
            return 0;
        }
    };
    let root = setup.config.backend.trim_start_matches("posix:").to_owned();
    let store = match FileStore::open(&FileOptions::new(&root, config.store_geometry())) {
        Ok(store) => store,
        Err(error) => {
            findings.push(format!("the store does not open: {error}"));
            return 0;
        }
    };
    for (part, what) in [("tmp", "was not swept"), ("bad", "was put aside")] {
        let entries = std::fs::read_dir(store.root().join(part)).into_iter().flatten().flatten();
        findings.extend(entries.map(|entry| format!("{}: {what}", entry.path().display())));
    }
    let mut compare = |block: BlockId, findings: &mut Vec<String>| {
        for shard in 0..SHARDS_PER_BLOCK as u32 {
            let key = ShardKey::new(block, shard);
            let mut bytes = vec![0; config.shard_bytes as usize];
            match store.load(key, &mut bytes) {
                Ok(_) => {
                    if let Some(at) = content::verify(&bytes, setup.seed, &key, 0) {
                        wrong.push(format!("stored {key:?}: byte {at} is wrong"));
                    }
                }
                Err(error) => findings.push(format!("stored {key:?}: {error}")),
            }
        }
    };
    let known: HashSet<BlockId> =
        stored.iter().map(|&number| block_id(setup.seed, number)).collect();
    known.iter().for_each(|&block| compare(block, findings));
    // Blocks whose writer died after the last step are there too.
    let mut visible = 0;
    for dir in std::fs::read_dir(store.root().join("blocks")).into_iter().flatten().flatten() {
        for entry in std::fs::read_dir(dir.path()).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let id = name.strip_suffix(".kv").and_then(|hex| u128::from_str_radix(hex, 16).ok());
            match id.map(|id| BlockId(id.to_be_bytes())) {
                Some(block) if known.contains(&block) => {}
                Some(block) => compare(block, findings),
                None => findings.push(format!("{name}: not a block")),
            }
            visible += 1;
        }
    }
    visible
}
