//! What the kernel offers: futexes on many words, io_uring, huge pages, NUMA.

use std::fs;

use rustix::io::Errno;
use rustix::thread::futex;

use crate::doctor::Finding;

pub(super) fn futex_waitv() -> Finding {
    const CHECK: &str = "futex_waitv";
    // No words at all is invalid where the call exists.
    match futex::waitv(&[], futex::WaitvFlags::empty(), None, rustix::thread::ClockId::Monotonic) {
        Err(Errno::NOSYS | Errno::PERM) => Finding::slow(
            CHECK,
            "not available (Linux 5.16 or newer has it; containers may forbid it)",
            "a rank that waits for several shards looks at them every millisecond",
            "run on a newer kernel, or allow the call in the container's seccomp profile",
        ),
        _ => Finding::ok(CHECK, "available: one sleep for all shards a rank waits for"),
    }
}

pub(super) fn io_uring() -> Finding {
    const CHECK: &str = "io_uring";
    let disabled = read("/proc/sys/kernel/io_uring_disabled");
    // SAFETY: both arguments are invalid on purpose, so nothing is read or
    // made; the error alone tells whether the call is allowed.
    let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, 0, std::ptr::null_mut::<u8>()) };
    let errno = std::io::Error::last_os_error().raw_os_error();
    let allowed = result >= 0 || matches!(errno, Some(libc::EINVAL | libc::EFAULT));
    if allowed {
        return Finding::ok(CHECK, "allowed");
    }
    Finding::slow(
        CHECK,
        format!("refused (errno {errno:?}, kernel.io_uring_disabled = {})", disabled.trim()),
        "reads go through a pool of threads, which costs more CPU",
        "sysctl kernel.io_uring_disabled=0, or allow io_uring_* in the seccomp profile",
    )
}

pub(super) fn huge_pages() -> Finding {
    const CHECK: &str = "huge pages";
    let enabled = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    // The chosen word stands in brackets.
    let chosen = enabled.split_whitespace().find_map(|w| w.strip_prefix('[')?.strip_suffix(']'));
    match chosen {
        Some(mode @ ("always" | "within_size" | "advise" | "force")) => {
            Finding::ok(CHECK, format!("shared memory may have them ({mode})"))
        }
        other => Finding::slow(
            CHECK,
            format!("shared memory has none (shmem_enabled is {})", other.unwrap_or("unknown")),
            "creating a large cache takes about four times as long",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        ),
    }
}

pub(super) fn numa() -> Finding {
    const CHECK: &str = "NUMA";
    let nodes = fs::read_dir("/sys/devices/system/node").map_or(0, |entries| {
        let names = entries.flatten().map(|entry| entry.file_name());
        names.filter(|name| is_node(&name.to_string_lossy())).count()
    });
    match nodes {
        0 | 1 => Finding::ok(CHECK, "one node"),
        _ => Finding::slow(
            CHECK,
            format!("{nodes} nodes"),
            "copies to a device of another node cross the interconnect",
            "set numa_node to the node of the devices that share the cache",
        ),
    }
}

fn is_node(name: &str) -> bool {
    name.strip_prefix("node")
        .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|_| "unknown".to_owned())
}
