//! Fences run in other processes: `membarrier`.
//!
//! The global kind reaches every thread of every process that has registered,
//! which the private kind does not. It costs the sleeper about a microsecond,
//! and the publisher nothing.

use std::sync::OnceLock;

use ucm_core::channel::Barrier;
use ucm_core::sync::{Ordering, fence};

use crate::futex::waiter::SystemWaiter;

const QUERY: libc::c_int = 0;
const GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
const REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;

fn membarrier(command: libc::c_int) -> libc::c_long {
    // SAFETY: the call takes no pointer and changes no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) }
}

/// Asked once: registration lasts as long as the process. (A forked child is
/// refused by the channel before it could rely on it.)
fn is_registered() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| {
        let needed = libc::c_long::from(GLOBAL_EXPEDITED | REGISTER_GLOBAL_EXPEDITED);
        let offered = membarrier(QUERY);
        let ok = offered >= 0
            && offered & needed == needed
            && membarrier(REGISTER_GLOBAL_EXPEDITED) == 0;
        if !ok {
            tracing::info!("membarrier is not available; channels fence with every publication");
        }
        ok
    })
}

impl Barrier for SystemWaiter {
    fn register(&self) -> bool {
        is_registered()
    }

    fn heavy_fence(&self) {
        fence(Ordering::SeqCst);
        if is_registered() && membarrier(GLOBAL_EXPEDITED) != 0 {
            // Refused after it was granted (a sandbox that came later): sleep
            // is in slices, so a wake-up that is missed is late and not lost.
            warn_once!("membarrier was refused after it was registered");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registered_process_may_fence() {
        let registered = SystemWaiter.register();
        assert_eq!(SystemWaiter.register(), registered);
        SystemWaiter.heavy_fence();
        if registered {
            assert_eq!(membarrier(GLOBAL_EXPEDITED), 0);
        }
    }
}
