//! A new segment: reserved, initialised, and only then given its name.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use ucm_core::segment::attach::{ControlPlane, SegmentIdentity};
use ucm_core::segment::geometry::Geometry;

use crate::crash::crash_point;
use crate::error::{LockError, SegmentError, ShmError};
use crate::fork::PrivateFd;
use crate::identity::{fresh_nonce, unix_s};
use crate::liveness::{ByteLock, CREATION, LIFECYCLE_WAIT, LockFile, Mode, PRESENCE};
use crate::mapping::{Mapping, RANGE_BYTES};
use crate::names::SegmentId;
use crate::segment::handle::{Parts, Segment, region};
use crate::segment::join::check_owner;
use crate::segment::options::SegmentOptions;
use crate::shm::{Draft, ShmDir, is_named, stat_path, unlink};

/// How long others wait for a creator. Half a terabyte takes minutes; a
/// creator that dies lets go at once, so only a stopped one is met for so long.
const CREATION_WAIT: Duration = Duration::from_secs(600);

/// The right to create, held on the birth file; dropping it removes the file.
pub(crate) struct Birth {
    lock: Option<ByteLock>,
    file: LockFile,
}

impl Birth {
    /// Takes the right to create. `None` when the segment has appeared
    /// meanwhile, so that there is nothing to create.
    pub(crate) fn take(dir: &ShmDir, id: &SegmentId) -> Result<Option<Self>, SegmentError> {
        let path = id.birth_path(dir);
        let control = id.control_path(dir);
        let deadline = Instant::now() + CREATION_WAIT;
        let mut nap = Duration::from_micros(500);
        loop {
            if stat_path(&control)?.is_some() {
                return Ok(None);
            }
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            let fd = match PrivateFd::open(&path, flags, mode) {
                Ok(fd) => fd,
                Err(error) => {
                    check_owner(&path, stat_path(&path)?)?;
                    return Err(error.into());
                }
            };
            check_owner(&path, Some(crate::shm::stat_fd(&fd, &path)?))?;
            let file = LockFile::new(fd, path.clone());
            match file.try_lock(CREATION, Mode::Exclusive)? {
                // Its last holder may have removed it while we opened it.
                Some(lock) if is_named(file.anchor(), &path)? => {
                    let birth = Self { lock: Some(lock), file };
                    crash_point!(CreateBirth);
                    let missing = stat_path(&control)?.is_none();
                    return Ok(missing.then_some(birth));
                }
                Some(_) => {}
                None if Instant::now() >= deadline => {
                    let waited_ms = CREATION_WAIT.as_millis() as u64;
                    return Err(LockError::Busy { path, waited_ms }.into());
                }
                None => {
                    std::thread::sleep(nap);
                    nap = (nap * 2).min(Duration::from_millis(20));
                }
            }
        }
    }
}

impl Drop for Birth {
    fn drop(&mut self) {
        // While the lock is held the name is ours to take away. In a forked
        // child the question fails, and nothing is touched.
        let ours =
            self.lock.is_some() && is_named(self.file.anchor(), self.file.path()).unwrap_or(false);
        if ours && let Err(error) = unlink(self.file.path()) {
            tracing::warn!(%error, "a birth file is left; `ucm gc` removes it");
        }
        self.lock = None;
    }
}

/// A complete segment without a name.
pub(crate) struct Newborn {
    control: Draft,
    data: Draft,
    parts: Parts,
    data_path: PathBuf,
    /// Whether the data file has its name, which goes again if we fail.
    data_linked: bool,
}

impl Newborn {
    /// Reserves and initialises both files. Nothing of it can be seen.
    pub(crate) fn prepare(
        options: &SegmentOptions,
        geometry: &Geometry,
        boot_id: &[u8; 16],
    ) -> Result<Self, SegmentError> {
        let SegmentOptions { dir, id, .. } = options;
        dir.check_room(geometry.data_bytes.saturating_add(geometry.control_bytes))?;
        let nonce = fresh_nonce()?;
        let data_path = id.data_path(dir, nonce);
        let control_path = id.control_path(dir);

        let data = Draft::create(dir, &id.data_name(nonce), geometry.data_bytes)?;
        crash_point!(CreateDrafted);
        let data_map = Mapping::new(data.fd(), &data_path, geometry.data_bytes, true)?;
        // Both before the first page: pages stay what and where they are.
        if options.huge_pages {
            data_map.advise_huge_pages();
        }
        if let Some(node) = options.numa_node {
            data_map.prefer_node(node);
        }
        if geometry.data_bytes > RANGE_BYTES {
            data_map.populate();
        }
        data.reserve()?;
        crash_point!(CreateReserved);

        let draft_name = id.control_draft_name(nonce);
        let control = Draft::create(dir, &draft_name, geometry.control_bytes)?;
        control.reserve()?;
        let control_map = Mapping::new(control.fd(), &control_path, geometry.control_bytes, true)?;
        let identity = SegmentIdentity {
            nonce,
            boot_id: *boot_id,
            created_unix_s: unix_s(),
            io_quarantine_ns: options.io_quarantine_ns,
            persist: options.persist,
        };
        // SAFETY: the plane goes into `Parts` together with the mapping.
        let region = unsafe { region(&control_map) };
        // SAFETY: pages fresh from the kernel are zero, mapped writable, and
        // the file has no name, so nobody else can look at it.
        let plane = unsafe { ControlPlane::create(region, geometry, &identity) }
            .map_err(SegmentError::Initialise)?;
        let file = Arc::new(LockFile::new(control.reopen(&control_path)?, control_path));
        let presence = file.lock(PRESENCE, Mode::Shared, LIFECYCLE_WAIT)?;
        let parts = Parts { plane, control: control_map, data: Some(data_map), file, presence };
        crash_point!(CreateInitialised);
        Ok(Self { control, data, parts, data_path, data_linked: false })
    }

    /// Names the data file.
    pub(crate) fn link_data(&mut self) -> Result<(), SegmentError> {
        self.data.link(&self.data_path)?;
        self.data_linked = true;
        crash_point!(CreateDataLinked);
        Ok(())
    }

    /// Names the control file: the segment exists from here on. `None` when
    /// another one has the name.
    pub(crate) fn link_control(
        mut self,
        options: &SegmentOptions,
    ) -> Result<Option<Segment>, SegmentError> {
        match self.control.link(&options.id.control_path(&options.dir)) {
            Ok(()) => {}
            Err(ShmError::AlreadyExists { .. }) => {
                self.discard();
                return Ok(None);
            }
            Err(error) => {
                self.discard();
                return Err(error.into());
            }
        }
        crash_point!(CreateControlLinked);
        // The drafts let go of their creation bytes only after this.
        let Self { parts, .. } = self;
        Ok(Some(Segment::new(parts, &options.dir, &options.id, true)))
    }

    /// Takes the data file's name away again, still under the creation lock.
    fn discard(&mut self) {
        if std::mem::take(&mut self.data_linked)
            && let Err(error) = unlink(&self.data_path)
        {
            tracing::warn!(%error, "an orphan is left; `ucm gc` removes it");
        }
    }
}

/// Creates the segment. `None` when somebody else did.
pub(crate) fn create(
    options: &SegmentOptions,
    geometry: &Geometry,
    boot_id: &[u8; 16],
) -> Result<Option<Segment>, SegmentError> {
    let Some(_birth) = Birth::take(&options.dir, &options.id)? else { return Ok(None) };
    let mut newborn = Newborn::prepare(options, geometry, boot_id)?;
    newborn.link_data()?;
    newborn.link_control(options)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use ucm_core::segment::geometry::CacheShape;

    use super::*;
    use crate::gc::{self, State};

    fn options(dir: &std::path::Path) -> SegmentOptions {
        let shape = CacheShape {
            slot_count: 64,
            reserved_slots: 0,
            shard_bytes: 4096,
            shards_per_block: 4,
            local_rank_size: 2,
            participants: 32,
            content_tag: 0,
        };
        let id = SegmentId::new("half").unwrap();
        SegmentOptions { dir: ShmDir::new(dir), ..SegmentOptions::new(id, shape) }
    }

    /// Creates up to the moment between the two names.
    fn half_made(options: &SegmentOptions) -> (Birth, Newborn) {
        let geometry = Geometry::new(options.shape).unwrap();
        let boot_id = crate::identity::boot_id().unwrap();
        let birth = Birth::take(&options.dir, &options.id).unwrap().unwrap();
        let mut newborn = Newborn::prepare(options, &geometry, &boot_id).unwrap();
        newborn.link_data().unwrap();
        (birth, newborn)
    }

    fn states(options: &SegmentOptions) -> Vec<State> {
        gc::scan(&options.dir).unwrap().iter().map(|found| found.state).collect()
    }

    #[test]
    fn a_creator_that_stops_half_way() {
        let Some(dir) = std::env::var_os("UCM_TEST_HALF_MADE") else { return };
        let _held = half_made(&options(dir.as_ref()));
        println!("\nhalf made");
        std::thread::sleep(Duration::from_secs(3600));
    }

    #[test]
    fn a_creator_killed_between_data_and_control_leaves_an_orphan_and_wedges_nobody() {
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = options(temp.path());
        let name = "segment::create::tests::a_creator_that_stops_half_way";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env("UCM_TEST_HALF_MADE", temp.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let told = stdout.lines().map_while(Result::ok).any(|line| line == "half made");
        assert!(told);
        // As long as it lives, the data are nobody's to take.
        assert_eq!(states(&options), [State::BeingMade, State::BeingMade]);
        assert!(gc::collect(&options.dir, true).unwrap().removed.is_empty());

        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(states(&options), [State::Orphan, State::Orphan]);
        let segment = Segment::open_or_create(&options).unwrap();
        assert!(segment.is_created());
        let collected = gc::collect(&options.dir, false).unwrap();
        assert_eq!(collected.removed.len(), 1);
        assert!(segment.is_linked().unwrap() && segment.data_path().exists());
        drop(segment);
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
    }

    #[test]
    fn who_loses_the_name_takes_its_data_back() {
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = options(temp.path());
        let (birth, newborn) = half_made(&options);
        std::fs::write(options.id.control_path(&options.dir), "in the way").unwrap();
        assert!(newborn.link_control(&options).unwrap().is_none());
        drop(birth);
        let names: Vec<_> = std::fs::read_dir(temp.path()).unwrap().flatten().collect();
        assert_eq!(names.len(), 1);
    }

    #[test]
    fn what_is_made_shows_in_the_header_that_is_read_without_mapping() {
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        for persist in [false, true] {
            let id = SegmentId::new(if persist { "kept" } else { "gone" }).unwrap();
            let options = SegmentOptions { persist, id, ..options(temp.path()) };
            let segment = Segment::open_or_create(&options).unwrap();
            let anchor = segment.lock_file().anchor();
            let peek = crate::segment::peek::HeaderPeek::read(anchor, temp.path()).unwrap();
            assert!(peek.is_segment() && peek.is_whole());
            assert_eq!(peek.is_persistent(), persist);
            assert_eq!(peek.is_persistent(), segment.plane().is_persistent());
            assert_eq!(peek.nonce(), Some(segment.plane().nonce()));
            assert_eq!(peek.boot_id(), crate::identity::boot_id().unwrap());
            assert_eq!(peek.data_bytes(), segment.plane().geometry().data_bytes);
        }
    }

    #[test]
    fn a_temporary_file_is_kept_while_its_creator_lives_and_collected_afterwards() {
        let temp = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = options(temp.path());
        let path = temp.path().join(format!(".{}.tmp", options.id.data_name(1)));
        std::fs::write(&path, "").unwrap();
        let fd = crate::shm::open_existing(&path, true).unwrap().unwrap();
        let file = LockFile::new(fd, path.clone());
        let creation = file.try_lock(CREATION, Mode::Exclusive).unwrap().unwrap();
        assert!(gc::collect(&options.dir, true).unwrap().removed.is_empty());
        drop(creation);
        assert_eq!(gc::collect(&options.dir, false).unwrap().removed.len(), 1);
        assert!(!path.exists());
    }
}
