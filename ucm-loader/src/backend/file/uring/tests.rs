//! The ring where conformance does not reach: late reads, registered memory, the end.

use std::fs::File;
use std::sync::mpsc;

use tempfile::TempDir;
use ucm_core::key::ShardKey;
use xxhash_rust::xxh3::xxh3_64;

use super::*;
use crate::backend::file::layout::ShardEntry;
use crate::backend::file::{FileBackend, FileOptions, IoEngine};
use crate::backend::testing::*;
use crate::backend::traits::{Backend, LoadedShard, RawBuf, StoreGeometry};
use crate::content::POISON_BYTE;

const SHARD_BYTES: usize = 8192;
const GEOMETRY: StoreGeometry =
    StoreGeometry { shard_bytes: SHARD_BYTES as u64, shards_per_block: 2, content_tag: 1 };

type Answers = mpsc::Receiver<Result<LoadedShard, BackendError>>;

/// An engine whose reads take at most `timeout`; `None` where there is no io_uring.
fn start(dir: &TempDir, timeout: Duration) -> Option<Uring> {
    let store = FileStore::open(&FileOptions::new(dir.path(), GEOMETRY)).unwrap();
    match Uring::start(Arc::new(store), THREADS, timeout) {
        Err(OpenError::NoUring { errno }) => {
            println!("SKIPPED: no io_uring here (errno {errno})");
            None
        }
        started => Some(started.unwrap()),
    }
}

/// A request of `bytes` that are read from an empty pipe, so it never ends by
/// itself; with the pipe's other end.
fn hang(uring: &Uring, buffer: &mut [u8]) -> (Answers, File) {
    let (reading, writing) = std::io::pipe().unwrap();
    let plain = File::from(std::os::fd::OwnedFd::from(reading));
    let entry = ShardEntry { len_bytes: buffer.len() as u64, checksum: None };
    let block = Arc::new(OpenBlock { plain, direct: None, table: vec![entry; 2] });
    let (sender, answers) = mpsc::channel();
    // SAFETY: the tests keep `buffer` until the answer has come or the driver is gone.
    let dst = unsafe { RawBuf::new(buffer.as_mut_ptr(), buffer.len()) };
    let request = LoadRequest::new(ShardKey::new(id(1), 0), dst, move |result| {
        let _ = sender.send(result);
    });
    let deadline = Instant::now() + uring.timeout;
    let jobs = uring.inbox.admit(vec![request], deadline);
    uring.inbox.deliver(jobs.into_iter().filter_map(|t| plan(&uring.store, &block, t)).collect());
    (answers, File::from(std::os::fd::OwnedFd::from(writing)))
}

#[test]
fn a_read_that_is_late_is_cancelled_and_its_buffer_is_not_written_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let Some(uring) = start(&dir, Duration::from_millis(50)) else { return };
    let mut buffer = vec![POISON_BYTE; 64];
    let began = Instant::now();
    let (answers, mut pipe) = hang(&uring, &mut buffer);
    assert_eq!(answers.recv(), Ok(Err(BackendError::TimedOut)));
    assert!(began.elapsed() >= Duration::from_millis(50));
    // Nobody reads the pipe any more: what comes now stays in it.
    std::io::Write::write_all(&mut pipe, &[1; 64]).unwrap_or_default();
    assert!(uring.wait_idle(soon()));
    assert!(uring.stop(soon()));
    assert_eq!(buffer, vec![POISON_BYTE; 64]);
}

#[test]
fn a_read_that_comes_in_pieces_is_put_together() {
    let dir = tempfile::tempdir().unwrap();
    let Some(uring) = start(&dir, Duration::from_secs(60)) else { return };
    let mut buffer = vec![POISON_BYTE; 64];
    let (answers, mut pipe) = hang(&uring, &mut buffer);
    for piece in 0..4 {
        std::io::Write::write_all(&mut pipe, &[piece; 16]).unwrap();
    }
    assert_eq!(answers.recv(), Ok(Ok(LoadedShard { len_bytes: 64, checksum: None })));
    assert!(uring.stop(soon()));
    assert!((0..64).all(|at| buffer[at] == at as u8 / 16), "{buffer:?}");
}

#[test]
fn a_stop_does_not_answer_what_the_kernel_still_has() {
    let dir = tempfile::tempdir().unwrap();
    let Some(uring) = start(&dir, Duration::from_secs(60)) else { return };
    let mut buffer = vec![POISON_BYTE; 8];
    let (answers, mut pipe) = hang(&uring, &mut buffer);
    std::io::Write::write_all(&mut pipe, &[7; 4]).unwrap();
    // Under way for sure once half of it has been taken.
    while rustix::io::ioctl_fionread(&pipe).unwrap() > 0 {
        thread::yield_now();
    }
    assert!(!uring.stop(Instant::now() + Duration::from_millis(200)));
    assert_eq!(answers.try_recv(), Err(mpsc::TryRecvError::Empty));
    std::io::Write::write_all(&mut pipe, &[7; 4]).unwrap();
    assert!(uring.stop(soon()));
    assert_eq!(answers.recv(), Ok(Ok(LoadedShard { len_bytes: 8, checksum: None })));
    assert_eq!(buffer, [7; 8]);
}

#[test]
fn reads_into_registered_memory_and_beside_it_are_both_right() {
    for direct_io in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let options =
            FileOptions { engine: IoEngine::Auto, ..FileOptions::new(dir.path(), GEOMETRY) };
        let options = FileOptions { direct_io, ..options };
        let backend = FileBackend::open(&options, THREADS).unwrap();
        let memory = memmap2::MmapMut::map_anon(8 * SHARD_BYTES).unwrap();
        let memory = Arc::new(memmap2::MmapRaw::from(memory));
        let (start, keeper) = (memory.as_mut_ptr(), Box::new(Arc::clone(&memory)));
        // SAFETY: the keeper holds the mapping.
        let shared = unsafe { SharedMemory::new(start, 8 * SHARD_BYTES, keeper) };
        backend.adopt_memory(shared);
        (0..6).for_each(|number| put_block(&backend, id(number), 2, SHARD_BYTES));
        for number in 0..6 {
            let key = ShardKey::new(id(number), 1);
            let (sender, answers) = mpsc::channel();
            // SAFETY: inside the mapping, and not touched until the answer.
            let place = unsafe { start.add(number as usize * SHARD_BYTES) };
            // SAFETY: as above; six places do not overlap.
            let dst = unsafe { RawBuf::new(place, SHARD_BYTES) };
            let done = move |result| sender.send(result).unwrap();
            backend.submit(vec![LoadRequest::new(key, dst, done)]);
            let loaded = answers.recv().unwrap().unwrap();
            // SAFETY: answered, so nobody writes it.
            let found = unsafe { std::slice::from_raw_parts(place, SHARD_BYTES) };
            assert_eq!(found, bytes_of(key, SHARD_BYTES));
            assert_eq!(loaded.checksum, Some(xxh3_64(found)));
            assert_block(&backend, id(number), 2, SHARD_BYTES);
        }
        println!("direct {direct_io}: {:?}", backend.engine());
    }
}

#[test]
fn hundreds_of_reads_at_once_are_each_answered_with_their_own_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let options = FileOptions { engine: IoEngine::Auto, ..FileOptions::new(dir.path(), GEOMETRY) };
    let options = FileOptions { direct_io: true, open_files: 3, ..options };
    let threads = Threads { queue_depth: 1000, ..THREADS };
    let backend = FileBackend::open(&options, threads).unwrap();
    (0..10).for_each(|number| put_block(&backend, id(number), 2, SHARD_BYTES));
    let mut buffers = vec![vec![0_u8; SHARD_BYTES]; 500];
    let (sender, answers) = mpsc::channel();
    let key_of = |at: usize| ShardKey::new(id(at as u64 % 10), at as u32 / 10 % 2);
    let request = |(at, buffer): (usize, &mut Vec<u8>)| {
        let sender = sender.clone();
        // SAFETY: the buffers stay until every answer has come.
        let dst = unsafe { RawBuf::new(buffer.as_mut_ptr(), buffer.len()) };
        LoadRequest::new(key_of(at), dst, move |result| sender.send(result).unwrap())
    };
    backend.submit(buffers.iter_mut().enumerate().map(request).collect());
    (0..500).for_each(|_| assert!(answers.recv().unwrap().is_ok()));
    for (at, buffer) in buffers.iter().enumerate() {
        assert_eq!(*buffer, bytes_of(key_of(at), SHARD_BYTES), "request {at}");
    }
}
