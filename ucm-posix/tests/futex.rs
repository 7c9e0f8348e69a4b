//! Sleeping and waking across processes.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;

use common::{Actor, assignment, hear, say, scratch, until};
use memmap2::{MmapOptions, MmapRaw};
use ucm_core::host::Waiter;
use ucm_core::sync::{AtomicU32, Ordering};
use ucm_posix::{ShmDir, SystemWaiter};

fn map(dir: &ShmDir) -> MmapRaw {
    let path = dir.path.join("words");
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.unwrap();
    file.set_len(4096).unwrap();
    MmapOptions::new().len(4096).map_raw(&file).unwrap()
}

fn word(map: &MmapRaw, index: usize) -> &AtomicU32 {
    assert!(index < 1024);
    let at = map.as_mut_ptr().wrapping_add(index * 4);
    // SAFETY: inside the page, aligned, mapped as long as `map` is borrowed,
    // and used by everybody as an atomic.
    unsafe { AtomicU32::from_ptr(at.cast()) }
}

/// Waits until the thread sleeps in one of the futex calls.
fn until_asleep(pid: i32, thread: &str) {
    let path = format!("/proc/{pid}/task/{thread}/syscall");
    let calls = [libc::SYS_futex.to_string(), libc::SYS_futex_waitv.to_string()];
    until("the waiter sleeps", || {
        let call = std::fs::read_to_string(&path).unwrap();
        calls.iter().any(|number| call.split(' ').next() == Some(number))
    });
}

/// Any wait here is long: only a wake ends it.
const HOUR_NS: u64 = 3_600_000_000_000;

#[test]
fn child_process() {
    let Some((action, dir, _)) = assignment() else { return };
    let map = map(&dir);
    say(rustix::thread::gettid().as_raw_nonzero());
    match action.as_str() {
        "wait" => {
            while word(&map, 0).load(Ordering::Acquire) == 0 {
                SystemWaiter.wait(word(&map, 0), 0, HOUR_NS);
            }
        }
        "wait_any" => {
            while word(&map, 1).load(Ordering::Acquire) == 0 {
                let words: Vec<_> = (0..3).map(|index| (word(&map, index), 0)).collect();
                SystemWaiter.wait_any(&words, HOUR_NS);
            }
        }
        other => panic!("{other}"),
    }
    say("woken");
    hear();
}

#[test]
fn a_wake_reaches_a_waiter_in_another_process() {
    let (_temp, dir) = scratch();
    let map = map(&dir);
    let actor = Actor::start("wait", &dir.path, "");
    until_asleep(actor.pid(), &actor.hear());
    word(&map, 0).store(1, Ordering::Release);
    SystemWaiter.wake_all(word(&map, 0));
    actor.expect("woken");
    actor.finish();
}

#[test]
fn a_wait_on_many_words_ends_when_the_second_one_changes() {
    let (_temp, dir) = scratch();
    let map = map(&dir);
    let actor = Actor::start("wait_any", &dir.path, "");
    until_asleep(actor.pid(), &actor.hear());
    word(&map, 1).store(1, Ordering::Release);
    SystemWaiter.wake_all(word(&map, 1));
    actor.expect("woken");
    actor.finish();
}
