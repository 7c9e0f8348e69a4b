//! Facts that tell boots, segments and processes apart.

use std::fs;
use std::io;
use std::path::Path;

use crate::error::OsError;

fn read_uuid(path: &str) -> Result<[u8; 16], OsError> {
    let path = Path::new(path);
    let text = fs::read_to_string(path).map_err(|error| OsError::new("read", path, error))?;
    parse_uuid(&text)
        .ok_or_else(|| OsError::new("parse", path, io::Error::from_raw_os_error(libc::EINVAL)))
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits = text.trim().replace('-', "");
    if digits.len() != 32 || !digits.is_ascii() {
        return None;
    }
    let mut bytes = [0; 16];
    for (byte, at) in bytes.iter_mut().zip((0..32).step_by(2)) {
        *byte = u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

/// The running system's boot id.
///
/// # Errors
/// When `/proc` is not mounted.
pub fn boot_id() -> Result<[u8; 16], OsError> {
    read_uuid("/proc/sys/kernel/random/boot_id")
}

/// A number no other segment has: the kernel makes a new uuid for every read.
pub(crate) fn fresh_nonce() -> Result<u64, OsError> {
    let bytes = read_uuid("/proc/sys/kernel/random/uuid")?;
    let (low, high) = bytes.split_at(8);
    let number = |half: &[u8]| half.iter().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    Ok(number(low) ^ number(high))
}

/// Seconds since 1970, for people.
pub(crate) fn unix_s() -> u64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

/// When this process began, in clock ticks since boot; for people, 0 if unknown.
pub(crate) fn start_time_ticks() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Field 22; the second is the program's name in parentheses, and may
    // contain spaces and parentheses itself.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    after_name.split_whitespace().nth(19).and_then(|field| field.parse().ok()).unwrap_or(0)
}

/// This user.
pub(crate) fn effective_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_has_one_id_and_every_nonce_is_new() {
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());
        assert_ne!(fresh_nonce().unwrap(), fresh_nonce().unwrap());
        assert!(start_time_ticks() > 0);
    }

    #[test]
    fn only_a_uuid_is_taken_for_one() {
        assert_eq!(parse_uuid("00010203-0405-0607-0809-0a0b0c0d0eff\n").unwrap()[15], 0xff);
        for bad in [
            "",
            "00010203",
            "zz010203-0405-0607-0809-0a0b0c0d0eff",
            "+0010203-0405-0607-0809-0a0b0c0d0ef\u{e9}",
        ] {
            assert_eq!(parse_uuid(bad), None, "{bad}");
        }
    }
}
