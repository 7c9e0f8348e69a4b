//! The random mix: gets, loads, failures, preparations, touches, pins kept for a while.

use std::time::Duration;

use ucm_core::cache::{GetError, WaitError};
use ucm_core::slot::meta::LoadErrorCode;
use ucm_core::sync::{AtomicU32, Ordering};
use ucm_core::{Got, Pinned};

use crate::actor::rank::{Filling, Rank, Trouble};
use crate::board::{Board, Tally};
use crate::keys::{self, key};
use crate::rng::Rng;

/// How long a get may look for a slot: rather an error than a standstill when
/// all ranks hold something.
const GET_MS: u64 = 50;
/// How long a wait may take. Beyond every watchdog: a hang is the watchdog's.
const WAIT_MS: u64 = 3_600_000;

/// Hammers `keys` keys for `rounds` gets, or until the board says stop.
pub fn hammer(rank: &Rank, board: &Board, seed: u64, key_count: u64, rounds: u64, dma: bool) {
    let mut rng = Rng::new(seed);
    let mut held: Vec<(u64, Pinned)> = Vec::new();
    for _ in 0..rounds {
        if board.hammering_is_over() {
            break;
        }
        // A few keys are hot: the smaller of two draws, twice.
        let id = rng.below(key_count).min(rng.below(key_count)).min(rng.below(key_count));
        if rng.one_in(40) && rank.cache().prepare_next(&key(id)) {
            board.count(Tally::Prepared);
        }
        if rng.one_in(100) {
            rank.cache().touch(&[key(id).block]);
        }
        if let Some(pinned) = one_get(rank, board, id, &mut rng, dma) {
            held.push((id, pinned));
        } else {
            release_all(rank, &mut held);
        }
        // One may stay for the next get; never more, or eight ranks starve.
        while held.len() > 1 || (!held.is_empty() && !rng.one_in(3)) {
            let (id, pinned) = held.swap_remove(rng.below(held.len() as u64) as usize);
            rank.check(id, &pinned);
            rank.cache().release(pinned);
        }
    }
    release_all(rank, &mut held);
}

fn release_all(rank: &Rank, held: &mut Vec<(u64, Pinned)>) {
    for (id, pinned) in held.drain(..) {
        rank.check(id, &pinned);
        rank.cache().release(pinned);
    }
}

fn one_get(rank: &Rank, board: &Board, id: u64, rng: &mut Rng, dma: bool) -> Option<Pinned> {
    let between_us = match rng.below(8) {
        0 => rng.below(300),
        1 => 0,
        _ => u64::MAX,
    };
    let mut between = || match between_us {
        u64::MAX => {}
        0 => std::thread::yield_now(),
        us => std::thread::sleep(Duration::from_micros(us)),
    };
    let filling = if rng.one_in(64) {
        Filling::Fail
    } else if dma && rng.one_in(4) {
        Filling::Transfer(rng.below(3_000_000))
    } else {
        Filling::Direct(&mut between)
    };
    let trouble = match rank.acquire(id, GET_MS, WAIT_MS, filling) {
        Ok((_, pinned)) => return Some(pinned),
        Err(trouble) => trouble,
    };
    match trouble {
        Trouble::Get(GetError::Failed(code)) | Trouble::Wait(WaitError::Failed(code)) => {
            board.count(Tally::FailuresSeen);
            let known = [LoadErrorCode(keys::failure_code(id)), LoadErrorCode::UNKNOWN];
            if !known.contains(&code) {
                rank.complain(Tally::Impossible, format_args!("key {id} failed with {code:?}"));
            }
        }
        Trouble::Get(GetError::NothingEvictable) => board.count(Tally::NothingEvictable),
        Trouble::Get(GetError::BucketsPinned) => board.count(Tally::BucketsPinned),
        Trouble::Get(GetError::Deadline) | Trouble::Wait(WaitError::Deadline) => {
            board.count(Tally::Deadlines);
        }
        Trouble::OwnersDied | Trouble::Refused => {}
        Trouble::Late => {
            rank.complain(Tally::LatePublishes, format_args!("key {id}: taken for dead"));
        }
        Trouble::Get(error) => {
            rank.complain(Tally::Impossible, format_args!("get of key {id}: {error}"));
        }
        Trouble::Wait(error) => {
            rank.complain(Tally::Impossible, format_args!("wait for key {id}: {error}"));
        }
    }
    None
}

/// Gets `count` keys from `first` on, each together with `ranks - 1` others.
///
/// # Errors
/// The first get that did not work.
pub fn race(rank: &Rank, board: &Board, first: u64, count: u64, ranks: u32) -> Result<(), Trouble> {
    for round in 0..count {
        let id = first + round;
        line_up(&board.arrivals, (round as u32 + 1) * ranks);
        let (how, pinned) =
            rank.acquire(id, WAIT_MS, WAIT_MS, Filling::Direct(&mut std::thread::yield_now))?;
        if how == crate::actor::rank::How::Owner {
            board.win(id);
        }
        rank.cache().release(pinned);
    }
    Ok(())
}

fn line_up(arrivals: &AtomicU32, all: u32) {
    arrivals.fetch_add(1, Ordering::SeqCst);
    while arrivals.load(Ordering::SeqCst) < all {
        std::thread::yield_now();
    }
}

/// How long anything may take on a segment that others scribble on.
const BLIND_MS: u64 = 20;

/// Gets, publishes, waits, prepares, touches and reaps without believing
/// anything: on a segment that is scribbled on, only that it ends counts.
pub fn blind(rank: &Rank, seed: u64, key_count: u64, rounds: u64) {
    let mut rng = Rng::new(seed);
    let cache = rank.cache();
    for _ in 0..rounds {
        let key = key(rng.below(key_count));
        match rng.below(40) {
            0 => _ = cache.prepare_next(&key),
            1 => _ = cache.touch(&[key.block]),
            2 => _ = cache.reap_dead(),
            3 => _ = cache.plane().ready_prefix(&[key.block]),
            _ => {}
        }
        match cache.get(&key, rank.deadline_ns(BLIND_MS)) {
            Ok(Got::Hit(pinned)) => cache.release(pinned),
            Ok(Got::Owner(loading)) if rng.one_in(8) => {
                let _taken_for_dead = cache.fail(loading, LoadErrorCode(keys::failure_code(1)));
            }
            Ok(Got::Owner(loading)) => {
                if let Ok(pinned) = cache.publish(loading, 64, 0) {
                    cache.release(pinned);
                }
            }
            Ok(Got::Wait(pending)) => {
                if let Ok(pinned) = cache.wait(pending, rank.deadline_ns(BLIND_MS)) {
                    cache.release(pinned);
                }
            }
            Err(_) => {}
        }
    }
}
