//! What this process may use: memory, locked memory, descriptors.

use nix::sys::resource::{Resource, getrlimit};
use ucm_posix::memory::available;

use crate::cli::output::bytes;
use crate::doctor::{Finding, Needs};

/// Descriptors of a rank with room to spare: locks, event logs, open blocks
/// for reading and for writing.
const DESCRIPTORS: u64 = 1024;

pub(super) fn memory(needs: &Needs) -> Finding {
    const CHECK: &str = "memory";
    let Some((free, limit)) = available() else {
        let cost = "a cache that does not fit ends in the OOM killer instead of an error";
        return Finding::slow(CHECK, "nobody says how much is left", cost, "mount /proc");
    };
    let found = format!("{} may still be used ({limit})", bytes(free));
    if free < needs.capacity_bytes {
        return Finding::bad(
            CHECK,
            found,
            "the cache does not fit: creating it will be refused",
            "lower capacity_bytes, or raise the limit (docker run --memory, memory.max)",
        );
    }
    Finding::ok(CHECK, found)
}

pub(super) fn memlock(needs: &Needs) -> Finding {
    const CHECK: &str = "locked memory";
    let Ok((soft, _)) = getrlimit(Resource::RLIMIT_MEMLOCK) else {
        return Finding::ok(CHECK, "no limit is known");
    };
    if soft == nix::libc::RLIM_INFINITY {
        return Finding::ok(CHECK, "unlimited");
    }
    let found = format!("at most {}", bytes(soft));
    if soft >= needs.capacity_bytes {
        return Finding::ok(CHECK, found);
    }
    Finding::slow(
        CHECK,
        found,
        "buffers cannot be registered with io_uring, and some drivers cannot pin them: \
         plain reads and unpinned copies instead",
        "ulimit -l unlimited   (docker run --ulimit memlock=-1)",
    )
}

pub(super) fn descriptors() -> Finding {
    const CHECK: &str = "descriptors";
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return Finding::ok(CHECK, "no limit is known");
    };
    let found = format!("at most {soft} open files (up to {hard} on request)");
    if soft >= DESCRIPTORS {
        return Finding::ok(CHECK, found);
    }
    let cost = "dumps of many blocks at a time fail with EMFILE";
    Finding::bad(CHECK, found, cost, "ulimit -n 65536")
}
