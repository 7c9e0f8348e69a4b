//! Dying, stopping or pausing at a named point of the protocol.

/// Whether this build has the points at all.
pub const IN_THIS_BUILD: bool = cfg!(ucm_crash);

#[cfg(ucm_crash)]
pub use armed::{arm, install};

/// There is nothing to install in this build.
#[cfg(not(ucm_crash))]
pub fn install(_board: &'static crate::board::Board) {}

/// Refuses: this build has no points.
///
/// # Errors
/// Always.
#[cfg(not(ucm_crash))]
pub fn arm(_point: &str, _nth: u32, _mode: &str) -> Result<(), String> {
    Err("built without --cfg ucm_crash: there are no crash points".to_string())
}

#[cfg(ucm_crash)]
mod armed {
    use std::sync::OnceLock;
    use std::time::Duration;

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use ucm_core::crash::{self, Point};
    use ucm_core::sync::{AtomicU32, Ordering};

    use crate::board::Board;

    const KILL: u32 = 1;
    const STOP: u32 = 2;
    /// Anything above is a pause of that many milliseconds more.
    const PAUSE: u32 = 16;

    /// One point at which something happens once. All zero: nothing.
    struct Arm {
        /// Passings left; 0: not armed.
        left: AtomicU32,
        point: AtomicU32,
        mode: AtomicU32,
    }

    static ARMS: [Arm; 4] = [const {
        Arm { left: AtomicU32::new(0), point: AtomicU32::new(0), mode: AtomicU32::new(0) }
    }; 4];
    static BOARD: OnceLock<&'static Board> = OnceLock::new();

    /// From now on every passing is counted on the board.
    pub fn install(board: &'static Board) {
        if BOARD.set(board).is_ok() {
            crash::install(on_point);
        }
    }

    /// Something happens at the `nth` passing of `point` from now on.
    ///
    /// # Errors
    /// An unknown point or mode, or no place for one more.
    pub fn arm(point: &str, nth: u32, mode: &str) -> Result<(), String> {
        let found = Point::ALL.iter().find(|known| known.name() == point);
        let point = *found.ok_or_else(|| format!("no such point: {point}"))?;
        let mode = match (mode, mode.strip_prefix("pause:").map(str::parse::<u32>)) {
            ("kill", _) => KILL,
            ("stop", _) => STOP,
            (_, Some(Ok(ms))) => PAUSE + ms,
            _ => return Err(format!("no such mode: {mode}")),
        };
        let idle = ARMS.iter().find(|arm| arm.left.load(Ordering::SeqCst) == 0);
        let arm = idle.ok_or("too many points armed")?;
        arm.point.store(point as u32, Ordering::SeqCst);
        arm.mode.store(mode, Ordering::SeqCst);
        arm.left.store(nth.max(1), Ordering::SeqCst);
        Ok(())
    }

    fn on_point(point: Point) {
        if let Some(board) = BOARD.get() {
            board.pass(point);
        }
        for arm in &ARMS {
            let armed = arm.left.load(Ordering::SeqCst) > 0
                && arm.point.load(Ordering::SeqCst) == point as u32;
            if armed && arm.left.fetch_sub(1, Ordering::SeqCst) == 1 {
                act(arm.mode.load(Ordering::SeqCst));
            }
        }
    }

    fn act(mode: u32) {
        match mode {
            KILL => loop {
                let _dying = kill(Pid::this(), Signal::SIGKILL);
            },
            STOP => {
                let _stopped = kill(Pid::this(), Signal::SIGSTOP);
            }
            pause => std::thread::sleep(Duration::from_millis((pause - PAUSE).into())),
        }
    }
}
