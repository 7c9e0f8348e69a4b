//! What every backend must do, asked of each of them through the trait alone.
//!
//! A new backend joins with one line at the end: a function that opens it in a
//! directory, where every opening of the same directory shares its blocks.
#![allow(clippy::unwrap_used)]

mod calls;
mod limits;
mod rules;

use std::path::Path;

use ucm_loader::backend::file::{FileBackend, FileOptions, IoEngine};
use ucm_loader::backend::memory::{MemoryBackend, MemoryOptions};
use ucm_loader::backend::threaded::Threads;
use ucm_loader::backend::{Backend, OpenError, StoreGeometry};

/// Not a multiple of a page, so that tails are in every read.
pub const SHARD_BYTES: usize = 9000;
/// Shards of a block.
pub const SHARDS: u32 = 3;
/// What every store here is made for.
pub const GEOMETRY: StoreGeometry =
    StoreGeometry { shard_bytes: SHARD_BYTES as u64, shards_per_block: SHARDS, content_tag: 5 };

/// Opens a store in a directory, with a queue so deep.
pub type Open = fn(&Path, usize) -> Box<dyn Backend>;

fn threads(queue_depth: usize) -> Threads {
    Threads { load_workers: 2, store_workers: 2, queue_depth }
}

fn memory(dir: &Path, queue_depth: usize) -> Box<dyn Backend> {
    let options = MemoryOptions {
        shm_dir: dir.to_owned(),
        name: "conformance".to_owned(),
        geometry: GEOMETRY,
        capacity_blocks: 256,
        verify: true,
    };
    Box::new(MemoryBackend::open(&options, threads(queue_depth)).unwrap())
}

fn posix_with(
    dir: &Path,
    queue_depth: usize,
    engine: IoEngine,
    direct_io: bool,
) -> Box<dyn Backend> {
    let options = FileOptions { engine, direct_io, ..FileOptions::new(dir, GEOMETRY) };
    match FileBackend::open(&options, threads(queue_depth)) {
        Err(OpenError::NoUring { errno }) => {
            println!("SKIPPED: no io_uring here (errno {errno}); with threads instead");
            posix_with(dir, queue_depth, IoEngine::Threads, direct_io)
        }
        opened => Box::new(opened.unwrap()),
    }
}

fn posix_threads(dir: &Path, queue_depth: usize) -> Box<dyn Backend> {
    posix_with(dir, queue_depth, IoEngine::Threads, false)
}

fn posix_threads_direct(dir: &Path, queue_depth: usize) -> Box<dyn Backend> {
    posix_with(dir, queue_depth, IoEngine::Threads, true)
}

fn posix_uring(dir: &Path, queue_depth: usize) -> Box<dyn Backend> {
    posix_with(dir, queue_depth, IoEngine::Uring, false)
}

fn posix_uring_direct(dir: &Path, queue_depth: usize) -> Box<dyn Backend> {
    posix_with(dir, queue_depth, IoEngine::Uring, true)
}

/// One test a rule, so that a failure says which backend breaks which.
macro_rules! conforms {
    ($backend:ident: $($module:ident::{$($rule:ident),+ $(,)?}),+ $(,)?) => {
        mod $backend {
            $($(
                #[test]
                fn $rule() {
                    crate::$module::$rule(crate::$backend);
                }
            )+)+
        }
    };
}

macro_rules! every_rule_for {
    ($($backend:ident),+ $(,)?) => {
        mod rule {
            $(conforms! { $backend:
                rules::{
                    what_one_opening_put_another_reads_byte_for_byte,
                    a_block_is_absent_until_its_last_shard_is_put,
                    existence_is_answered_in_the_order_of_the_question,
                    the_longest_prefix_ends_at_the_first_gap,
                    a_shard_may_be_shorter_or_empty_and_says_so,
                    bytes_that_do_not_match_their_checksum_are_never_a_success,
                    a_discarded_block_can_be_put_anew,
                    discarding_a_complete_block_does_nothing,
                    two_openings_may_put_the_same_block_at_once,
                    a_load_of_a_buffer_at_any_address_is_right,
                },
                limits::{
                    what_is_not_there_is_not_found,
                    a_shard_that_no_block_has_is_refused,
                    what_does_not_fit_is_refused_with_both_sizes,
                    a_shard_is_put_once,
                    every_request_of_a_large_batch_is_answered_once,
                    what_the_queue_cannot_take_is_refused_on_the_spot,
                    a_flush_returns_when_everything_was_answered,
                    after_shutdown_every_request_is_refused,
                },
            })+
        }
    };
}

every_rule_for! { memory, posix_threads, posix_threads_direct, posix_uring, posix_uring_direct }
