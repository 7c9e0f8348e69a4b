//! Named points of the pipelines and the file backend at which a test may end or pause this process.
//!
//! As in `ucm_core::crash`: they exist under `--cfg ucm_crash` and are nothing
//! in any other build. [`arm_from_env`] makes a rank process die at points of
//! all three layers, as `UCM_CRASH` says.

ucm_core::define_crash_points! {
    /// Load: this rank owns the slot, the backend has not been asked.
    LoadClaimed,
    /// Load: the backend has the requests.
    LoadSubmitted,
    /// Load: the bytes are in the slot, which is still LOADING.
    LoadArrived,
    /// Load: READY, the owner's pin still held.
    LoadPublished,
    /// Load: copied to the device, the pin still held.
    LoadCopied,
    /// Dump: the bytes are in a slot that is still LOADING.
    DumpStaged,
    /// Dump: READY, the backend has not been asked.
    DumpPublished,
    /// Dump: the backend has taken the shard, the pin still held.
    DumpStored,
    /// File: the temporary file is made and locked, and empty.
    FileMade,
    /// File: a shard is in the temporary file.
    FileShardWritten,
    /// File: every shard and the header are in, not synced.
    FileHeaderWritten,
    /// File: the block has its final name, its writer does not know it yet.
    FileRenamed,
}

/// `crash_point!(Name)`: as in `ucm_core::crash`.
macro_rules! crash_point {
    ($point:ident) => {
        #[cfg(ucm_crash)]
        $crate::crash::hit($crate::crash::Point::$point);
    };
}
pub(crate) use crash_point;

#[cfg(ucm_crash)]
pub use armed::arm_from_env;

/// Says so if somebody asks for deaths that this build cannot die.
#[cfg(not(ucm_crash))]
pub fn arm_from_env() {
    if std::env::var_os("UCM_CRASH").is_some() {
        tracing::error!("UCM_CRASH is set, but this build has no crash points (--cfg ucm_crash)");
    }
}

#[cfg(ucm_crash)]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use crate::content::mix;

    /// What `UCM_CRASH` asks for.
    enum Plan {
        /// `Name:n`: death at the n-th passing of a point.
        At { name: String, passings_left: AtomicU64 },
        /// `*:n:seed`: at each passing of any point, death once in `n` times.
        Anywhere { one_in: u64, draws: AtomicU64 },
    }

    static PLAN: OnceLock<Plan> = OnceLock::new();

    /// From now on this process dies as `UCM_CRASH` says.
    pub fn arm_from_env() {
        let Ok(text) = std::env::var("UCM_CRASH") else { return };
        let Some(plan) = parse(&text) else {
            tracing::error!(text, "UCM_CRASH is neither NAME:N nor *:N:SEED");
            return;
        };
        if PLAN.set(plan).is_ok() {
            ucm_core::crash::install(|point| on_point(point.name()));
            ucm_posix::crash::install(|point| on_point(point.name()));
            super::install(|point| on_point(point.name()));
        }
    }

    fn parse(text: &str) -> Option<Plan> {
        let mut parts = text.split(':');
        let (name, number) = (parts.next()?, parts.next()?.parse::<u64>().ok()?);
        if name == "*" {
            let seed = parts.next()?.parse().ok()?;
            return Some(Plan::Anywhere { one_in: number.max(1), draws: AtomicU64::new(seed) });
        }
        let name = name.to_owned();
        Some(Plan::At { name, passings_left: AtomicU64::new(number.max(1)) })
    }

    fn on_point(name: &str) {
        let dies = match PLAN.get() {
            Some(Plan::At { name: at, passings_left }) => {
                name == at && passings_left.fetch_sub(1, Ordering::SeqCst) == 1
            }
            Some(Plan::Anywhere { one_in, draws }) => {
                let draw = draws.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::SeqCst);
                mix(draw).is_multiple_of(*one_in)
            }
            None => false,
        };
        if dies {
            use nix::sys::signal::{Signal, kill};
            loop {
                let _dying = kill(nix::unistd::Pid::this(), Signal::SIGKILL);
            }
        }
    }
}
