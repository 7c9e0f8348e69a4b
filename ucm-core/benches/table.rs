//! What the control plane's operations cost: one thread, no data copied.
//!
//! `cargo bench -p ucm-core`. Beside each size stands a plain table of chains
//! with a mutex for every bucket and a count in every node, so that the ratio
//! is of one run. Its mutex is the cheapest there is, for threads of one
//! process: a robust one that processes can share costs more than twice that.
#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{FAR_NS, HeapPlane, key, shape};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ucm_core::{Got, ShardKey};

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % n
    }
}

/// The usual table: chains behind bucket mutexes, counts in nodes.
struct Locked {
    buckets: Vec<Mutex<Vec<u32>>>,
    nodes: Vec<(ShardKey, AtomicU32)>,
}

impl Locked {
    fn new(slots: u32) -> Self {
        // A fixed number of buckets, as the usual table has.
        const BUCKETS: usize = 16_411;
        let mut buckets: Vec<Vec<u32>> = (0..BUCKETS).map(|_| Vec::new()).collect();
        let nodes: Vec<_> = (0..slots).map(|slot| (key(slot.into()), AtomicU32::new(0))).collect();
        for (slot, (key, _)) in (0..).zip(&nodes) {
            buckets[key.hash().0 as usize % BUCKETS].push(slot);
        }
        Self { buckets: buckets.into_iter().map(Mutex::new).collect(), nodes }
    }

    fn get_and_release(&self, key: &ShardKey) -> bool {
        let bucket = self.buckets[key.hash().0 as usize % self.buckets.len()].lock().unwrap();
        let Some(&slot) = bucket.iter().find(|slot| self.nodes[**slot as usize].0 == *key) else {
            return false;
        };
        self.nodes[slot as usize].1.fetch_add(1, Ordering::AcqRel);
        drop(bucket);
        self.nodes[slot as usize].1.fetch_sub(1, Ordering::AcqRel);
        true
    }
}

fn table(criterion: &mut Criterion) {
    for slots in [1024_u32, 1 << 16, 1 << 20] {
        let heap = HeapPlane::new(shape(slots, 8));
        let rank = heap.rank(0);
        for id in 0..u64::from(slots) {
            match rank.get(&key(id), FAR_NS).unwrap() {
                Got::Owner(loading) => rank.release(rank.publish(loading, 64, 0).unwrap()),
                Got::Hit(pinned) => rank.release(pinned),
                Got::Wait(_) => unreachable!("one participant"),
            }
        }
        let plane = heap.plane();
        let mut group = criterion.benchmark_group(format!("{slots} slots"));
        let mut random = Random(88_172_645_463_325_252);
        let locked = Locked::new(slots);
        group.bench_function("get and release, private bucket mutex", |b| {
            b.iter(|| black_box(locked.get_and_release(&key(random.below(slots.into())))));
        });
        group.bench_function("get and release", |b| {
            b.iter(|| match rank.get(&key(random.below(slots.into())), FAR_NS) {
                Ok(Got::Hit(pinned)) => rank.release(black_box(pinned)),
                Ok(Got::Owner(loading)) => rank.release(rank.publish(loading, 64, 0).unwrap()),
                other => panic!("{other:?}"),
            });
        });
        group.bench_function("probe, there", |b| {
            b.iter(|| black_box(plane.probe(&key(random.below(slots.into())))));
        });
        group.bench_function("probe, not there", |b| {
            b.iter(|| black_box(plane.probe(&key(1 << 40 | random.below(1 << 30)))));
        });
        group.throughput(Throughput::Elements(16));
        group.bench_with_input(BenchmarkId::new("get_many and release", 16), &16, |b, &n| {
            b.iter_batched(
                || (0..n).map(|_| key(random.below(slots.into()))).collect::<Vec<_>>(),
                |keys| {
                    rank.get_many(&keys, FAR_NS, |_, got| match got {
                        Ok(Got::Hit(pinned)) => rank.release(pinned),
                        Ok(Got::Owner(loading)) => {
                            rank.release(rank.publish(loading, 64, 0).unwrap());
                        }
                        other => panic!("{other:?}"),
                    });
                },
                criterion::BatchSize::SmallInput,
            );
        });
        group.throughput(Throughput::Elements(1));
        let mut fresh = 1_u64 << 50;
        group.bench_function("miss: evict, insert, publish, release", |b| {
            b.iter(|| {
                fresh += 1;
                match rank.get(&key(fresh), FAR_NS).unwrap() {
                    Got::Owner(loading) => rank.release(rank.publish(loading, 64, 0).unwrap()),
                    other => panic!("{other:?}"),
                }
            });
        });
        group.finish();
    }
}

criterion_group!(benches, table);
criterion_main!(benches);
