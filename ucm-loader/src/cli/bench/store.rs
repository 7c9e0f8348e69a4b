//! `ucm bench store`: loads from block files, against as many bare threads that pread them.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use memmap2::MmapRaw;
use rustix::fs::{Advice, fadvise};
use serde::Serialize;
use ucm_core::key::{BlockId, ShardKey};
use xxhash_rust::xxh3::xxh3_64;

use crate::backend::file::{FileBackend, FileOptions, FileStore, IoEngine};
use crate::backend::threaded::{BlockingStore, Threads};
use crate::backend::traits::{Backend, LoadRequest, RawBuf, SharedMemory, StoreGeometry};
use crate::cli::Failure;
use crate::cli::output;
use crate::content;

/// Cold loads through each engine, against bare threads that pread the same files.
///
/// The files' pages are dropped from the page cache before each measurement.
/// Every engine opens, checks and verifies; the bare threads only read.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Where the files go; by default a temporary directory
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Blocks
    #[arg(long, default_value_t = 256)]
    blocks: u64,
    /// Shards of a block
    #[arg(long, default_value_t = 8)]
    shards_per_block: u32,
    /// Bytes of a shard
    #[arg(long, default_value_t = 256 << 10)]
    shard_bytes: u64,
    /// Threads that read, one measurement each
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8])]
    threads: Vec<usize>,
    /// Leave the pages in the page cache
    #[arg(long)]
    warm: bool,
    /// Do not compare checksums, as the bare threads do not
    #[arg(long)]
    no_verify: bool,
    /// One JSON object, the last line of the output
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    threads: usize,
    engine: &'static str,
    gb_per_s: f64,
    of_raw: f64,
    cpu_s_per_gb: f64,
    cpu_of_raw: f64,
    first_load_us: f64,
}

#[derive(Serialize)]
struct Report {
    blocks: u64,
    shard_bytes: u64,
    shards_per_block: u32,
    warm: bool,
    verified: bool,
    rows: Vec<Row>,
}

/// One measurement.
struct Measured {
    wall: Duration,
    cpu_ns: u64,
    first: Duration,
}

const PATIENCE: Duration = Duration::from_secs(120);
/// Shards handed over together, as the dispatcher does.
const BATCH: usize = 8;
/// Places in memory that are loaded into, in turn.
const PLACES: usize = 256;

struct Bench<'a> {
    arguments: &'a Arguments,
    geometry: StoreGeometry,
    dir: PathBuf,
    keys: Vec<ShardKey>,
    paths: Vec<PathBuf>,
    memory: Arc<MmapRaw>,
}

/// Runs it.
///
/// # Errors
/// [`Failure::Wrong`] when a load failed.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    crate::interrupt::watch()?;
    let scratch = tempfile::tempdir()?;
    let dir = arguments.dir.clone().unwrap_or_else(|| scratch.path().to_owned());
    let bench = Bench::new(arguments, dir)?;
    let mut rows = Vec::new();
    for threads in &arguments.threads {
        let raw = bench.raw(*threads)?;
        rows.push(bench.row(*threads, "raw pread", &raw, &raw));
        for (name, engine, direct_io) in [
            ("threads", IoEngine::Threads, false),
            ("threads, direct", IoEngine::Threads, true),
            ("uring", IoEngine::Uring, false),
            ("uring, direct, registered", IoEngine::Uring, true),
        ] {
            let measured = bench.engine(*threads, engine, direct_io)?;
            rows.push(bench.row(*threads, name, &measured, &raw));
        }
    }
    let mut table =
        output::table(["threads", "engine", "GB/s", "of raw", "CPU s/GB", "of raw", "first us"]);
    for row in &rows {
        table.add_row([
            row.threads.to_string(),
            row.engine.to_owned(),
            format!("{:.2}", row.gb_per_s),
            format!("{:.2}", row.of_raw),
            format!("{:.3}", row.cpu_s_per_gb),
            format!("{:.2}", row.cpu_of_raw),
            format!("{:.0}", row.first_load_us),
        ]);
    }
    println!("{table}");
    if arguments.json {
        output::json(&Report {
            blocks: arguments.blocks,
            shard_bytes: arguments.shard_bytes,
            shards_per_block: arguments.shards_per_block,
            warm: arguments.warm,
            verified: !arguments.no_verify,
            rows,
        })?;
    }
    Ok(())
}

impl<'a> Bench<'a> {
    /// Writes the files.
    fn new(arguments: &'a Arguments, dir: PathBuf) -> Result<Self, Failure> {
        let Arguments { blocks, shards_per_block, shard_bytes, .. } = *arguments;
        let geometry = StoreGeometry { shard_bytes, shards_per_block, content_tag: 0 };
        let store = FileStore::open(&FileOptions::new(&dir, geometry))?;
        let ids: Vec<_> = (0..blocks).map(|n| BlockId::from_words(content::mix(n), n)).collect();
        let shards = |id: &BlockId| {
            let id = *id;
            (0..shards_per_block).map(move |shard| ShardKey::new(id, shard))
        };
        let keys: Vec<_> = ids.iter().flat_map(shards).collect();
        let mut bytes = vec![0; shard_bytes as usize];
        let bar = output::progress(keys.len() as u64, "writing");
        for key in &keys {
            content::fill(&mut bytes, 1, key, 0);
            store.store(*key, &bytes, Some(xxh3_64(&bytes)))?;
            bar.inc(1);
        }
        bar.finish_and_clear();
        let paths = ids.iter().map(|id| store.block_path(id)).collect();
        let places = PLACES * shard_bytes.next_multiple_of(4096) as usize;
        let mut memory = memmap2::MmapMut::map_anon(places)?;
        memory.fill(1);
        let memory = Arc::new(MmapRaw::from(memory));
        Ok(Self { arguments, geometry, dir, keys, paths, memory })
    }

    fn bytes(&self) -> u64 {
        self.keys.len() as u64 * self.arguments.shard_bytes
    }

    fn row(&self, threads: usize, engine: &'static str, is: &Measured, raw: &Measured) -> Row {
        let round = |value: f64| (value * 1e3).round() / 1e3;
        let cpu = |measured: &Measured| measured.cpu_ns as f64 / self.bytes() as f64;
        Row {
            threads,
            engine,
            gb_per_s: output::gb_per_s(self.bytes(), is.wall.as_nanos() as u64),
            of_raw: round(raw.wall.as_secs_f64() / is.wall.as_secs_f64()),
            cpu_s_per_gb: round(cpu(is)),
            cpu_of_raw: round(cpu(is) / cpu(raw)),
            first_load_us: round(is.first.as_nanos() as f64 / 1e3),
        }
    }

    /// Drops the files' pages, or makes sure that they are there.
    fn prepare(&self) -> Result<(), Failure> {
        for path in &self.paths {
            let file = File::open(path)?;
            if self.arguments.warm {
                std::io::copy(&mut &file, &mut std::io::sink())?;
            } else {
                // Only clean pages can be dropped.
                file.sync_data()?;
                fadvise(file.as_fd(), 0, None, Advice::DontNeed)?;
            }
        }
        Ok(())
    }

    /// Where in memory the load of this number goes.
    fn place(&self, number: usize) -> *mut u8 {
        let stride = self.arguments.shard_bytes.next_multiple_of(4096) as usize;
        self.memory.as_mut_ptr().wrapping_add(number % PLACES * stride)
    }

    /// Bare threads: open, pread, no header, no checksum.
    fn raw(&self, threads: usize) -> Result<Measured, Failure> {
        self.prepare()?;
        let shards = self.arguments.shards_per_block as usize;
        let offsets = self.offsets()?;
        // As much memory in all as the engines load into, touched as theirs is.
        let len = self.arguments.shard_bytes as usize;
        let part = (PLACES / threads).max(1);
        let mut memory = vec![vec![1_u8; part * len]; threads];
        let (began, cpu_ns) = (Instant::now(), cpu_ns());
        let offsets = &offsets;
        let read = |thread: usize, memory: &mut [u8]| -> std::io::Result<Duration> {
            let mut first = None;
            let mut number = 0;
            for path in self.paths.iter().skip(thread).step_by(threads) {
                let file = File::open(path)?;
                for offset in offsets.iter().take(shards) {
                    let buffer = &mut memory[number % part * len..][..len];
                    number += 1;
                    file.read_exact_at(buffer, *offset)?;
                    first.get_or_insert_with(|| began.elapsed());
                }
            }
            Ok(first.unwrap_or_default())
        };
        let firsts = std::thread::scope(|scope| {
            let read = &read;
            let started: Vec<_> = memory
                .iter_mut()
                .enumerate()
                .map(|(thread, memory)| scope.spawn(move || read(thread, memory)))
                .collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, std::io::Result<Duration>>| {
                thread.join().unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into()))
            };
            started.into_iter().map(join).collect::<std::io::Result<Vec<_>>>()
        })?;
        let first = firsts.into_iter().min().unwrap_or_default();
        Ok(Measured { wall: began.elapsed(), cpu_ns: self::cpu_ns() - cpu_ns, first })
    }

    fn offsets(&self) -> Result<Vec<u64>, Failure> {
        let store = self.store(&self.dir)?;
        Ok((0..self.arguments.shards_per_block).map(|shard| store.shard_offset(shard)).collect())
    }

    fn store(&self, dir: &Path) -> Result<FileStore, Failure> {
        Ok(FileStore::open(&FileOptions::new(dir, self.geometry))?)
    }

    /// A backend with so many threads (or one ring) and its memory adopted.
    fn engine(
        &self,
        threads: usize,
        engine: IoEngine,
        direct_io: bool,
    ) -> Result<Measured, Failure> {
        self.prepare()?;
        let verify = !self.arguments.no_verify;
        let options = FileOptions::new(&self.dir, self.geometry);
        let options = FileOptions { engine, direct_io, verify, ..options };
        let workers = Threads { load_workers: threads, store_workers: 1, queue_depth: 1 << 16 };
        let backend = FileBackend::open(&options, workers)?;
        let keeper = Box::new(Arc::clone(&self.memory));
        // SAFETY: the keeper holds the mapping, which is so long and writable.
        let memory =
            unsafe { SharedMemory::new(self.memory.as_mut_ptr(), self.memory.len(), keeper) };
        backend.adopt_memory(memory);
        let (sender, answers) = mpsc::channel();
        let (began, cpu_ns) = (Instant::now(), cpu_ns());
        let (mut first, mut free, mut failed) = (None, PLACES, 0);
        let mut answer = |free: &mut usize| -> Result<(), Failure> {
            let is_loaded: bool = answers.recv_timeout(PATIENCE)?;
            first.get_or_insert_with(|| began.elapsed());
            failed += usize::from(!is_loaded);
            *free += 1;
            Ok(())
        };
        // A place is used again when as many loads have been answered as are
        // needed for all earlier ones of it to be over: a whole round.
        for (number, keys) in self.keys.chunks(BATCH).enumerate() {
            if (number * BATCH).is_multiple_of(PLACES) {
                while free < PLACES {
                    answer(&mut free)?;
                }
            }
            free -= keys.len();
            let request = |(at, key): (usize, &ShardKey)| {
                let place = self.place(number * BATCH + at);
                let sender = sender.clone();
                // SAFETY: in the mapping; no other load has this place before
                // the whole round has been answered.
                let target = unsafe { RawBuf::new(place, self.arguments.shard_bytes as usize) };
                LoadRequest::new(*key, target, move |result| {
                    let _bench_has_given_up = sender.send(result.is_ok());
                })
            };
            backend.submit(keys.iter().enumerate().map(request).collect());
        }
        while free < PLACES {
            answer(&mut free)?;
        }
        let wall = began.elapsed();
        let cpu_ns = self::cpu_ns() - cpu_ns;
        backend.shutdown(Instant::now() + PATIENCE)?;
        if failed > 0 {
            return Err(Failure::Wrong(format!("{failed} loads failed")));
        }
        Ok(Measured { wall, cpu_ns, first: first.unwrap_or_default() })
    }
}

/// What this process has used of the processors.
fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
