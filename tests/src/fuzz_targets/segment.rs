//! Control planes of any content: attaching to one, using one, reaping in one.

use std::mem::ManuallyDrop;

use ucm_core::cache::{Audit, GetError, JoinError};
use ucm_core::participant::{Introduction, Role};
use ucm_core::segment::counters::Counter;
use ucm_core::slot::meta::LoadErrorCode;
use ucm_core::{
    Cache, CacheShape, ControlPlane, Geometry, Got, Pinned, Place, SegmentIdentity, ShardKey,
};

use crate::fuzz_targets::Input;
use crate::fuzz_targets::memory::{FuzzHost, Heap};
use crate::keys::key;

const BOOT: [u8; 16] = [7; 16];
/// Time a call has, on the host's clock, which ticks with every look at it.
const PATIENCE_NS: u64 = 5_000_000;
const KEYS: u64 = 24;

fn shape() -> CacheShape {
    CacheShape {
        slot_count: 12,
        reserved_slots: 2,
        shard_bytes: 64,
        shards_per_block: 4,
        local_rank_size: 4,
        participants: 32,
        content_tag: 0,
    }
}

fn who() -> Introduction {
    Introduction { role: Role::Rank, pid: 1, device: 0, start_time: 0 }
}

/// A valid control plane on the heap.
fn image() -> (Heap, Geometry) {
    let geometry = Geometry::new(shape()).expect("a valid shape");
    let heap = Heap::new(geometry.control_bytes as usize);
    let identity = SegmentIdentity {
        nonce: 1,
        boot_id: BOOT,
        created_unix_s: 0,
        io_quarantine_ns: 1_000_000,
        persist: false,
    };
    // SAFETY: zeroed just now and known to nobody.
    let made = unsafe { ControlPlane::create(heap.region(), &geometry, &identity) };
    made.expect("a valid control plane");
    (heap, geometry)
}

fn join<'m>(
    plane: ControlPlane<'m>,
    host: &FuzzHost,
    rank: u32,
) -> Result<Cache<'m, FuzzHost>, JoinError> {
    Cache::join(plane, host.clone(), Place::Rank(rank), who())
}

fn deadline(cache: &Cache<'_, FuzzHost>) -> u64 {
    use ucm_core::host::Waiter;
    cache.host().now_ns().saturating_add(PATIENCE_NS)
}

/// Comes by a key somehow, or not.
fn acquire(cache: &Cache<'_, FuzzHost>, key: &ShardKey) -> Result<Option<Pinned>, GetError> {
    Ok(match cache.get(key, deadline(cache))? {
        Got::Hit(pinned) => Some(pinned),
        Got::Owner(loading) => cache.publish(loading, 64, 0).ok(),
        Got::Wait(pending) => cache.wait(pending, deadline(cache)).ok(),
    })
}

/// Everything that only looks.
fn look(plane: &ControlPlane<'_>, host: &FuzzHost) {
    let audit = Audit::new(plane);
    let census = audit.census();
    assert_eq!(census.total(), plane.geometry().shape.slot_count);
    audit.check(host, |_violation| {});
    let _pins = audit.pins();
    for id in 0..KEYS {
        let _presence = plane.probe(&key(id));
        let _ready = plane.is_block_ready(key(id).block);
    }
    plane.participants().for_each(drop);
    let _numbers = (plane.attached_ranks(), plane.created_unix_s(), plane.io_quarantine_ns());
    let _sum: Vec<u64> = Counter::ALL.iter().map(|&counter| plane.count(counter)).collect();
    plane.inspect(0..u32::MAX);
}

/// Attaching to arbitrary bytes, and looking at what was let in.
///
/// # Panics
/// That is the finding.
pub fn attach(data: &[u8]) {
    let mut input = Input::new(data);
    let (heap, geometry) = image();
    let kind = input.byte();
    if kind & 1 == 0 {
        input.patch(heap.len(), 32, |at, byte| heap.write(at, byte));
    } else {
        // The input is the header.
        let len = heap.len();
        input.bytes(len).iter().enumerate().for_each(|(at, &byte)| heap.write(at, byte));
    }
    // Also of a length that the header does not mean.
    let cut = if kind & 2 == 0 { heap.len() } else { heap.len() / 2 };
    // SAFETY: a part of memory that lives as long as `heap`.
    let region = unsafe { ucm_core::ptr::Region::new(heap.base(), cut) };
    let expected = (kind & 4 == 0).then_some(&geometry);
    match ControlPlane::attach(region, expected, &BOOT) {
        Ok(plane) => look(&plane, &FuzzHost::default()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Gets, waits, releases, prefetches and looks, before and after every patch.
///
/// # Panics
/// That is the finding.
pub fn walks(data: &[u8]) {
    let mut input = Input::new(data);
    let (heap, geometry) = image();
    let host = FuzzHost::default();
    let Ok(plane) = ControlPlane::attach(heap.region(), Some(&geometry), &BOOT) else { return };
    let (Ok(rank), Ok(other)) = (join(plane, &host, 0), join(plane, &host, 1)) else { return };
    for id in 0..8 {
        if let Ok(Some(pinned)) = acquire(&rank, &key(id)) {
            rank.release(pinned);
        }
    }
    let mut held = Vec::new();
    for _ in 0..24 {
        if input.is_empty() {
            break;
        }
        input.patch(heap.len(), 2, |at, byte| heap.write(at, byte));
        let action = input.byte();
        let key = key(u64::from(action >> 3) % KEYS);
        match action & 7 {
            0 => _ = rank.prepare_next(&key),
            1 => _ = rank.touch(&[key.block]),
            2 => _ = rank.reap_dead(),
            3 => {
                if let Ok(Got::Owner(loading)) = other.get(&key, deadline(&other)) {
                    let _late = other.fail(loading, LoadErrorCode(1));
                }
            }
            4 => rank.get_many(&[key, key], deadline(&rank), |_, got| match got {
                Ok(Got::Hit(pinned)) => rank.release(pinned),
                Ok(Got::Wait(pending)) => rank.cancel(pending),
                Ok(Got::Owner(loading)) => _ = rank.fail(loading, LoadErrorCode(2)),
                Err(_) => {}
            }),
            5 => look(&plane, &host),
            _ => {
                if let Ok(Some(pinned)) = acquire(&rank, &key) {
                    let _payload = rank.payload(&pinned);
                    held.push(pinned);
                }
            }
        }
        if held.len() > 3 {
            rank.release(held.remove(0));
        }
    }
    held.into_iter().for_each(|pinned| rank.release(pinned));
    look(&plane, &host);
}

/// Reaping two who died in the middle of something, in memory that was
/// written over, and taking their places.
///
/// # Panics
/// That is the finding.
pub fn reap(data: &[u8]) {
    let mut input = Input::new(data);
    let (heap, geometry) = image();
    let host = FuzzHost::default();
    let Ok(plane) = ControlPlane::attach(heap.region(), Some(&geometry), &BOOT) else { return };
    for rank in [1, 2] {
        let Ok(dying) = join(plane, &host, rank) else { return };
        for id in 0..3 {
            let _held = dying.get(&key(u64::from(rank) * 4 + id), deadline(&dying));
        }
        let dead = dying.me();
        let _never_dropped = ManuallyDrop::new(dying);
        host.kill(dead);
    }
    input.patch(heap.len(), 48, |at, byte| heap.write(at, byte));
    let Ok(rank) = join(plane, &host, 0) else { return };
    rank.reap_dead();
    input.patch(heap.len(), 16, |at, byte| heap.write(at, byte));
    // One in the place of the dead, and everybody's keys once.
    let successor = join(plane, &host, 1);
    for id in 0..KEYS {
        if let Ok(Some(pinned)) = acquire(&rank, &key(id)) {
            rank.release(pinned);
        }
    }
    rank.reap_dead();
    look(&plane, &host);
    drop(successor);
    drop(rank);
    look(&plane, &host);
}
