//! Looking after a store: what it holds, and whether all of it is right.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use ucm_core::key::BlockId;
use xxhash_rust::xxh3::xxh3_64;

use super::layout::{BadObject, BlockLayout};
use super::open_block::read_at;
use super::store::{io_error, read_description};
use crate::backend::traits::{BackendError, OpenError, StoreGeometry};

/// A file where blocks are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// Its path.
    pub path: PathBuf,
    /// The block it is named after; `None` for a foreign file.
    pub block: Option<BlockId>,
    /// Bytes it takes on the medium.
    pub bytes: u64,
    /// When it was last opened by a reader, or written.
    pub used: SystemTime,
}

/// What a store holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct Usage {
    /// Complete blocks.
    pub blocks: u64,
    /// What they take on the medium.
    pub block_bytes: u64,
    /// Blocks that are being written, or that dead writers left.
    pub unfinished: u64,
    /// What those take.
    pub unfinished_bytes: u64,
    /// Objects that were put aside as wrong.
    pub bad: u64,
    /// What those take.
    pub bad_bytes: u64,
    /// Files among the blocks that are none.
    pub foreign: u64,
}

/// What is wrong with one file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The file.
    pub path: PathBuf,
    /// What is wrong.
    pub problem: Problem,
}

/// Kinds of damage.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// It is no block's name, or a block's in another's folder.
    #[error("it is no file of a store's")]
    Foreign,
    /// Length, header or name are wrong.
    #[error("{0}")]
    Object(BadObject),
    /// The bytes of a shard are not those that were put.
    #[error("shard {shard} has checksum {computed:#018x}, the table says {stored:#018x}")]
    Shard {
        /// Which.
        shard: u32,
        /// What the table says.
        stored: u64,
        /// What the bytes have.
        computed: u64,
    },
    /// The bytes of a shard are those of another one of the block.
    #[error("shard {shard} has the bytes of shard {other}")]
    Swapped {
        /// Where they are.
        shard: u32,
        /// Where they belong.
        other: u32,
    },
    /// It could not be read.
    #[error("{0}")]
    Unreadable(BackendError),
}

/// What a verification went through.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Verified {
    /// Files looked at.
    pub files: u64,
    /// Bytes whose checksum was compared.
    pub bytes: u64,
    /// Shards that were put without a checksum.
    pub unchecked_shards: u64,
    /// What is wrong.
    pub findings: Vec<Finding>,
}

/// What the store in `root` was made for.
///
/// # Errors
/// When there is no store.
pub fn geometry(root: &Path) -> Result<StoreGeometry, OpenError> {
    read_description(&root.join("store.toml"))
}

/// Every file where blocks are, in no order. Files that go meanwhile are left out.
pub(super) fn blocks(root: &Path) -> Result<Vec<Found>, BackendError> {
    let top = root.join("blocks");
    let mut found = Vec::new();
    for folder in entries(&top)? {
        let folder_name = folder.file_name();
        if folder.file_type().is_ok_and(|kind| kind.is_dir()) {
            for entry in entries(&folder.path())? {
                let block = entry.file_name().to_str().and_then(|name| {
                    let block = parse_block(name.strip_suffix(".kv")?)?;
                    let folder = format!("{:02x}", block.0[0]);
                    (folder_name.to_str() == Some(&folder)).then_some(block)
                });
                found.extend(look(&entry, block));
            }
        } else {
            found.extend(look(&folder, None));
        }
    }
    Ok(found)
}

fn entries(dir: &Path) -> Result<Vec<fs::DirEntry>, BackendError> {
    match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read.and_then(Iterator::collect).map_err(|error| io_error("readdir", dir, &error)),
    }
}

fn look(entry: &fs::DirEntry, block: Option<BlockId>) -> Option<Found> {
    let metadata = entry.metadata().ok()?;
    let used = metadata.modified().ok()?;
    Some(Found { path: entry.path(), block, bytes: metadata.blocks() * 512, used })
}

fn parse_block(name: &str) -> Option<BlockId> {
    let mut id = [0; 16];
    if name.len() != 32 || !name.is_ascii() {
        return None;
    }
    for (at, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&name[2 * at..2 * at + 2], 16).ok()?;
    }
    // Capitals or signs would be other names of the same block.
    (BlockId(id).to_string() == name).then_some(BlockId(id))
}

/// Counts what the store in `root` holds.
///
/// # Errors
/// When it cannot be read.
pub fn usage(root: &Path) -> Result<Usage, BackendError> {
    let mut usage = Usage::default();
    for found in blocks(root)? {
        if found.block.is_some() {
            usage.blocks += 1;
            usage.block_bytes += found.bytes;
        } else {
            usage.foreign += 1;
        }
    }
    let count = |part: &str| -> Result<(u64, u64), BackendError> {
        let files = entries(&root.join(part))?;
        let bytes = files.iter().filter_map(|entry| entry.metadata().ok());
        Ok((files.len() as u64, bytes.map(|metadata| metadata.blocks() * 512).sum()))
    };
    (usage.unfinished, usage.unfinished_bytes) = count("tmp")?;
    (usage.bad, usage.bad_bytes) = count("bad")?;
    Ok(usage)
}

/// Reads every block of the store in `root` and compares all there is to
/// compare. Changes nothing. `seen` is called after each file.
///
/// # Errors
/// When the store itself cannot be read; a block that cannot is a finding.
pub fn verify(
    root: &Path,
    geometry: &StoreGeometry,
    mut seen: impl FnMut(u64, u64),
) -> Result<Verified, BackendError> {
    let layout = BlockLayout::from(*geometry);
    let mut verified = Verified::default();
    let mut all = blocks(root)?;
    all.sort_by(|one, other| one.path.cmp(&other.path));
    let count = all.len() as u64;
    for found in all {
        verified.files += 1;
        let problems = match found.block {
            None => vec![Problem::Foreign],
            Some(block) => verify_block(&found.path, block, &layout, &mut verified),
        };
        let finding = |problem| Finding { path: found.path.clone(), problem };
        verified.findings.extend(problems.into_iter().map(finding));
        seen(verified.files, count);
    }
    Ok(verified)
}

fn verify_block(
    path: &Path,
    block: BlockId,
    layout: &BlockLayout,
    verified: &mut Verified,
) -> Vec<Problem> {
    let unreadable =
        |call| move |error: io::Error| vec![Problem::Unreadable(io_error(call, path, &error))];
    let is_file = fs::symlink_metadata(path).map(|metadata| metadata.is_file());
    match is_file {
        Ok(true) => {}
        Ok(false) => return vec![Problem::Object(BadObject::NotAFile)],
        // Collected meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => return unreadable("stat")(error),
    }
    let check = || -> Result<Vec<Problem>, Vec<Problem>> {
        let file = File::open(path).map_err(unreadable("open"))?;
        let found_bytes = file.metadata().map_err(unreadable("fstat"))?.len();
        let mut header = vec![0; layout.header_bytes() as usize];
        let got = read_at(&file, &mut header, 0).map_err(unreadable("pread"))?;
        let expected_bytes = layout.file_bytes();
        let table = match layout.decode(block, &header[..got as usize]) {
            Ok(table) if found_bytes == expected_bytes => table,
            Ok(_) | Err(BadObject::Length { .. }) => {
                let length = BadObject::Length { found_bytes, expected_bytes };
                return Err(vec![Problem::Object(length)]);
            }
            Err(reason) => return Err(vec![Problem::Object(reason)]),
        };
        let mut bytes = vec![0; layout.shard_bytes as usize];
        let mut problems = Vec::new();
        for (shard, entry) in (0..).zip(&table) {
            let target = &mut bytes[..entry.len_bytes as usize];
            let got = read_at(&file, target, layout.shard_offset(shard));
            got.map_err(unreadable("pread"))?;
            let Some(stored) = entry.checksum else {
                verified.unchecked_shards += 1;
                continue;
            };
            verified.bytes += entry.len_bytes;
            let computed = xxh3_64(target);
            if computed == stored {
                continue;
            }
            let owner = (0..).zip(&table).find(|(_, other)| other.checksum == Some(computed));
            problems.push(match owner {
                Some((other, _)) => Problem::Swapped { shard, other },
                None => Problem::Shard { shard, stored, computed },
            });
        }
        Ok(problems)
    };
    let mut check = check;
    check().unwrap_or_else(|problems| problems)
}
