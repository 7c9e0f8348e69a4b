//! A segment's life: created once, refused when made otherwise, gone with the last one.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use common::{Actor, SmallTmpfs, assignment, hear, names, options, say, scratch, shape};
use ucm_core::participant::Role;
use ucm_core::segment::geometry::CacheShape;
use ucm_posix::gc::{self, State};
use ucm_posix::{
    Attachment, Refusal, Segment, SegmentError, SegmentId, SegmentOptions, SegmentWatcher, ShmDir,
    ShmError,
};

#[test]
fn child_process() {
    let Some((action, dir, argument)) = assignment() else { return };
    match action.as_str() {
        "open" => {
            let persist = argument == "persist";
            let options = SegmentOptions { persist, ..options(&dir) };
            let segment = Segment::open_or_create(&options).unwrap();
            say(segment.is_created());
            hear();
            drop(segment);
            say("left");
            hear();
        }
        "come and go" => {
            let rank = argument.parse().unwrap();
            for _ in 0..400 {
                let segment = Arc::new(Segment::open_or_create(&options(&dir)).unwrap());
                let joined = Attachment::join(segment, Role::Rank, Some(rank), None).unwrap();
                assert!(joined.segment().is_linked().unwrap());
                joined.segment().slot_ptr(63).unwrap();
            }
            say("done");
        }
        other => panic!("{other}"),
    }
}

/// Somebody who has the segment open, in another process.
fn holder(dir: &ShmDir) -> Actor {
    let actor = Actor::start("open", &dir.path, "");
    actor.hear();
    actor
}

fn control(dir: &ShmDir) -> File {
    let path = options(dir).id.control_path(dir);
    File::options().read(true).write(true).open(path).unwrap()
}

fn refusal(result: Result<Segment, SegmentError>) -> (bool, Refusal, String) {
    match result {
        Err(error) => {
            let text = error.to_string();
            match error {
                SegmentError::Refused { in_use, refusal, .. } => (in_use, refusal, text),
                other => panic!("{other}"),
            }
        }
        Ok(segment) => panic!("{segment:?} was not refused"),
    }
}

#[test]
fn of_many_that_start_together_one_creates_and_all_share() {
    let (_temp, dir) = scratch();
    let actors: Vec<_> = (0..8).map(|_| Actor::start("open", &dir.path, "")).collect();
    let created = actors.iter().filter(|actor| actor.hear() == "true").count();
    assert_eq!(created, 1);
    let names = names(&dir);
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(names.contains(&"ucm.test.ctrl".to_string()));
    actors.into_iter().for_each(Actor::finish);
}

#[test]
fn two_handles_share_bytes_and_the_last_one_out_removes_the_files() {
    let (_temp, dir) = scratch();
    let first = Segment::open_or_create(&options(&dir)).unwrap();
    let second = Segment::open_or_create(&options(&dir)).unwrap();
    assert!(first.is_created() && !second.is_created());
    assert_eq!(first.plane().nonce(), second.plane().nonce());
    let (a, b) = (first.slot_ptr(63).unwrap(), second.slot_ptr(63).unwrap());
    // SAFETY: inside both mappings, and nobody else knows the segment.
    unsafe { a.as_ptr().write_volatile(42) };
    // SAFETY: as above.
    assert_eq!(unsafe { b.as_ptr().read_volatile() }, 42);
    assert!(first.slot_ptr(64).is_none());

    let mut actor = holder(&dir);
    drop(first);
    drop(second);
    assert_eq!(names(&dir).len(), 2, "the other process has it open");
    actor.say("leave");
    actor.expect("left");
    assert!(names(&dir).is_empty());
    actor.finish();
}

#[test]
fn a_persistent_segment_stays_and_is_found_again() {
    let (_temp, dir) = scratch();
    let options = SegmentOptions { persist: true, ..options(&dir) };
    let nonce = Segment::open_or_create(&options).unwrap().plane().nonce();
    assert_eq!(names(&dir).len(), 2);
    let again = Segment::open_or_create(&options).unwrap();
    assert!(!again.is_created() && again.plane().nonce() == nonce);
}

#[test]
fn what_killed_processes_left_is_joined_when_it_fits() {
    let (_temp, dir) = scratch();
    holder(&dir).kill();
    assert_eq!(names(&dir).len(), 2);
    let segment = Segment::open_or_create(&options(&dir)).unwrap();
    assert!(!segment.is_created());
    drop(segment);
    assert!(names(&dir).is_empty());
}

#[test]
fn another_configuration_is_refused_with_both_values_while_somebody_is_there() {
    let (_temp, dir) = scratch();
    let other =
        SegmentOptions { shape: CacheShape { shards_per_block: 5, ..shape() }, ..options(&dir) };
    let mut actor = holder(&dir);
    let (in_use, refused, text) = refusal(Segment::open_or_create(&other));
    assert!(in_use && matches!(refused, Refusal::Core(_)));
    assert!(
        text.contains('4') && text.contains('5') && text.contains("shards_per_block"),
        "{text}"
    );
    assert_eq!(names(&dir).len(), 2);
    assert!(Segment::open_or_create(&options(&dir)).is_ok(), "nothing was changed");

    actor.kill();
    let segment = Segment::open_or_create(&other).unwrap();
    assert!(segment.is_created(), "nobody used the old one any more");
    assert_eq!(names(&dir).len(), 2);
}

#[test]
fn a_persistent_segment_of_another_configuration_is_kept_though_nobody_is_there() {
    let (_temp, dir) = scratch();
    let kept = SegmentOptions { persist: true, ..options(&dir) };
    drop(Segment::open_or_create(&kept).unwrap());
    let other = SegmentOptions { shape: CacheShape { content_tag: 8, ..shape() }, ..kept.clone() };
    let (in_use, refused, text) = refusal(Segment::open_or_create(&other));
    assert!(!in_use && matches!(refused, Refusal::Core(_)));
    assert!(text.contains("ucm gc --all"), "{text}");
    assert!(!Segment::open_or_create(&kept).unwrap().is_created());
}

#[test]
fn another_version_is_refused_with_both_numbers() {
    let (_temp, dir) = scratch();
    let mut actor = holder(&dir);
    control(&dir).write_all_at(&999_u32.to_ne_bytes(), 8).unwrap();
    let (in_use, _, text) = refusal(Segment::open_or_create(&options(&dir)));
    assert!(in_use && text.contains("999"), "{text}");
    let ours = ucm_core::segment::header::ABI_VERSION.to_string();
    assert!(text.contains(&ours), "{text}");
    assert!(matches!(
        SegmentWatcher::open(&dir, &options(&dir).id),
        Err(SegmentError::Refused { in_use: true, .. })
    ));
    actor.kill();
    assert!(Segment::open_or_create(&options(&dir)).unwrap().is_created());
}

#[test]
fn a_poisoned_segment_is_replaced_by_a_new_one_while_others_still_have_it() {
    for persist in [false, true] {
        let (_temp, dir) = scratch();
        let options = SegmentOptions { persist, ..options(&dir) };
        let old = Arc::new(Segment::open_or_create(&options).unwrap());
        let rank = Attachment::join(Arc::clone(&old), Role::Rank, Some(0), None).unwrap();
        let scout = Arc::new(Segment::join_existing(&dir, &options.id).unwrap());
        old.plane().poison();
        // Whoever is in it is told, whoever only looks is refused, whoever
        // comes gets a new one, in which the same rank has its place.
        assert!(matches!(
            SegmentWatcher::open(&dir, &options.id),
            Err(SegmentError::Refused { in_use: true, refusal: Refusal::Poisoned, .. })
        ));
        assert!(Attachment::join(scout, Role::Scout, None, None).is_err());
        let new = Arc::new(Segment::open_or_create(&options).unwrap());
        assert!(new.is_created() && new.plane().nonce() != old.plane().nonce());
        assert!(!new.plane().is_poisoned() && !old.is_linked().unwrap());
        let again = Attachment::join(Arc::clone(&new), Role::Rank, Some(0), None).unwrap();
        // The old one goes with its last user and takes nothing of the new one along.
        rank.leave();
        drop(old);
        assert!(new.is_linked().unwrap() && new.data_path().exists());
        assert_eq!(names(&dir).len(), 2);
        again.leave();
    }
}

#[test]
fn a_header_that_is_overwritten_while_in_use_does_not_mislead_whoever_leaves() {
    let (_temp, dir) = scratch();
    let segment = Segment::open_or_create(&options(&dir)).unwrap();
    let data = segment.data_path();
    // Nonce and flags: what is removed is what was made, and it is removed.
    control(&dir).write_all_at(&[0xff; 16], 48).unwrap();
    control(&dir).write_all_at(&[0xff; 4], 92).unwrap();
    assert_eq!(segment.data_path(), data);
    drop(segment);
    assert!(names(&dir).is_empty(), "{:?}", names(&dir));
}

#[test]
fn a_segment_of_another_boot_is_refused_and_replaced_when_nobody_is_there() {
    let (_temp, dir) = scratch();
    let mut actor = Actor::start("open", &dir.path, "persist");
    actor.hear();
    control(&dir).write_all_at(&[9; 16], 96).unwrap();
    let (_, refused, _) = refusal(Segment::open_or_create(&options(&dir)));
    assert!(matches!(refused, Refusal::OtherBoot { segment, .. } if segment == [9; 16]));
    actor.kill();
    assert!(Segment::open_or_create(&options(&dir)).unwrap().is_created());
}

#[test]
fn a_truncated_control_file_is_refused_and_not_touched() {
    for len_bytes in [0, 4, 100, 4096] {
        let (_temp, dir) = scratch();
        let mut actor = holder(&dir);
        control(&dir).set_len(len_bytes).unwrap();
        let (in_use, refused, _) = refusal(Segment::open_or_create(&options(&dir)));
        assert!(in_use);
        assert!(
            matches!(refused, Refusal::ControlBytes { file_bytes, .. } if file_bytes == len_bytes)
        );
        assert!(matches!(
            SegmentWatcher::open(&dir, &options(&dir).id),
            Err(SegmentError::Refused { refusal: Refusal::ControlBytes { .. }, .. })
        ));
        actor.kill();
        assert_eq!(control(&dir).metadata().unwrap().len(), len_bytes);
    }
}

#[test]
fn missing_or_truncated_data_are_refused() {
    let (_temp, dir) = scratch();
    let mut actor = holder(&dir);
    let data = names(&dir).into_iter().find(|name| name.ends_with(".data.0")).unwrap();
    let data = dir.path.join(data);
    File::options().write(true).open(&data).unwrap().set_len(4096).unwrap();
    let (_, refused, text) = refusal(Segment::open_or_create(&options(&dir)));
    assert!(matches!(refused, Refusal::DataBytes { file_bytes: 4096, .. }), "{text}");
    std::fs::remove_file(&data).unwrap();
    let (_, refused, _) = refusal(Segment::open_or_create(&options(&dir)));
    assert!(matches!(refused, Refusal::DataMissing { .. }));
    actor.kill();
    assert!(Segment::open_or_create(&options(&dir)).unwrap().is_created());
}

#[test]
fn what_only_has_the_name_is_refused_and_never_removed() {
    let (_temp, dir) = scratch();
    let path = options(&dir).id.control_path(&dir);
    std::fs::write(&path, [b'x'; 9000]).unwrap();
    let (_, refused, _) = refusal(Segment::open_or_create(&options(&dir)));
    assert!(matches!(refused, Refusal::NotASegment { .. }));
    assert!(gc::collect(&dir, false).unwrap().removed.is_empty());
    assert_eq!(std::fs::read(&path).unwrap(), [b'x'; 9000]);
    std::fs::remove_file(&path).unwrap();

    let target = dir.path.join("target");
    std::fs::write(&target, "precious").unwrap();
    std::os::unix::fs::symlink(&target, &path).unwrap();
    let (_, refused, _) = refusal(Segment::open_or_create(&options(&dir)));
    assert!(matches!(refused, Refusal::NotAFile));
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
}

#[test]
fn another_users_segment_is_refused_by_name() {
    let (_temp, dir) = scratch();
    drop(Segment::open_or_create(&SegmentOptions { persist: true, ..options(&dir) }).unwrap());
    let path = options(&dir).id.control_path(&dir);
    if std::os::unix::fs::chown(&path, Some(12345), None).is_err() {
        eprintln!("SKIPPED: giving a file away is not permitted here, so nothing was tested");
        return;
    }
    match Segment::open_or_create(&options(&dir)).unwrap_err() {
        SegmentError::OtherUser { owner: 12345, .. } => {}
        other => panic!("{other}"),
    }
    assert!(gc::collect(&dir, true).unwrap().removed.iter().all(|found| found.paths != [&*path]));
    assert!(path.exists());
}

#[test]
fn a_directory_that_is_too_small_is_named_with_both_sizes_and_left_empty() {
    let Some(tmpfs) = SmallTmpfs::mount("256k") else { return };
    let options =
        SegmentOptions { shape: CacheShape { slot_count: 1024, ..shape() }, ..options(&tmpfs.dir) };
    match Segment::open_or_create(&options).unwrap_err() {
        SegmentError::Shm(error @ ShmError::NoSpace { .. }) => {
            let text = error.to_string();
            let ShmError::NoSpace { needed_bytes, free_bytes, .. } = error else { unreachable!() };
            assert!(needed_bytes > 1024 * 4096 && free_bytes <= 256 << 10);
            assert!(text.contains(&needed_bytes.to_string()) && text.contains("--shm-size"));
        }
        other => panic!("{other}"),
    }
    assert!(names(&tmpfs.dir).is_empty());
}

#[test]
fn a_tool_joins_without_knowing_the_shape_and_a_watcher_keeps_nothing_alive() {
    let (_temp, dir) = scratch();
    let id = options(&dir).id;
    assert!(matches!(Segment::join_existing(&dir, &id), Err(SegmentError::NotFound { .. })));
    assert!(matches!(SegmentWatcher::open(&dir, &id), Err(SegmentError::NotFound { .. })));
    let segment = Segment::open_or_create(&options(&dir)).unwrap();
    let tool = Arc::new(Segment::join_existing(&dir, &id).unwrap());
    assert_eq!(tool.plane().geometry().shape, shape());
    assert!(tool.data().is_none() && tool.slot_ptr(0).is_none());
    assert!(Attachment::join(Arc::clone(&tool), Role::Rank, Some(0), None).is_err());
    let scout = Attachment::join(tool, Role::Scout, None, None).unwrap();
    let watcher = SegmentWatcher::open(&dir, &id).unwrap();
    assert_eq!(watcher.plane().participants().filter(|(_, view)| view.live).count(), 1);
    drop(segment);
    assert!(watcher.is_linked().unwrap());
    scout.leave();
    assert!(!watcher.is_linked().unwrap());
    assert!(names(&dir).is_empty());
}

#[test]
fn a_segment_that_was_removed_by_hand_takes_no_new_participants() {
    let (_temp, dir) = scratch();
    let segment = Arc::new(Segment::open_or_create(&options(&dir)).unwrap());
    std::fs::remove_file(segment.control_path()).unwrap();
    let error = Attachment::join(Arc::clone(&segment), Role::Rank, Some(0), None).unwrap_err();
    assert!(matches!(error, ucm_posix::JoinError::SegmentGone { .. }));
    let new = Segment::open_or_create(&options(&dir)).unwrap();
    assert!(new.is_created());
    drop(segment);
    assert!(new.is_linked().unwrap(), "the old one's last handle leaves the new one alone");
}

#[test]
fn gc_removes_the_dead_and_keeps_the_living_and_the_persistent() {
    let (_temp, dir) = scratch();
    let id = |name: &str| SegmentId::new(name).unwrap();
    let mut dead = holder(&dir);
    let live = SegmentOptions { id: id("live"), ..options(&dir) };
    let live = Arc::new(Segment::open_or_create(&live).unwrap());
    let _rank = Attachment::join(Arc::clone(&live), Role::Rank, Some(2), None).unwrap();
    let kept = SegmentOptions { id: id("kept"), persist: true, ..options(&dir) };
    drop(Segment::open_or_create(&kept).unwrap());

    assert!(gc::collect(&dir, true).unwrap().removed.iter().all(|found| found.id == id("kept")));
    drop(Segment::open_or_create(&kept).unwrap());
    dead.kill();

    let found = gc::scan(&dir).unwrap();
    let states: Vec<_> =
        found.iter().map(|found| (found.id.as_str(), found.state, found.persist)).collect();
    assert_eq!(
        states,
        [("kept", State::Dead, true), ("live", State::Live, false), ("test", State::Dead, false)]
    );
    assert_eq!(found[1].live, [2]);
    assert!(found.iter().all(|found| found.paths.len() == 2 && found.bytes > 64 * 4096));

    let collected = gc::collect(&dir, false).unwrap();
    assert!(collected.failed.is_empty());
    assert_eq!(collected.removed.len(), 1);
    assert_eq!(collected.removed[0].id, id("test"));
    assert_eq!(names(&dir).len(), 4);
    let collected = gc::collect(&dir, true).unwrap();
    assert_eq!(collected.removed.len(), 1);
    assert_eq!(collected.removed[0].id, id("kept"));
    assert!(live.is_linked().unwrap());
    assert_eq!(names(&dir).len(), 2);
}

#[test]
fn processes_that_come_and_go_and_are_killed_never_fail_each_other() {
    let (_temp, dir) = scratch();
    for round in 0..3 {
        let mut actors: Vec<_> =
            (0..4).map(|rank| Actor::start("come and go", &dir.path, &rank.to_string())).collect();
        std::thread::sleep(std::time::Duration::from_millis(30 + 50 * round));
        actors.swap_remove(0).kill();
        gc::collect(&dir, false).unwrap();
        for actor in actors {
            actor.expect("done");
            actor.finish();
        }
    }
    assert!(gc::collect(&dir, false).unwrap().failed.is_empty());
    assert!(names(&dir).is_empty(), "{:?}", names(&dir));
}
