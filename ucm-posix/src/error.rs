//! What can go wrong, one type per operation, with the errno kept and the remedy said.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;
use ucm_core::segment::attach::AttachError;
use ucm_core::segment::geometry::ShapeError;

/// A system call that failed on a file.
#[derive(Debug, Error)]
#[error("{operation} on {} failed: {source}", path.display())]
pub struct OsError {
    /// The system call.
    pub operation: &'static str,
    /// What it was applied to.
    pub path: PathBuf,
    /// The errno, as the standard library carries it.
    #[source]
    pub source: io::Error,
}

impl OsError {
    pub(crate) fn new(operation: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self { operation, path: path.to_path_buf(), source: source.into() }
    }

    /// The errno, where the failure came from the kernel.
    pub fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }
}

/// A handle was used in a forked child of the process that made it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error(
    "this handle belongs to the process that made it and was used in a forked child; \
     open the segment again in the child"
)]
pub struct ForkedError;

/// Why a lock byte could not be taken or asked about.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LockError {
    /// Used in a forked child.
    #[error(transparent)]
    Forked(#[from] ForkedError),
    /// This process holds as many descriptors as the fork rule can watch over.
    #[error(
        "this process already holds {limit} descriptors of segments, which is the limit; \
         close segments that are not used"
    )]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// Somebody else held the byte until the deadline.
    #[error(
        "another process has held {} for more than {waited_ms} ms (it creates, attaches or leaves \
         the segment); if it is stopped (SIGSTOP, a debugger), let it go on or end it",
        path.display()
    )]
    Busy {
        /// The file.
        path: PathBuf,
        /// How long it was tried, in milliseconds.
        waited_ms: u64,
    },
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

/// What limits the memory that is left.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MemoryLimit {
    /// The machine: `MemAvailable` of `/proc/meminfo`.
    Machine,
    /// A control group, by its directory.
    Cgroup(PathBuf),
}

impl std::fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Machine => f.write_str("the machine (MemAvailable)"),
            Self::Cgroup(path) => write!(f, "the memory limit of control group {}", path.display()),
        }
    }
}

/// Why a shared-memory file could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ShmError {
    /// The file system is too small.
    #[error(
        "{} has {free_bytes} bytes free, but {needed_bytes} are needed; remove what nobody \
         uses (`ucm gc`), lower the capacity, or enlarge it (docker: --shm-size; kubernetes: an emptyDir with medium Memory; \
         host: mount -o remount,size=... {})",
        dir.display(), dir.display()
    )]
    NoSpace {
        /// The directory.
        dir: PathBuf,
        /// What the segment takes, in bytes.
        needed_bytes: u64,
        /// What is left, in bytes.
        free_bytes: u64,
    },
    /// The pages would not fit into memory: the OOM killer would come before ENOSPC.
    #[error(
        "{needed_bytes} bytes of shared memory are needed, but {limit} leaves {available_bytes}; \
         lower the capacity or raise the limit"
    )]
    NotEnoughMemory {
        /// What the segment takes, in bytes.
        needed_bytes: u64,
        /// What may still be used, in bytes.
        available_bytes: u64,
        /// Who says so.
        limit: MemoryLimit,
    },
    /// The name is taken.
    #[error("{} exists already", path.display())]
    AlreadyExists {
        /// The name.
        path: PathBuf,
    },
    /// Used in a forked child, or too many descriptors.
    #[error(transparent)]
    Lock(LockError),
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

impl From<LockError> for ShmError {
    fn from(error: LockError) -> Self {
        match error {
            LockError::Os(error) => Self::Os(error),
            other => Self::Lock(other),
        }
    }
}

/// What is wrong with a segment that cannot be attached as it is.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Not a regular file.
    #[error("it is not a regular file")]
    NotAFile,
    /// It does not begin as a control segment does.
    #[error("it begins with {found:#018x}, a control segment with {expected:#018x}")]
    NotASegment {
        /// Its first word.
        found: u64,
        /// The magic number.
        expected: u64,
    },
    /// The file is not as long as its header says.
    #[error(
        "the file is {file_bytes} bytes long, but its header needs {needed_bytes}: it was truncated"
    )]
    ControlBytes {
        /// What `fstat` says.
        file_bytes: u64,
        /// What the header says, or the length of a header.
        needed_bytes: u64,
    },
    /// It was made before the machine was last started.
    #[error("it was made in boot {}, this is boot {}", uuid(segment), uuid(here))]
    OtherBoot {
        /// The boot id in its header.
        segment: [u8; 16],
        /// This boot's.
        here: [u8; 16],
    },
    /// The core refuses it: another version, layout or configuration.
    #[error(transparent)]
    Core(#[from] AttachError),
    /// A participant found it wrong while using it.
    #[error("it was found corrupt while in use")]
    Poisoned,
    /// Its data segment is gone.
    #[error("its data segment {} is gone", path.display())]
    DataMissing {
        /// Where it should be.
        path: PathBuf,
    },
    /// Its data segment has another length than the header says.
    #[error(
        "its data segment {} is {file_bytes} bytes long, its header says {needed_bytes}",
        path.display()
    )]
    DataBytes {
        /// The data segment.
        path: PathBuf,
        /// What `fstat` says.
        file_bytes: u64,
        /// What the header says.
        needed_bytes: u64,
    },
}

impl Refusal {
    /// Whether the segment is of no use to anybody any more, so that, once
    /// nobody has it open, a new one may take its place. What is intact and
    /// merely made otherwise is, unless it was meant to be kept. What shows no
    /// sign of being a segment is never touched.
    pub(crate) fn allows_replacement(&self, persistent: bool) -> bool {
        const MAGIC_BYTES: u64 = 8;
        match self {
            Self::NotAFile | Self::NotASegment { .. } => false,
            Self::ControlBytes { file_bytes, .. } => *file_bytes >= MAGIC_BYTES,
            Self::OtherBoot { .. }
            | Self::Poisoned
            | Self::DataMissing { .. }
            | Self::DataBytes { .. } => true,
            Self::Core(error) => match error {
                AttachError::NotASegment { .. } | AttachError::AtomicsNotLockFree => false,
                AttachError::BadShape(_)
                | AttachError::Length { .. }
                | AttachError::OutOfRegion(_)
                | AttachError::ForeignBoot { .. } => true,
                _ => !persistent,
            },
        }
    }
}

fn uuid(bytes: &[u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Why a segment could not be created, joined or watched.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The name cannot be one of a segment.
    #[error(
        "segment id {id:?} is not possible: 1 to {max_chars} characters of A-Z a-z 0-9 _ - \
         are"
    )]
    BadId {
        /// What was given.
        id: String,
        /// The longest possible.
        max_chars: usize,
    },
    /// The configuration cannot be laid out.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// There is no such segment.
    #[error("there is no segment {}; start a rank first, or check the id", path.display())]
    NotFound {
        /// The control segment's path.
        path: PathBuf,
    },
    /// The segment belongs to somebody else.
    #[error(
        "{} belongs to user {owner}, this process runs as user {me}; run as the same user or \
         choose another segment id",
        path.display()
    )]
    OtherUser {
        /// The control segment's path.
        path: PathBuf,
        /// Its owner's uid.
        owner: u32,
        /// Our effective uid.
        me: u32,
    },
    /// The segment exists and cannot be used as it is. It is never changed in place.
    #[error(
        "segment {} is refused: {refusal}; {}",
        path.display(),
        if *in_use { "it is in use, so stop its processes first or choose another segment id" }
        else { "nobody uses it, so `ucm gc --all` may remove it" }
    )]
    Refused {
        /// The control segment's path.
        path: PathBuf,
        /// Whether somebody uses it.
        in_use: bool,
        /// What is wrong.
        #[source]
        refusal: Refusal,
    },
    /// The segment's name changed hands again and again while we tried.
    #[error(
        "segment {} was removed and made again {attempts} times while attaching; \
         are two deployments using one segment id?",
        path.display()
    )]
    Unstable {
        /// The control segment's path.
        path: PathBuf,
        /// How often it was tried.
        attempts: u32,
    },
    /// The freshly made control plane could not be initialised.
    #[error("the new control plane cannot be initialised: {0}")]
    Initialise(#[source] AttachError),
    /// A lock byte.
    #[error(transparent)]
    Lock(LockError),
    /// A file.
    #[error(transparent)]
    Shm(ShmError),
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

impl From<LockError> for SegmentError {
    fn from(error: LockError) -> Self {
        match error {
            LockError::Os(error) => Self::Os(error),
            other => Self::Lock(other),
        }
    }
}

impl From<ShmError> for SegmentError {
    fn from(error: ShmError) -> Self {
        match error {
            ShmError::Os(error) => Self::Os(error),
            ShmError::Lock(error) => Self::Lock(error),
            other => Self::Shm(other),
        }
    }
}

impl From<ForkedError> for SegmentError {
    fn from(error: ForkedError) -> Self {
        Self::Lock(error.into())
    }
}

/// Why an attached segment could not be joined as a participant.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JoinError {
    /// Another process is this rank.
    #[error(
        "rank {rank} is taken by process {pid} (in its own pid namespace); give every process \
         of this node a rank of its own"
    )]
    RankTaken {
        /// The rank.
        rank: u32,
        /// The holder's process id, as it wrote it.
        pid: u32,
    },
    /// No such rank.
    #[error("rank {rank} is not below local_rank_size = {local_rank_size}")]
    RankOutOfRange {
        /// What was asked for.
        rank: u32,
        /// How many ranks share this node.
        local_rank_size: u32,
    },
    /// A rank joined without saying which.
    #[error("a rank joins with its number, and none was given")]
    RankMissing,
    /// A rank joined a segment that was opened without its data plane.
    #[error("a rank needs the data plane; open the segment with Segment::open_or_create")]
    NoDataPlane,
    /// The table is full.
    #[error(
        "all {participants} places of segment {id} are taken; raise `participants` (in steps of 32)"
    )]
    TableFull {
        /// The segment.
        id: String,
        /// Places in its table.
        participants: u32,
    },
    /// The segment's name is gone, or is another segment's by now.
    #[error("segment {} was removed meanwhile; open it again", path.display())]
    SegmentGone {
        /// The control segment's path.
        path: PathBuf,
    },
    /// The core refuses.
    #[error(transparent)]
    Core(ucm_core::cache::JoinError),
    /// Used in a forked child.
    #[error(transparent)]
    Forked(#[from] ForkedError),
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] OsError),
}
