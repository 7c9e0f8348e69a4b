//! The shared-memory directory: room, what it can do, and what lies about in it.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::statfs;
use ucm_posix::gc::{State, scan};

use crate::cli::output::bytes;
use crate::doctor::{Finding, Needs};

/// `statfs`'s type of tmpfs.
const TMPFS_MAGIC: i64 = 0x0102_1994;
const REMOUNT: &str = "mount -o remount,size=SIZE /dev/shm   (docker run --shm-size=SIZE, \
                       Kubernetes: an emptyDir of medium Memory)";

pub(super) fn size(needs: &Needs) -> Finding {
    const CHECK: &str = "shared memory";
    let path = &needs.dir.path;
    let stat = match statfs(path) {
        Ok(stat) => stat,
        Err(errno) => {
            let found = format!("{}: {errno}", path.display());
            return Finding::bad(
                CHECK,
                found,
                "no segment can be made",
                "mount -t tmpfs tmpfs DIR",
            );
        }
    };
    let unit = stat.f_frsize.max(stat.f_bsize) as u64;
    let free = stat.f_bavail * unit;
    let found =
        format!("{}: {} free of {}", path.display(), bytes(free), bytes(stat.f_blocks * unit));
    if stat.f_blocks > 0 && free < needs.capacity_bytes {
        let cost = "the cache does not fit: creating it will be refused";
        return Finding::bad(CHECK, found, cost, REMOUNT);
    }
    if stat.f_type as i64 != TMPFS_MAGIC {
        let cost = "not a tmpfs: pages may be written to a disk";
        return Finding::slow(CHECK, found, cost, "use a directory on a tmpfs");
    }
    Finding::ok(CHECK, found)
}

pub(super) fn unnamed_files(needs: &Needs) -> Finding {
    const CHECK: &str = "unnamed files";
    let made = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
        .mode(0o600)
        .open(&needs.dir.path);
    match made {
        Ok(_) => Finding::ok(CHECK, "O_TMPFILE works"),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Finding::slow(
            CHECK,
            "O_TMPFILE is not supported here",
            "segments are made under temporary names, which a killed creator leaves behind",
            "use a directory on a tmpfs; `ucm gc` removes what is left",
        ),
        Err(error) => Finding::bad(
            CHECK,
            format!("{}: {error}", needs.dir.path.display()),
            "no segment can be made",
            "give this user write permission, or name another directory",
        ),
    }
}

/// Takes and asks for an OFD lock: what liveness stands on.
pub(super) fn locks(needs: &Needs) -> Finding {
    const CHECK: &str = "file locks";
    let cannot = |error: &dyn std::fmt::Display| {
        Finding::bad(
            CHECK,
            format!("open-file-description locks do not work here: {error}"),
            "nobody can tell who is alive: no segment can be used",
            "use a tmpfs of this machine (Linux 3.15 or newer), not a network file system",
        )
    };
    let file = match tempfile::tempfile_in(&needs.dir.path) {
        Ok(file) => file,
        Err(error) => return cannot(&error),
    };
    let lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 1 << 40,
        l_len: 1,
        l_pid: 0,
    };
    match nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_OFD_SETLK(&lock)) {
        Ok(_) => Finding::ok(CHECK, "open-file-description locks work"),
        Err(error) => cannot(&error),
    }
}

pub(super) fn stale_segments(needs: &Needs) -> Finding {
    const CHECK: &str = "stale segments";
    let found = match scan(&needs.dir) {
        Ok(found) => found,
        Err(error) => {
            let cost = "cannot tell what lies about";
            return Finding::slow(CHECK, error.to_string(), cost, "see the message");
        }
    };
    let is_stale =
        |state| matches!(state, State::Dead | State::Corrupt | State::OtherBoot | State::Orphan);
    let live = found.iter().filter(|segment| segment.state == State::Live).count();
    let stale: Vec<_> =
        found.iter().filter(|segment| is_stale(segment.state) && !segment.persist).collect();
    let held: u64 = stale.iter().map(|segment| segment.bytes).sum();
    if stale.is_empty() {
        return Finding::ok(CHECK, format!("none; {live} in use"));
    }
    Finding::slow(
        CHECK,
        format!("{} that nobody uses, {}; {live} in use", stale.len(), bytes(held)),
        "memory that nothing else can have",
        "ucm gc",
    )
}
