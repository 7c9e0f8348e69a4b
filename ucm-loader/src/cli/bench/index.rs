//! `ucm bench index`: what the control plane's operations cost, on a real segment.

use std::hint::black_box;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;
use ucm_core::{BlockId, CacheShape, Got, Role, ShardKey};
use ucm_posix::{Attachment, PosixHost, Segment, SegmentId, SegmentOptions, ShmDir};

use crate::cli::Failure;
use crate::cli::output;
use crate::cli::scratch::Scratch;

/// The control plane's operations, one thread, no data copied, on a real segment.
///
/// Beside them stands a plain table: a fixed number of chains (16,411) behind a
/// mutex each, a count in every node. Its mutex is the cheapest there is, for
/// threads of one process; a robust one that processes can share costs about
/// twice as much. Medians over several rounds.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Sizes of the cache, in slots
    #[arg(long, value_delimiter = ',', default_values_t = [1024, 65_536, 1_048_576])]
    slots: Vec<u32>,
    /// Operations in a round
    #[arg(long, default_value_t = 200_000)]
    operations: u32,
    /// Rounds
    #[arg(long, default_value_t = 7)]
    rounds: u32,
    /// Where shared memory is
    #[arg(long, default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

/// Nanoseconds an operation.
#[derive(Serialize)]
struct Size {
    slots: u32,
    get_and_release_ns: f64,
    mutex_table_ns: f64,
    mutex_table_over_ours: f64,
    get_many_16_ns_per_key: f64,
    probe_there_ns: f64,
    probe_absent_ns: f64,
    miss_ns: f64,
    create_ms: f64,
    control_bytes_per_slot: f64,
}

#[derive(Serialize)]
struct Report {
    sizes: Vec<Size>,
}

type Cache<'a> = ucm_core::Cache<'a, PosixHost>;

/// Runs it.
///
/// # Errors
/// When a segment cannot be made.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    crate::interrupt::watch()?;
    let mut sizes = Vec::new();
    for &slots in &arguments.slots {
        let _alive = output::spinner(format!("{slots} slots"));
        sizes.push(measure(arguments, slots)?);
    }
    let mut table = output::table([
        "slots",
        "get + release",
        "mutex table",
        "ratio",
        "get_many, a key",
        "probe there",
        "probe absent",
        "miss",
        "create ms",
        "B a slot",
    ]);
    for s in &sizes {
        let cells = [
            s.get_and_release_ns,
            s.mutex_table_ns,
            s.mutex_table_over_ours,
            s.get_many_16_ns_per_key,
            s.probe_there_ns,
            s.probe_absent_ns,
            s.miss_ns,
            s.create_ms,
            s.control_bytes_per_slot,
        ];
        table.add_row(
            std::iter::once(s.slots.to_string()).chain(cells.map(|cell| format!("{cell:.1}"))),
        );
    }
    println!("{table}");
    if arguments.json {
        output::json(&Report { sizes })?;
    }
    Ok(())
}

fn measure(arguments: &Arguments, slots: u32) -> Result<Size, Failure> {
    let scratch = Scratch::new(&arguments.shm_dir, "ucm-bench-")?;
    let shape = CacheShape {
        slot_count: slots,
        reserved_slots: 0,
        shard_bytes: 64,
        shards_per_block: 1,
        local_rank_size: 8,
        participants: 32,
        content_tag: 0,
    };
    let options = SegmentOptions {
        dir: ShmDir::new(scratch.shm_dir()),
        ..SegmentOptions::new(SegmentId::new(&scratch.segment_id())?, shape)
    };
    let began = Instant::now();
    let segment = Arc::new(Segment::open_or_create(&options)?);
    let create_ms = began.elapsed().as_secs_f64() * 1e3;
    let control_bytes = segment.control_bytes() as f64;
    let attachment = Attachment::join(segment, Role::Rank, Some(0), Some(0))?;
    let cache = attachment.cache();
    for id in 0..u64::from(slots) {
        load(cache, &key(id))?;
    }
    let locked = Locked::new(slots);
    let run = Rounds { operations: arguments.operations, rounds: arguments.rounds };
    let any = |random: u64| key(random % u64::from(slots));

    let get_and_release_ns = run.median(|random| load(cache, &any(random)))?;
    let mutex_table_ns = run.median(|random| {
        black_box(locked.get_and_release(&any(random)));
        Ok(())
    })?;
    let many_ns = run.median(|random| {
        let keys: [ShardKey; 16] = std::array::from_fn(|i| any(mix(random ^ i as u64)));
        let mut result = Ok(());
        cache.get_many(&keys, u64::MAX, |_, got| match got {
            Ok(Got::Hit(pinned)) => cache.release(pinned),
            other => result = finish(cache, other),
        });
        result
    })?;
    let plane = cache.plane();
    let probe_there_ns = run.median(|random| {
        black_box(plane.probe(&any(random)));
        Ok(())
    })?;
    let probe_absent_ns = run.median(|random| {
        black_box(plane.probe(&key(1 << 40 | random >> 30)));
        Ok(())
    })?;
    let mut fresh = 1_u64 << 50;
    let miss_ns = run.median(|_| {
        fresh += 1;
        load(cache, &key(fresh))
    })?;
    Ok(Size {
        slots,
        get_and_release_ns,
        mutex_table_ns,
        mutex_table_over_ours: mutex_table_ns / get_and_release_ns,
        get_many_16_ns_per_key: many_ns / 16.0,
        probe_there_ns,
        probe_absent_ns,
        miss_ns,
        create_ms,
        control_bytes_per_slot: control_bytes / f64::from(slots),
    })
}

/// A hit, or a load that takes no time.
#[inline]
fn load(cache: &Cache<'_>, key: &ShardKey) -> Result<(), Failure> {
    match cache.get(key, u64::MAX) {
        Ok(Got::Hit(pinned)) => {
            cache.release(black_box(pinned));
            Ok(())
        }
        other => finish(cache, other),
    }
}

fn finish(cache: &Cache<'_>, got: Result<Got, ucm_core::GetError>) -> Result<(), Failure> {
    match got? {
        Got::Hit(pinned) => cache.release(pinned),
        Got::Owner(loading) => cache.release(cache.publish(loading, 64, 0)?),
        Got::Wait(pending) => cache.release(cache.wait(pending, u64::MAX)?),
    }
    Ok(())
}

struct Rounds {
    operations: u32,
    rounds: u32,
}

impl Rounds {
    /// Nanoseconds an operation, the median over the rounds.
    fn median(
        &self,
        mut operation: impl FnMut(u64) -> Result<(), Failure>,
    ) -> Result<f64, Failure> {
        let mut results = Vec::new();
        let mut random = 88_172_645_463_325_252_u64;
        for _ in 0..self.rounds.max(1) {
            if crate::interrupt::is_set() {
                return Err(Failure::Broken("interrupted".to_owned()));
            }
            let began = Instant::now();
            for _ in 0..self.operations {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                operation(random >> 20)?;
            }
            results.push(began.elapsed().as_nanos() as f64 / f64::from(self.operations.max(1)));
        }
        results.sort_by(f64::total_cmp);
        Ok((results[results.len() / 2] * 10.0).round() / 10.0)
    }
}

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    value >> 20
}

fn key(id: u64) -> ShardKey {
    ShardKey::new(BlockId::from_words(id.wrapping_mul(0x9E37_79B9_7F4A_7C15), id), 0)
}

/// The plain table.
struct Locked {
    buckets: Vec<Mutex<Vec<u32>>>,
    nodes: Vec<(ShardKey, AtomicU32)>,
}

const BUCKETS: usize = 16_411;

impl Locked {
    fn new(slots: u32) -> Self {
        let nodes: Vec<_> = (0..slots).map(|slot| (key(slot.into()), AtomicU32::new(0))).collect();
        let mut buckets: Vec<Vec<u32>> = vec![Vec::new(); BUCKETS];
        for (slot, (key, _)) in (0..).zip(&nodes) {
            buckets[key.hash().0 as usize % BUCKETS].push(slot);
        }
        Self { buckets: buckets.into_iter().map(Mutex::new).collect(), nodes }
    }

    fn get_and_release(&self, key: &ShardKey) -> bool {
        let bucket = &self.buckets[key.hash().0 as usize % BUCKETS];
        let bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(&slot) = bucket.iter().find(|slot| self.nodes[**slot as usize].0 == *key) else {
            return false;
        };
        let count = &self.nodes[slot as usize].1;
        count.fetch_add(1, Ordering::AcqRel);
        drop(bucket);
        count.fetch_sub(1, Ordering::AcqRel);
        true
    }
}
