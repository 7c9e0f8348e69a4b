//! What a segment's files are called, and back.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::SegmentError;
use crate::shm::ShmDir;

/// The longest id: with the rest of the name it stays far below `NAME_MAX`.
pub const MAX_ID_CHARS: usize = 64;

/// A segment's name: 1 to 64 characters of `A-Z a-z 0-9 _ -`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SegmentId(String);

impl SegmentId {
    /// Checks a name.
    ///
    /// # Errors
    /// [`SegmentError::BadId`].
    pub fn new(id: &str) -> Result<Self, SegmentError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        if (1..=MAX_ID_CHARS).contains(&id.len()) && id.bytes().all(allowed) {
            Ok(Self(id.to_string()))
        } else {
            Err(SegmentError::BadId { id: id.to_string(), max_chars: MAX_ID_CHARS })
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn control_name(&self) -> String {
        format!("ucm.{self}.ctrl")
    }

    /// Held while the segment is being made; gone afterwards.
    pub(crate) fn birth_name(&self) -> String {
        format!("ucm.{self}.birth")
    }

    /// The nonce keeps a new segment's data apart from an old one's.
    pub(crate) fn data_name(&self, nonce: u64) -> String {
        format!("ucm.{self}.{nonce:016x}.data.0")
    }

    /// What the control segment is called while it is made, where the file
    /// system has no unnamed files; its data segment is called by `data_name`.
    pub(crate) fn control_draft_name(&self, nonce: u64) -> String {
        format!("ucm.{self}.{nonce:016x}.data.ctrl")
    }

    /// The control segment's path in `dir`.
    pub fn control_path(&self, dir: &ShmDir) -> PathBuf {
        dir.path.join(self.control_name())
    }

    /// The data segment's path in `dir`.
    pub fn data_path(&self, dir: &ShmDir, nonce: u64) -> PathBuf {
        dir.path.join(self.data_name(nonce))
    }

    pub(crate) fn birth_path(&self, dir: &ShmDir) -> PathBuf {
        dir.path.join(self.birth_name())
    }
}

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for SegmentId {
    type Err = SegmentError;

    fn from_str(id: &str) -> Result<Self, SegmentError> {
        Self::new(id)
    }
}

/// What a file in the shared-memory directory is, by its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum FileRole {
    Control(SegmentId),
    Birth(SegmentId),
    Data(SegmentId, u64),
    /// A file that is being made, where the file system has no unnamed files.
    Temporary(SegmentId),
}

impl FileRole {
    pub(crate) fn of(name: &str) -> Option<Self> {
        if let Some(inner) = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp")) {
            return match Self::of(inner)? {
                // The nonce is part of every temporary name.
                Self::Data(id, _) => Some(Self::Temporary(id)),
                _ => None,
            };
        }
        let parts: Vec<&str> = name.split('.').collect();
        let (id, rest) = match parts.as_slice() {
            ["ucm", id, rest @ ..] => (SegmentId::new(id).ok()?, rest),
            _ => return None,
        };
        match rest {
            ["ctrl"] => Some(Self::Control(id)),
            ["birth"] => Some(Self::Birth(id)),
            [nonce, "data", _] if nonce.len() == 16 => {
                // Also the drafts of both files, which have no other form.
                Some(Self::Data(id, u64::from_str_radix(nonce, 16).ok()?))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_could_leave_the_directory_or_hide_is_refused() {
        for bad in ["", "a/b", "..", "a.b", "a b", "\u{e9}", &"x".repeat(65)] {
            let error = SegmentId::new(bad).unwrap_err();
            assert!(matches!(error, SegmentError::BadId { .. }), "{bad:?}");
        }
        for good in ["a", "llama-3_70B", &"x".repeat(64)] {
            assert_eq!(good.parse::<SegmentId>().unwrap().as_str(), good);
        }
    }

    #[test]
    fn every_name_is_recognised_again_and_strangers_are_not() {
        let id = SegmentId::new("a-1").unwrap();
        assert_eq!(FileRole::of(&id.control_name()), Some(FileRole::Control(id.clone())));
        assert_eq!(FileRole::of(&id.birth_name()), Some(FileRole::Birth(id.clone())));
        let data = id.data_name(0xab);
        assert_eq!(data, "ucm.a-1.00000000000000ab.data.0");
        assert_eq!(FileRole::of(&data), Some(FileRole::Data(id.clone(), 0xab)));
        assert_eq!(FileRole::of(&format!(".{data}.tmp")), Some(FileRole::Temporary(id)));
        for stranger in ["ucm", "ucm.a", "ucm.a.b.ctrl", "psm_1", "ucm.a.12.data.0", ".ucm.a.ctrl"]
        {
            assert_eq!(FileRole::of(stranger), None, "{stranger}");
        }
    }
}
