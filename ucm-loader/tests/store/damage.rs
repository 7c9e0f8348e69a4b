//! Each kind of damage, planted behind the store's back.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use ucm_loader::backend::file::layout::BadObject;
use ucm_loader::backend::file::upkeep::{Finding, Problem, geometry, usage, verify};

use crate::*;

#[test]
fn an_undamaged_store_has_no_findings_and_every_byte_is_compared() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), None);
    (0..5).for_each(|number| put(&store, number));
    assert_eq!(geometry(dir.path()), Ok(GEOMETRY));
    let mut last = None;
    let verified = verify(dir.path(), &GEOMETRY, |done, of| last = Some((done, of))).unwrap();
    assert_eq!((verified.files, verified.findings, last), (5, vec![], Some((5, 5))));
    assert_eq!(verified.bytes, 5 * 3 * SHARD_BYTES as u64);
    let usage = usage(dir.path()).unwrap();
    assert_eq!((usage.blocks, usage.unfinished, usage.bad, usage.foreign), (5, 0, 0, 0));
    assert!(usage.block_bytes >= 5 * 3 * SHARD_BYTES as u64);
}

#[test]
fn each_planted_damage_is_found_and_named_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), None);
    (0..6).for_each(|number| put(&store, number));
    let path = |number| store.block_path(&id(number));
    let file = |number| File::options().read(true).write(true).open(path(number)).unwrap();

    // A flipped bit in a shard.
    let mut byte = [0];
    file(0).read_exact_at(&mut byte, store.shard_offset(2) + 17).unwrap();
    file(0).write_all_at(&[byte[0] ^ 1], store.shard_offset(2) + 17).unwrap();
    // Two shards that changed places.
    let shards = [0, 1].map(|shard| {
        let mut bytes = vec![0; SHARD_BYTES];
        file(1).read_exact_at(&mut bytes, store.shard_offset(shard)).unwrap();
        bytes
    });
    file(1).write_all_at(&shards[1], store.shard_offset(0)).unwrap();
    file(1).write_all_at(&shards[0], store.shard_offset(1)).unwrap();
    // A file cut short, a damaged table, another block's file, a stranger.
    file(2).set_len(9000).unwrap();
    file(3).write_all_at(&[0xFF], 70).unwrap();
    fs::copy(path(5), path(4)).unwrap();
    let stranger = path(5).with_file_name("notes.txt");
    fs::write(&stranger, "x").unwrap();

    let verified = verify(dir.path(), &GEOMETRY, |_, _| {}).unwrap();
    let found = |path| -> Vec<Problem> {
        let here = verified.findings.iter().filter(|Finding { path: at, .. }| *at == path);
        here.map(|finding| finding.problem.clone()).collect()
    };
    assert!(matches!(found(path(0))[..], [Problem::Shard { shard: 2, .. }]));
    let swapped =
        [Problem::Swapped { shard: 0, other: 1 }, Problem::Swapped { shard: 1, other: 0 }];
    assert_eq!(found(path(1)), swapped);
    let cut = BadObject::Length { found_bytes: 9000, expected_bytes: 28672 };
    assert_eq!(found(path(2)), [Problem::Object(cut)]);
    assert_eq!(found(path(3)), [Problem::Object(BadObject::Header)]);
    assert_eq!(found(path(4)), [Problem::Object(BadObject::OtherBlock { found: id(5) })]);
    assert_eq!(found(path(5)), []);
    assert_eq!(found(stranger), [Problem::Foreign]);
    assert_eq!((verified.files, verified.findings.len()), (7, 7));
    assert_eq!(verify(dir.path(), &GEOMETRY, |_, _| {}).unwrap(), verified);
}

#[test]
fn names_that_are_almost_a_blocks_are_foreign() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), None);
    put(&store, 1);
    let path = store.block_path(&id(1));
    let name = path.file_name().unwrap().to_str().unwrap();
    let other_folder = dir.path().join("blocks/zz");
    fs::create_dir(&other_folder).unwrap();
    for name in [&name[1..], &format!("{name}.kv"), "+123456789abcdef0123456789abcdef.kv"] {
        fs::copy(&path, path.with_file_name(name)).unwrap();
    }
    fs::copy(&path, other_folder.join(name)).unwrap();
    fs::write(dir.path().join("blocks/file"), "").unwrap();
    let usage = usage(dir.path()).unwrap();
    assert_eq!((usage.blocks, usage.foreign), (1, 5));
}
