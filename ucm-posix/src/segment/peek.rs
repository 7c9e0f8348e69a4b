//! A control file's header, read with `pread` before anything is mapped.
//!
//! A mapping of a file that is too short is SIGBUS at the first touch; a read
//! is an answer. The fields read here (magic, version, lengths, nonce, flags,
//! boot id) keep their places in every version, so that a newer program can
//! recognise and remove what an older one left.

use std::path::Path;

use ucm_core::segment::header::{ABI_VERSION, Header, MAGIC};

use crate::error::{LockError, OsError, Refusal};
use crate::fork::PrivateFd;
use crate::shm::{FileStat, stat_fd};

const HEADER_BYTES: usize = Header::LAYOUT.size_bytes;
const FLAG_PERSIST: u32 = 1;

const fn offset_of(name: &str) -> usize {
    let mut i = 0;
    while i < Header::LAYOUT.fields.len() {
        let field = Header::LAYOUT.fields[i];
        if same(field.name.as_bytes(), name.as_bytes()) {
            return field.offset_bytes;
        }
        i += 1;
    }
    panic!("the header has no such field")
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

const MAGIC_AT: usize = offset_of("magic");
const VERSION_AT: usize = offset_of("abi_version");
const CONTROL_BYTES_AT: usize = offset_of("control_bytes");
const DATA_BYTES_AT: usize = offset_of("data_bytes");
const NONCE_AT: usize = offset_of("nonce");
const FLAGS_AT: usize = offset_of("flags");
const BOOT_ID_AT: usize = offset_of("boot_id");

/// What a control file says of itself, and how long it is.
#[derive(Clone, Copy, Debug)]
pub struct HeaderPeek {
    bytes: [u8; HEADER_BYTES],
    file: FileStat,
}

impl HeaderPeek {
    /// Reads what is there; a short file reads as if zeroes followed.
    pub(crate) fn read(fd: &PrivateFd, path: &Path) -> Result<Self, LockError> {
        let file = stat_fd(fd, path)?;
        let mut bytes = [0; HEADER_BYTES];
        let mut filled = 0;
        while file.is_regular && filled < HEADER_BYTES {
            match rustix::io::pread(fd.get()?, &mut bytes[filled..], filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(OsError::new("pread", path, error).into()),
            }
        }
        Ok(Self { bytes, file })
    }

    fn bytes_at<const N: usize>(&self, at: usize) -> [u8; N] {
        std::array::from_fn(|i| self.bytes[at + i])
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.bytes_at(at))
    }

    fn half_word(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.bytes_at(at))
    }

    pub(crate) fn file(&self) -> &FileStat {
        &self.file
    }

    /// Whether it begins as a control file does.
    pub fn is_segment(&self) -> bool {
        self.word(MAGIC_AT) == MAGIC
    }

    /// The version of its layout.
    pub fn abi_version(&self) -> u32 {
        self.half_word(VERSION_AT)
    }

    /// What ties its data file to it; only of a segment.
    pub fn nonce(&self) -> Option<u64> {
        self.is_segment().then(|| self.word(NONCE_AT))
    }

    /// Whether it says it should outlive its last user.
    pub fn is_persistent(&self) -> bool {
        self.is_segment() && self.half_word(FLAGS_AT) & FLAG_PERSIST != 0
    }

    /// How long its data file is said to be.
    pub fn data_bytes(&self) -> u64 {
        self.word(DATA_BYTES_AT)
    }

    /// The boot it was made in.
    pub fn boot_id(&self) -> [u8; 16] {
        self.bytes_at(BOOT_ID_AT)
    }

    /// Whether the file is as long as its header says.
    pub(crate) fn is_whole(&self) -> bool {
        self.file.len_bytes >= HEADER_BYTES as u64
            && self.file.len_bytes == self.word(CONTROL_BYTES_AT)
    }

    /// Whether the file may be mapped and handed to the core, which checks the rest.
    pub(crate) fn check(&self, boot_id: &[u8; 16]) -> Result<(), Refusal> {
        let file_bytes = self.file.len_bytes;
        if !self.file.is_regular {
            return Err(Refusal::NotAFile);
        }
        if file_bytes >= 8 && !self.is_segment() {
            return Err(Refusal::NotASegment { found: self.word(MAGIC_AT), expected: MAGIC });
        }
        if file_bytes < HEADER_BYTES as u64 {
            return Err(Refusal::ControlBytes { file_bytes, needed_bytes: HEADER_BYTES as u64 });
        }
        // Of another version, only what the core's refusal needs is certain.
        if self.abi_version() == ABI_VERSION {
            if self.boot_id() != *boot_id {
                return Err(Refusal::OtherBoot { segment: self.boot_id(), here: *boot_id });
            }
            let needed_bytes = self.word(CONTROL_BYTES_AT);
            if file_bytes != needed_bytes {
                return Err(Refusal::ControlBytes { file_bytes, needed_bytes });
            }
        }
        Ok(())
    }
}
