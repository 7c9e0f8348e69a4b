//! What a machine offers and what it lacks: each check says what it found,
//! what that will cost, and the command that mends it.

mod kernel;
mod limits;
mod shm;

use serde::Serialize;
use ucm_posix::ShmDir;

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// It works, at a price.
    Slow,
    /// Something will fail.
    Bad,
}

/// One check's result.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: &'static str,
    /// How bad it is.
    pub level: Level,
    /// What was found.
    pub found: String,
    /// What it will cost; empty when nothing.
    pub cost: String,
    /// The command that mends it; empty when nothing is to be mended.
    pub remedy: String,
}

impl Finding {
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        let (cost, remedy) = (String::new(), String::new());
        Self { check, level: Level::Ok, found: found.into(), cost, remedy }
    }

    fn slow(check: &'static str, found: impl Into<String>, cost: &str, remedy: &str) -> Self {
        let (cost, remedy) = (cost.to_owned(), remedy.to_owned());
        Self { check, level: Level::Slow, found: found.into(), cost, remedy }
    }

    fn bad(check: &'static str, found: impl Into<String>, cost: &str, remedy: &str) -> Self {
        Self { level: Level::Bad, ..Self::slow(check, found, cost, remedy) }
    }
}

/// What the cache is going to need.
#[derive(Clone, Debug)]
pub struct Needs {
    /// Where shared memory is.
    pub dir: ShmDir,
    /// How much of it.
    pub capacity_bytes: u64,
}

/// Runs every check.
pub fn examine(needs: &Needs) -> Vec<Finding> {
    let mut findings = vec![
        shm::size(needs),
        shm::unnamed_files(needs),
        shm::locks(needs),
        shm::stale_segments(needs),
        limits::memory(needs),
        limits::memlock(needs),
        limits::descriptors(),
        kernel::futex_waitv(),
        kernel::io_uring(),
        kernel::huge_pages(),
        kernel::numa(),
    ];
    // The worst first; the order of the checks within a level.
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examined(dir: &std::path::Path, capacity_bytes: u64) -> Vec<Finding> {
        examine(&Needs { dir: ShmDir::new(dir), capacity_bytes })
    }

    fn level(findings: &[Finding], check: &str) -> Level {
        findings.iter().find(|f| f.check == check).map(|f| f.level).unwrap()
    }

    #[test]
    fn what_fails_names_its_cost_and_its_remedy_and_comes_first() {
        let findings = examined("/nowhere/at/all".as_ref(), 1);
        assert_eq!(findings[0].level, Level::Bad);
        for finding in findings.iter().filter(|f| f.level != Level::Ok) {
            assert!(!finding.cost.is_empty() && !finding.remedy.is_empty(), "{finding:?}");
        }
        assert!(findings.windows(2).all(|pair| pair[0].level >= pair[1].level));
    }

    #[test]
    fn a_working_directory_with_room_is_in_order() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let findings = examined(dir.path(), 1 << 20);
        for check in ["shared memory", "unnamed files", "file locks", "stale segments", "memory"] {
            assert_eq!(level(&findings, check), Level::Ok, "{findings:#?}");
        }
    }

    #[test]
    fn more_than_the_machine_has_is_bad_news() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let findings = examined(dir.path(), 1 << 60);
        assert_eq!(level(&findings, "shared memory"), Level::Bad);
        assert_eq!(level(&findings, "memory"), Level::Bad);
    }
}
