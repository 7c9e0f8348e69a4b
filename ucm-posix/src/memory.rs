//! How much memory may still be used: what the machine has left, and what control groups allow.
//!
//! Shared memory counts against both, and both end in the OOM killer and not
//! in an error, so a segment that cannot fit is refused before it is begun.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{MemoryLimit, ShmError};

/// What may still be used, and which limit says so; `None` when nothing does.
pub fn available() -> Option<(u64, MemoryLimit)> {
    let machine = fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(mem_available);
    if machine.is_none() {
        warn_once!("/proc/meminfo does not say how much memory is available; not checked");
    }
    let machine = machine.map(|bytes| (bytes, MemoryLimit::Machine));
    let groups = groups().into_iter().filter_map(|group| {
        let available_bytes = group.available_bytes()?;
        Some((available_bytes, MemoryLimit::Cgroup(group.dir)))
    });
    machine.into_iter().chain(groups).min_by_key(|(bytes, _)| *bytes)
}

/// Refuses `needed_bytes` more than what may still be used.
pub(crate) fn check(needed_bytes: u64) -> Result<(), ShmError> {
    match available() {
        Some((available_bytes, limit)) if available_bytes < needed_bytes => {
            Err(ShmError::NotEnoughMemory { needed_bytes, available_bytes, limit })
        }
        _ => Ok(()),
    }
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A control group's directory, of either version.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    dir: PathBuf,
    unified: bool,
}

impl Group {
    /// What its limit leaves; `None` when it has none.
    fn available_bytes(&self) -> Option<u64> {
        let (limit, usage) = if self.unified {
            ("memory.max", "memory.current")
        } else {
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
        };
        // "max" does not parse: no limit. Version 1 says so with a huge number.
        let limit_bytes = read_number(&self.dir.join(limit))?;
        let usage_bytes = read_number(&self.dir.join(usage))?;
        // Cold file pages are given up before anybody is killed.
        let stat = fs::read_to_string(self.dir.join("memory.stat")).unwrap_or_default();
        let name = if self.unified { "inactive_file" } else { "total_inactive_file" };
        let cold_bytes = stat_entry(&stat, name).unwrap_or(0);
        Some(limit_bytes.saturating_sub(usage_bytes.saturating_sub(cold_bytes)))
    }
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn stat_entry(stat: &str, name: &str) -> Option<u64> {
    let line = stat.lines().find(|line| line.split(' ').next() == Some(name))?;
    line.split(' ').nth(1)?.parse().ok()
}

/// This process's memory control groups, with all their ancestors: each of
/// them may hold the limit.
fn groups() -> Vec<Group> {
    let cgroup = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    groups_of(&cgroup, &mounts)
}

fn groups_of(cgroup: &str, mounts: &str) -> Vec<Group> {
    let mut groups = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let unified = controllers.is_empty();
        if !unified && !controllers.split(',').any(|name| name == "memory") {
            continue;
        }
        let Some((root, mount)) = mount_of(mounts, unified) else { continue };
        // Inside a container the mount may show only a part of the tree, and
        // the path may be outside of it: then the mount itself is the group.
        let below = path.strip_prefix(&root).unwrap_or("").trim_start_matches('/');
        let mut dir = mount.join(below);
        loop {
            groups.push(Group { dir: dir.clone(), unified });
            if dir == mount || !dir.pop() || !dir.starts_with(&mount) {
                break;
            }
        }
    }
    groups
}

/// Where the memory control groups are mounted: the root that is shown there,
/// and the place.
fn mount_of(mounts: &str, unified: bool) -> Option<(String, PathBuf)> {
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, place) = (mount.next()?, mount.next()?);
        let mut kind = kind.split(' ');
        let system = kind.next()?;
        let options = kind.nth(1)?;
        let right = if unified {
            system == "cgroup2"
        } else {
            system == "cgroup" && options.split(',').any(|option| option == "memory")
        };
        right.then(|| (root.trim_end_matches('/').to_string(), PathBuf::from(place)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 23 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
36 30 0:32 /docker/ab /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
39 30 0:35 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn every_ancestor_of_a_control_group_is_looked_at_up_to_the_mount() {
        let found = groups_of("8:cpu:/x\n4:memory:/docker/ab/c/d\n0::/u\n", MOUNTS);
        let dirs: Vec<_> = found.iter().map(|group| group.dir.to_str().unwrap()).collect();
        assert_eq!(
            dirs,
            [
                "/sys/fs/cgroup/memory/c/d",
                "/sys/fs/cgroup/memory/c",
                "/sys/fs/cgroup/memory",
                "/sys/fs/cgroup/unified/u",
                "/sys/fs/cgroup/unified",
            ]
        );
        assert!(!found[0].unified && found[3].unified);
    }

    #[test]
    fn a_limit_less_what_is_in_use_is_what_may_still_be_used() {
        let dir = tempfile::tempdir().unwrap();
        let group = Group { dir: dir.path().to_path_buf(), unified: true };
        assert_eq!(group.available_bytes(), None);
        fs::write(dir.path().join("memory.max"), "max\n").unwrap();
        fs::write(dir.path().join("memory.current"), "700\n").unwrap();
        assert_eq!(group.available_bytes(), None, "no limit");
        fs::write(dir.path().join("memory.max"), "1000\n").unwrap();
        assert_eq!(group.available_bytes(), Some(300));
        fs::write(dir.path().join("memory.stat"), "anon 5\ninactive_file 50\n").unwrap();
        assert_eq!(group.available_bytes(), Some(350));
        fs::write(dir.path().join("memory.current"), "5000\n").unwrap();
        assert_eq!(group.available_bytes(), Some(0));
    }

    #[test]
    fn more_than_the_machine_has_is_refused_with_both_numbers() {
        assert_eq!(mem_available("MemFree: 1 kB\nMemAvailable:   12 kB\n"), Some(12 * 1024));
        assert_eq!(mem_available("nonsense"), None);
        let error = check(u64::MAX).unwrap_err().to_string();
        assert!(error.contains(&u64::MAX.to_string()) && error.contains("leaves"), "{error}");
        check(4096).unwrap();
    }
}
