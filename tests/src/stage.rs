//! A stage: a directory, a segment, a board, the actors, and a watchdog over all of them.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;
use ucm_core::cache::Audit;
use ucm_posix::Segment;

use crate::audit;
use crate::board::{Board, Tally};
use crate::process::{Children, Process};
use crate::setup::{Place, Setup};

/// How long a test may take before it counts as hung.
const WATCHDOG_S: u64 = 45;
/// After the children are dead the test must end by itself; if it does not,
/// the hang is in the test's own process.
const GRACE: Duration = Duration::from_secs(20);

static STAGES: AtomicU32 = AtomicU32::new(0);

/// A whole number from the environment, or what it is without.
pub fn number_from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// See the module.
pub struct Stage {
    program: PathBuf,
    place: Place,
    board: Arc<Board>,
    children: Children,
    deadline: Instant,
    /// Keeps the segment from being removed while actors come and go.
    anchor: Arc<Mutex<Option<Arc<Segment>>>>,
    /// Dropped: the watchdog ends.
    _watchdog: Sender<()>,
    temp: TempDir,
}

impl Stage {
    /// A segment of these measures. `program` is the actor's.
    pub fn new(setup: Setup, program: &str) -> Self {
        Self::lasting(setup, program, 0)
    }

    /// The same for a test that works for `seconds` on purpose.
    ///
    /// # Panics
    /// When /dev/shm does not work here.
    pub fn lasting(setup: Setup, program: &str, seconds: u64) -> Self {
        let number = STAGES.fetch_add(1, Ordering::Relaxed);
        let temp = tempfile::Builder::new()
            .prefix(&format!("ucm-tests-{}-{number}-", std::process::id()))
            .tempdir_in("/dev/shm")
            .expect("a directory in /dev/shm");
        let id = format!("t{}-{number}", std::process::id());
        let place = Place { dir: temp.path().to_path_buf(), id, setup };
        let board = Arc::new(Board::open(&place.board_path()).expect("a board"));
        let options = place.options().expect("a valid setup");
        let segment = Segment::open_or_create(&options).expect("a segment");
        let anchor = Arc::new(Mutex::new(Some(Arc::new(segment))));
        let children = Children::default();
        let patience = number_from_env("UCM_TEST_WATCHDOG_S", WATCHDOG_S) + seconds;
        let deadline = Instant::now() + Duration::from_secs(patience);
        let watchdog = watch(deadline, Arc::clone(&children), Arc::clone(&anchor));
        let program = program.into();
        Self { program, place, board, children, deadline, anchor, _watchdog: watchdog, temp }
    }

    /// One more process.
    pub fn start(&self) -> Process {
        Process::start(&self.program, &self.place, Arc::clone(&self.children), self.deadline)
    }

    /// One more process, the first one of a pid namespace of its own. What is
    /// killed is the process that made the namespace; the kernel then kills
    /// everything in it. `None`, loudly, where that is not permitted.
    pub fn start_in_namespace(&self) -> Option<Process> {
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["--pid", "--fork", "--kill-child=SIGKILL"]);
        let permitted = std::process::Command::new("unshare")
            .args(["--pid", "--fork", "true"])
            .status()
            .is_ok_and(|status| status.success());
        if !permitted {
            eprintln!("SKIPPED: making a pid namespace is not permitted here; nothing was tested");
            return None;
        }
        let command = unshare.arg(&self.program);
        Some(Process::start_as(command, &self.place, Arc::clone(&self.children), self.deadline))
    }

    /// The place its actors are told.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// One more process, joined as `rank`.
    pub fn rank(&self, rank: u32) -> Process {
        let mut process = self.start();
        process.expect(&format!("join {rank}"), "joined");
        process
    }

    /// The harness's own table.
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// The segment, held by the stage itself.
    ///
    /// # Panics
    /// After [`let_go`](Self::let_go).
    pub fn segment(&self) -> Arc<Segment> {
        let anchor = self.anchor.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(anchor.as_ref().expect("the stage let go of it"))
    }

    /// Lets go of the segment: now the last actor out removes it.
    pub fn let_go(&self) {
        *self.anchor.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Opens the segment (again), as it is.
    ///
    /// # Panics
    /// When that does not work.
    pub fn hold_again(&self) {
        let options = self.place.options().expect("a valid setup");
        let segment = Segment::open_or_create(&options).expect("the segment opens");
        *self.anchor.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(segment));
    }

    /// The segment's files that are there.
    pub fn segment_files(&self) -> Vec<String> {
        segment_files(self.temp.path())
    }

    /// Looks again until it is so; the watchdog ends what never is.
    ///
    /// # Panics
    /// When the deadline passes.
    pub fn until(&self, what: &str, mut so: impl FnMut() -> bool) {
        while !so() {
            assert!(Instant::now() < self.deadline + Duration::from_secs(5), "never: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until `count` pins are held, by whomever.
    pub fn until_pins(&self, count: u64) {
        let segment = self.segment();
        self.until("the pins", || Audit::new(&segment.plane()).pins() == count);
    }

    /// The actors saw nothing wrong.
    ///
    /// # Panics
    /// When they did.
    pub fn assert_nothing_wrong(&self) {
        let tally = |tally| self.board.tally(tally);
        // Bytes prove nothing when the helper broke its own deadline.
        if tally(Tally::TransfersOverran) == 0 {
            assert_eq!(tally(Tally::WrongBytes), 0, "wrong bytes; see above");
        } else {
            eprintln!("INCONCLUSIVE: a transfer ended after its quarantine (machine overloaded?)");
        }
        assert_eq!(tally(Tally::Duplicates), 0, "a key had two living owners; see above");
        assert_eq!(tally(Tally::LatePublishes), 0, "a living rank was taken for dead; see above");
        assert_eq!(tally(Tally::Impossible), 0, "see above");
    }

    /// The end: all processes have ended. Checks everything that is left.
    ///
    /// # Panics
    /// When something is wrong.
    pub fn finish(self) {
        self.assert_nothing_wrong();
        let alive = self.children.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert_eq!(alive, [], "the test has not ended its actors");
        audit::assert_sound(&self.segment());
        self.let_go();
        assert_eq!(self.segment_files(), [""; 0], "the last one out removes the segment");
    }

    /// Everything that was counted, for people.
    pub fn tallies(&self) -> String {
        let said = Tally::ALL.iter().map(|&tally| (tally, self.board.tally(tally)));
        let said = said.filter(|(_, count)| *count > 0);
        said.map(|(tally, count)| format!("{tally:?} {count}")).collect::<Vec<_>>().join(", ")
    }
}

fn segment_files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.contains("ucm")).collect()
}

/// Ends a hang: a picture of the segment, then the children's death, then, if
/// the test itself hangs, this process's.
fn watch(
    deadline: Instant,
    children: Children,
    anchor: Arc<Mutex<Option<Arc<Segment>>>>,
) -> Sender<()> {
    let (sender, receiver) = channel::<()>();
    let name = std::thread::current().name().unwrap_or("a test").to_string();
    std::thread::spawn(move || {
        let patience = deadline.saturating_duration_since(Instant::now());
        if receiver.recv_timeout(patience) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        eprintln!("WATCHDOG: {name} hangs");
        if let Some(segment) = &*anchor.lock().unwrap_or_else(PoisonError::into_inner) {
            eprintln!("{}", audit::picture(segment));
        }
        for &child in &*children.lock().unwrap_or_else(PoisonError::into_inner) {
            let _gone = kill(child, Signal::SIGKILL);
        }
        if receiver.recv_timeout(GRACE) == Err(RecvTimeoutError::Timeout) {
            eprintln!("WATCHDOG: {name} hangs by itself");
            std::process::abort();
        }
    });
    sender
}
