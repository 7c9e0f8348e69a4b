//! Property: one thread's view of the cache is that of a simple reference.
//!
//! The reference is a map, a list of places and a hand; it knows nothing of
//! words, tags or buckets. Random operations run on both, and after each one
//! both must answer alike.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::HashMap;

use common::*;
use proptest::prelude::*;
use ucm_core::cache::{GetError, Presence};
use ucm_core::slot::meta::LoadErrorCode;
use ucm_core::{Got, Pinned, ShardKey};

#[derive(Clone, Copy, Debug)]
enum Op {
    Get(u8),
    GetAndFail(u8),
    GetAndHold(u8),
    ReleaseOldest,
    Touch(u8),
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Held {
    Nothing,
    Ready(ShardKey),
    Failed(ShardKey),
}

struct Reference {
    places: Vec<Held>,
    used: Vec<bool>,
    pins: Vec<u32>,
    hand: usize,
}

impl Reference {
    fn new(slots: usize) -> Self {
        Self {
            places: vec![Held::Nothing; slots],
            used: vec![false; slots],
            pins: vec![0; slots],
            hand: 0,
        }
    }

    fn place_of(&self, key: &ShardKey) -> Option<usize> {
        self.places
            .iter()
            .position(|held| *held == Held::Ready(*key) || *held == Held::Failed(*key))
    }

    /// CLOCK in its plainest words.
    fn make_room(&mut self) -> Option<usize> {
        let slots = self.places.len();
        for step in 0..3 * slots {
            let place = self.hand % slots;
            self.hand += 1;
            if self.places[place] != Held::Nothing && self.used[place] && step < 2 * slots {
                self.used[place] = false;
            } else if self.pins[place] == 0 {
                return Some(place);
            }
        }
        None
    }
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..24_u8).prop_map(Op::Get),
        1 => (0..24_u8).prop_map(Op::GetAndFail),
        2 => (0..24_u8).prop_map(Op::GetAndHold),
        2 => Just(Op::ReleaseOldest),
        1 => (0..24_u8).prop_map(Op::Touch),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 8 } else { 400 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn one_thread_sees_a_map_with_clock_eviction(
        slots in 1..12_u32,
        ops in prop::collection::vec(op(), 1..if cfg!(miri) { 40 } else { 400 }),
    ) {
        let heap = HeapPlane::new(shape(slots, 1));
        let rank = heap.rank(0);
        let mut reference = Reference::new(slots as usize);
        let mut held: Vec<(Pinned, usize)> = Vec::new();
        for op in ops {
            match op {
                Op::ReleaseOldest => {
                    if !held.is_empty() {
                        let (pinned, place) = held.remove(0);
                        rank.release(pinned);
                        reference.pins[place] -= 1;
                    }
                }
                Op::Touch(id) => {
                    let key = key(id.into());
                    let expected = match reference.place_of(&key) {
                        Some(place) if reference.places[place] == Held::Ready(key) => {
                            reference.used[place] = true;
                            1
                        }
                        _ => 0,
                    };
                    prop_assert_eq!(rank.touch(&[key.block]), expected);
                }
                Op::Get(id) | Op::GetAndHold(id) | Op::GetAndFail(id) => {
                    let key = key(id.into());
                    let at = reference.place_of(&key);
                    let hit = at.is_some_and(|place| reference.places[place] == Held::Ready(key));
                    let place = match at {
                        Some(place) => Some(place),
                        None => reference.make_room(),
                    };
                    let got = rank.get(&key, 0);
                    let Some(place) = place else {
                        prop_assert_eq!(got, Err(GetError::NothingEvictable));
                        continue;
                    };
                    reference.used[place] = true;
                    let pinned = match got.unwrap() {
                        Got::Hit(pinned) => {
                            prop_assert!(hit);
                            pinned
                        }
                        Got::Owner(loading) => {
                            prop_assert!(!hit);
                            if matches!(op, Op::GetAndFail(_)) {
                                rank.fail(loading, LoadErrorCode(7)).unwrap();
                                reference.places[place] = Held::Failed(key);
                                continue;
                            }
                            rank.publish(loading, 64, 0).unwrap()
                        }
                        Got::Wait(_) => panic!("nobody else is here"),
                    };
                    reference.places[place] = Held::Ready(key);
                    prop_assert_eq!(pinned.slot() as usize, place);
                    if matches!(op, Op::GetAndHold(_)) {
                        held.push((pinned, place));
                        reference.pins[place] += 1;
                    } else {
                        rank.release(pinned);
                    }
                }
            }
            let mut expected = HashMap::new();
            for held in &reference.places {
                match held {
                    Held::Nothing => {}
                    Held::Ready(key) => { expected.insert(*key, Presence::Ready); }
                    Held::Failed(key) => { expected.insert(*key, Presence::Failed); }
                }
            }
            for id in 0..24 {
                let there = heap.plane().probe(&key(id));
                prop_assert_eq!(there, expected.get(&key(id)).copied().unwrap_or(Presence::Absent));
            }
        }
        for (pinned, _) in held {
            rank.release(pinned);
        }
        drop(rank);
        heap.assert_sound();
    }
}
