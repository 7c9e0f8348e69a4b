//! The contract between the pipelines and whatever stores the shards.
//!
//! Every operation on shards is asynchronous: a request carries its buffer and
//! its completion, and [`LoadRequest::finish`] consumes both, so nobody can
//! touch the buffer after its owner has been told that it is his again. A
//! request that is dropped unfinished completes with
//! [`BackendError::Abandoned`]; there is no way to forget one.

use std::any::Any;
use std::slice;
use std::time::Instant;

use ucm_core::key::{BlockId, ShardKey};

pub use super::error::{BackendError, OpenError, StoreGeometry};

/// Memory that a load may write to.
#[derive(Debug)]
pub struct RawBuf {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: the constructor's contract makes the range this value's alone,
// whichever thread holds it.
unsafe impl Send for RawBuf {}

impl RawBuf {
    /// `len` bytes at `ptr`.
    ///
    /// # Safety
    /// From now until the request that carries it has called its completion,
    /// the range must be mapped and initialised, and nobody else may read or
    /// write it.
    pub unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len }
    }
}

/// Memory that a store reads from.
#[derive(Debug)]
pub struct RawBufConst {
    ptr: *const u8,
    len: usize,
}

// SAFETY: the constructor's contract keeps the range readable and unwritten
// whichever thread holds it.
unsafe impl Send for RawBufConst {}

impl RawBufConst {
    /// `len` bytes at `ptr`.
    ///
    /// # Safety
    /// From now until the request that carries it has called its completion,
    /// the range must be mapped and initialised, and nobody may write it.
    pub unsafe fn new(ptr: *const u8, len: usize) -> Self {
        Self { ptr, len }
    }
}

/// Memory that most loads will go to, and what keeps it mapped.
pub struct SharedMemory {
    pub(super) start: *mut u8,
    pub(super) len_bytes: usize,
    /// Dropped when the backend has no more use for the range.
    pub(super) _keeper: Box<dyn Any + Send>,
}

// SAFETY: an address range; whoever holds it only tells the kernel of it.
unsafe impl Send for SharedMemory {}

impl SharedMemory {
    /// `len_bytes` at `start`.
    ///
    /// # Safety
    /// The range must stay mapped, writable, as long as `keeper` lives.
    pub unsafe fn new(start: *mut u8, len_bytes: usize, keeper: Box<dyn Any + Send>) -> Self {
        Self { start, len_bytes, _keeper: keeper }
    }
}

/// What is called, exactly once, when a request has ended.
type Notify<T> = Box<dyn FnOnce(Result<T, BackendError>) + Send>;

/// Calls its function with [`BackendError::Abandoned`] if nobody else did.
struct Completion<T>(Option<Notify<T>>);

impl<T> Completion<T> {
    fn call(mut self, result: Result<T, BackendError>) {
        if let Some(notify) = self.0.take() {
            notify(result);
        }
    }
}

impl<T> Drop for Completion<T> {
    fn drop(&mut self) {
        if let Some(notify) = self.0.take() {
            notify(Err(BackendError::Abandoned));
        }
    }
}

/// What a load brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoadedShard {
    /// Bytes written to the front of the buffer.
    pub len_bytes: u64,
    /// The checksum that was stored with them, if one was.
    pub checksum: Option<u64>,
}

/// One shard to read.
#[must_use = "a request that is dropped completes as abandoned"]
pub struct LoadRequest {
    key: ShardKey,
    dst: RawBuf,
    done: Completion<LoadedShard>,
}

impl LoadRequest {
    /// Read `key` into `dst`, then call `done` (on a thread of the backend's).
    pub fn new(
        key: ShardKey,
        dst: RawBuf,
        done: impl FnOnce(Result<LoadedShard, BackendError>) + Send + 'static,
    ) -> Self {
        Self { key, dst, done: Completion(Some(Box::new(done))) }
    }

    /// Which shard.
    pub fn key(&self) -> ShardKey {
        self.key
    }

    /// Where it goes, for the kernel to write to.
    pub(super) fn target(&self) -> (*mut u8, usize) {
        (self.dst.ptr, self.dst.len)
    }

    /// Where it goes.
    pub fn buffer(&mut self) -> &mut [u8] {
        // SAFETY: RawBuf::new's contract holds until the completion is called,
        // which consumes `self`; the borrow cannot outlive that.
        unsafe { slice::from_raw_parts_mut(self.dst.ptr, self.dst.len) }
    }

    /// Gives the buffer back and says how it went.
    pub fn finish(self, result: Result<LoadedShard, BackendError>) {
        self.done.call(result);
    }

    /// The same request with `seen` called before its completion. It may look
    /// at the buffer, change it, and change the result; for middlewares.
    pub fn intercept(
        self,
        seen: impl FnOnce(
            &mut [u8],
            Result<LoadedShard, BackendError>,
        ) -> Result<LoadedShard, BackendError>
        + Send
        + 'static,
    ) -> Self {
        let Self { key, dst, done } = self;
        let mut inner = RawBuf { ptr: dst.ptr, len: dst.len };
        let outer = move |result| {
            // SAFETY: the new request owns the range until it calls this, and
            // `done`, which ends RawBuf::new's contract, comes after.
            let buffer = unsafe { slice::from_raw_parts_mut(inner.as_mut_ptr(), inner.len) };
            let result = seen(buffer, result);
            done.call(result);
        };
        Self::new(key, dst, outer)
    }
}

impl RawBuf {
    // Takes the whole value, so that a closure captures it (which is Send)
    // and not its pointer (which is not).
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr
    }
}

/// One shard to write.
#[must_use = "a request that is dropped completes as abandoned"]
pub struct StoreRequest {
    key: ShardKey,
    src: RawBufConst,
    checksum: Option<u64>,
    done: Completion<()>,
}

impl StoreRequest {
    /// Write `src` as `key`, then call `done`. `checksum` is the xxh3-64 of
    /// the bytes and is stored beside them; without one, loads of this shard
    /// are not verified.
    pub fn new(
        key: ShardKey,
        src: RawBufConst,
        checksum: Option<u64>,
        done: impl FnOnce(Result<(), BackendError>) + Send + 'static,
    ) -> Self {
        Self { key, src, checksum, done: Completion(Some(Box::new(done))) }
    }

    /// Which shard.
    pub fn key(&self) -> ShardKey {
        self.key
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: RawBufConst::new's contract holds until the completion is
        // called, which consumes `self`.
        unsafe { slice::from_raw_parts(self.src.ptr, self.src.len) }
    }

    /// The xxh3-64 of the bytes, if the caller made one.
    pub fn checksum(&self) -> Option<u64> {
        self.checksum
    }

    /// The same request with `seen` shown its outcome before its completion;
    /// for middlewares.
    pub fn watch(self, seen: impl FnOnce(&Result<(), BackendError>) + Send + 'static) -> Self {
        let Self { key, src, checksum, done } = self;
        Self::new(key, src, checksum, move |result| {
            seen(&result);
            done.call(result);
        })
    }

    /// Gives the bytes back and says how it went.
    pub fn finish(self, result: Result<(), BackendError>) {
        self.done.call(result);
    }
}

/// A place that keeps blocks.
///
/// A block becomes visible all at once, when the last of its shards has been
/// put. Blocks are content-addressed: two writers of one id write the same
/// bytes, and either's copy will do.
pub trait Backend: Send + Sync {
    /// Begins a batch of loads and returns; each request is completed on its
    /// own, in any order. What cannot be taken is completed on the spot, with
    /// [`BackendError::QueueFull`] or [`BackendError::ShuttingDown`].
    fn submit(&self, batch: Vec<LoadRequest>);

    /// Says once where most loads will go, so that a backend can have the
    /// memory prepared. A hint: loads to other places work as well.
    fn adopt_memory(&self, _memory: SharedMemory) {}

    /// Begins one store and returns. A process puts each shard of a block
    /// once; where the backend assembles blocks of several processes (posix
    /// does), some may come from others and at other times. The completion of
    /// the last one comes when the block is visible; those of the others say
    /// only that their bytes have been taken, and that holds as long as a
    /// process that put some of the block's shards lives.
    fn put(&self, request: StoreRequest);

    /// Forgets the shards of `block` that have been put so far, for a writer
    /// that cannot finish it. Does nothing to a complete block.
    fn discard(&self, block: BlockId);

    /// For each block, whether all its shards are there.
    fn exists(&self, blocks: &[BlockId]) -> Result<Vec<bool>, BackendError>;

    /// How many blocks from the front of `blocks` are there without a gap.
    fn longest_prefix(&self, blocks: &[BlockId]) -> Result<usize, BackendError> {
        let mut found = 0;
        // Asked in pieces: most chains break early, some are thousands long.
        for piece in blocks.chunks(32) {
            let here = self.exists(piece)?;
            let run = here.iter().take_while(|present| **present).count();
            found += run;
            if run < piece.len() {
                break;
            }
        }
        Ok(found)
    }

    /// Waits until everything that was submitted has been completed.
    /// [`BackendError::TimedOut`] when `deadline` comes first.
    fn flush(&self, deadline: Instant) -> Result<(), BackendError>;

    /// Refuses what is still queued, lets what is running end, and stops the
    /// threads. [`BackendError::TimedOut`] when one is still running at
    /// `deadline`; it keeps its request's buffer until it is done.
    fn shutdown(&self, deadline: Instant) -> Result<(), BackendError>;
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn request(
        buffer: &mut Vec<u8>,
    ) -> (LoadRequest, mpsc::Receiver<Result<LoadedShard, BackendError>>) {
        let (sender, receiver) = mpsc::channel();
        // SAFETY: the tests keep `buffer` alive and untouched until the answer.
        let dst = unsafe { RawBuf::new(buffer.as_mut_ptr(), buffer.len()) };
        let key = ShardKey::new(BlockId([7; 16]), 3);
        let request = LoadRequest::new(key, dst, move |result| {
            let _ = sender.send(result);
        });
        (request, receiver)
    }

    #[test]
    fn a_dropped_request_completes_as_abandoned_exactly_once() {
        let mut buffer = vec![0; 8];
        let (request, answers) = request(&mut buffer);
        drop(request);
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(BackendError::Abandoned)]);
    }

    #[test]
    fn a_finished_request_completes_exactly_once() {
        let mut buffer = vec![0; 8];
        let (request, answers) = request(&mut buffer);
        request.finish(Err(BackendError::TimedOut));
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(BackendError::TimedOut)]);
    }

    #[test]
    fn an_interceptor_sees_the_buffer_and_may_change_the_answer() {
        let mut buffer = vec![1; 8];
        let (request, answers) = request(&mut buffer);
        let mut request = request.intercept(|bytes, result| {
            assert_eq!(bytes, [9; 8]);
            bytes[0] = 5;
            result.map(|loaded| LoadedShard { checksum: Some(77), ..loaded })
        });
        request.buffer().fill(9);
        request.finish(Ok(LoadedShard { len_bytes: 8, checksum: None }));
        let expected = Ok(LoadedShard { len_bytes: 8, checksum: Some(77) });
        assert_eq!(answers.recv(), Ok(expected));
        assert_eq!(buffer[..2], [5, 9]);
    }

    #[test]
    fn dropping_an_intercepted_request_abandons_the_original() {
        let mut buffer = vec![0; 8];
        let (request, answers) = request(&mut buffer);
        drop(request.intercept(|_, result| result));
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(BackendError::Abandoned)]);
    }
}
