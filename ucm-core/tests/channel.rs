//! The worker channel by itself: statuses, input, ring, frames, and peers that lie.
#![cfg(not(ucm_loom))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod channel_common;

use channel_common::{FAR_NS, Heap, SmallRing};
use ucm_core::channel::frame::{HEADER_BYTES, MAX_PAYLOAD_BYTES};
use ucm_core::channel::layout::{CHANNEL_BYTES, MAX_INPUT_BYTES};
use ucm_core::channel::message::{TOKEN_LAST, encode_block, tokens};
use ucm_core::channel::*;
use ucm_core::key::BlockId;
use ucm_core::sync::Ordering;

#[test]
fn one_request_goes_through_all_its_statuses() {
    let heap = Heap::channel();
    let (mut engine, mut worker) = (heap.engine(), heap.worker());
    assert!(engine.status.is_attached());
    engine.input.load_weights(b"weights").unwrap();
    let mut buffer = vec![0; MAX_INPUT_BYTES];
    assert_eq!(worker.input.read(&mut buffer), Ok(7));
    worker.status.loaded().unwrap();

    let parameters = Parameters { token_limit: 3, lora_scale: 0.5, ..Parameters::default() };
    engine.input.set_parameters(&parameters).unwrap();
    engine.input.execute(b"prompt").unwrap();
    assert_eq!(worker.status.wait_while(Status::Idle, 0), Ok(Status::ExecInfer));
    assert_eq!(worker.input.parameters(), Ok(parameters));
    let length = worker.input.read(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"prompt");
    worker.status.stream().unwrap();
    let record = TokenRecord { id: 7, logprob: -0.25, flags: TOKEN_LAST, index: 0 };
    worker.output.send_frame(Kind::Tokens, 9, false, bytemuck::bytes_of(&record), 0).unwrap();
    worker.status.finish().unwrap();

    let frame = engine.output.try_read_frame(&mut buffer).unwrap().unwrap();
    assert_eq!((frame.kind, frame.tag, frame.more, frame.stale), (Kind::Tokens, 9, false, false));
    assert!(tokens(&buffer[..frame.payload_bytes]).unwrap().eq([record]));
    assert_eq!(engine.output.try_read_frame(&mut buffer), Ok(None));
    assert_eq!(engine.status.acknowledge(), Ok(Status::Done));
    engine.status.unload_weights().unwrap();
    worker.status.unloaded().unwrap();
    assert_eq!(engine.status.get(), Ok(Status::Idle));
}

#[test]
fn a_move_from_the_wrong_status_changes_nothing_and_names_what_it_found() {
    let heap = Heap::channel();
    let (mut engine, worker) = (heap.engine(), heap.worker());
    let not_from = |found, to| MoveError::NotFrom { found, to };
    assert_eq!(engine.status.interrupt(), Err(not_from(Status::Idle, Status::Interrupt)));
    assert_eq!(engine.status.acknowledge(), Err(not_from(Status::Idle, Status::Idle)));
    assert_eq!(worker.status.stream(), Err(not_from(Status::Idle, Status::Streaming)));
    assert_eq!(worker.status.fail(1), Err(not_from(Status::Idle, Status::Error)));
    engine.input.execute(b"").unwrap();
    assert_eq!(engine.input.execute(b""), Err(InputError::NotMine(Status::ExecInfer)));
    assert_eq!(engine.status.interrupt(), Ok(Status::ExecInfer));
    assert_eq!(worker.status.finish(), Err(not_from(Status::Interrupt, Status::Done)));
    worker.status.interrupted().unwrap();
    engine.input.execute(b"").unwrap();
    worker.status.request_data().unwrap();
    assert_eq!(
        engine.input.load_weights(b""),
        Err(MoveError::NotFrom { found: Status::ReqData, to: Status::LoadWeights }.into())
    );
    engine.input.execute(b"more").unwrap();
    worker.status.fail(28).unwrap();
    assert_eq!((engine.status.acknowledge(), engine.status.error_code()), (Ok(Status::Error), 28));
}

#[test]
fn a_control_block_of_a_newer_or_broken_engine_is_refused() {
    let heap = Heap::channel();
    let (mut engine, worker) = (heap.engine(), heap.worker());
    let bad = Parameters { temperature: f32::NAN, ..Parameters::default() };
    assert!(matches!(engine.input.set_parameters(&bad), Err(InputError::Control(_))));
    engine.input.execute(b"").unwrap();
    assert_eq!(worker.input.parameters(), Ok(Parameters::default()));
    let reserved = heap.word(0x40 + 1020);
    reserved.store(1, Ordering::Relaxed);
    assert_eq!(
        worker.input.parameters(),
        Err(InputError::Control(ControlError::Reserved { index: 237, found: 1 }))
    );
    reserved.store(0, Ordering::Relaxed);
    heap.word(0x40 + 40).store(2.0_f32.to_bits(), Ordering::Relaxed);
    assert_eq!(
        worker.input.parameters(),
        Err(InputError::Control(ControlError::Range { field: "top_p", found: 2.0 }))
    );
}

#[test]
#[cfg_attr(miri, ignore = "a million bytes, of which Miri would need minutes")]
fn the_input_holds_its_whole_length_and_not_a_byte_more() {
    let heap = Heap::channel();
    let (mut engine, mut worker) = (heap.engine(), heap.worker());
    let message: Vec<u8> = (0..MAX_INPUT_BYTES + 1).map(|i| i as u8).collect();
    assert!(matches!(engine.input.execute(&message), Err(InputError::TooLong { .. })));
    engine.input.execute(&message[1..]).unwrap();
    let mut buffer = vec![0; MAX_INPUT_BYTES];
    assert_eq!(worker.input.read(&mut buffer), Ok(MAX_INPUT_BYTES));
    assert_eq!(buffer, message[1..]);
    assert!(matches!(worker.input.read(&mut buffer[1..]), Err(InputError::BadLength { .. })));
    // The ring behind it has not been written to.
    assert_eq!(engine.output.readable_bytes(), Ok(0));
    assert_eq!(heap.word(0x10_0440).load(Ordering::Relaxed), 1 << 20);
}

#[test]
fn a_full_ring_says_so_and_loses_nothing() {
    for position in [0, 1, u32::MAX - 20, u32::MAX, 1 << 31] {
        let ring = SmallRing::new(64, position);
        let (mut producer, mut consumer) = ring.ends();
        let mut next = 0_u8;
        let mut expected = 0_u8;
        for round in 0..200_usize {
            let length = 1 + round * 7 % 23;
            let message: Vec<u8> = (0..length).map(|i| next.wrapping_add(i as u8)).collect();
            loop {
                match producer.try_write(&message) {
                    Ok(()) => break next = next.wrapping_add(length as u8),
                    Err(WriteError::Full) => {
                        producer.publish();
                        let mut out = [0; 5];
                        let count = consumer.read_some(&mut out).unwrap();
                        assert!(count > 0, "full and empty");
                        for byte in &out[..count] {
                            assert_eq!(*byte, expected);
                            expected = expected.wrapping_add(1);
                        }
                    }
                    Err(other) => panic!("{other}"),
                }
            }
        }
        assert_eq!(producer.try_write(&[0; 65]), Err(WriteError::TooLarge));
    }
}

#[test]
fn a_record_may_end_exactly_at_the_wrap_and_positions_pass_the_words_end() {
    let ring = SmallRing::new(64, u32::MAX - 31);
    let (mut producer, mut consumer) = ring.ends();
    let mut out = [0; 32];
    // The first ends at position 2^32, which is also the end of the bytes.
    for value in 1..=6 {
        producer.try_write(&[value; 32]).unwrap();
        producer.publish();
        assert!(consumer.try_read(&mut out).unwrap());
        assert_eq!(out, [value; 32]);
    }
    // All of it, across the wrap.
    producer.try_write(&[9; 8]).unwrap();
    producer.publish();
    assert!(consumer.try_read(&mut out[..8]).unwrap());
    let all: Vec<u8> = (0..64).collect();
    producer.try_write(&all).unwrap();
    assert_eq!(producer.try_write(&[0]), Err(WriteError::Full));
    producer.publish();
    let mut whole = [0; 64];
    assert!(consumer.try_read(&mut whole).unwrap());
    assert_eq!(whole[..], all);
}

#[test]
fn what_is_not_published_is_not_seen_and_a_batch_is_seen_at_once() {
    let ring = SmallRing::new(64, 0);
    let (mut producer, mut consumer) = ring.ends();
    for value in 0..4 {
        producer.try_write(&[value; 8]).unwrap();
        assert_eq!(consumer.readable_bytes(), Ok(0));
    }
    assert_eq!(producer.unpublished_bytes(), 32);
    producer.publish();
    assert_eq!(consumer.readable_bytes(), Ok(32));
}

#[test]
#[cfg_attr(miri, ignore = "a million bytes, of which Miri would need minutes")]
fn a_slow_reader_holds_the_worker_back_until_its_deadline_and_not_longer() {
    let heap = Heap::channel();
    let (mut engine, mut worker) = (heap.engine(), heap.worker());
    let payload = vec![5; MAX_PAYLOAD_BYTES];
    for tag in 0..4 {
        worker.output.send_frame(Kind::Reply, tag, true, &payload, 0).unwrap();
    }
    let full = worker.output.send_frame(Kind::Reply, 4, false, &payload, 0);
    assert_eq!(full, Err(WriteError::Deadline));
    std::thread::scope(|scope| {
        scope.spawn(|| worker.output.send_frame(Kind::Reply, 4, false, &payload, FAR_NS).unwrap());
        let mut buffer = vec![0; MAX_PAYLOAD_BYTES];
        for tag in 0..5 {
            assert!(engine.output.wait_readable(HEADER_BYTES, FAR_NS).unwrap());
            let frame = engine.output.try_read_frame(&mut buffer).unwrap().unwrap();
            assert_eq!((frame.tag, frame.more), (tag, tag < 4));
            assert_eq!(buffer, payload);
        }
    });
}

#[test]
fn an_engine_that_sleeps_hears_of_every_message_and_so_does_a_worker() {
    let rounds = if cfg!(miri) { 10 } else { 5_000 };
    let heap = Heap::channel();
    let (mut engine, mut worker) = (heap.engine(), heap.worker());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut buffer = [0; 64];
            let mut seen = Status::Idle;
            for round in 0..rounds {
                seen = worker.status.wait_while(seen, FAR_NS).unwrap();
                assert_eq!(seen, Status::ExecInfer);
                let length = worker.input.read(&mut buffer).unwrap();
                assert_eq!(buffer[..length], u64::to_le_bytes(round));
                worker.status.request_data().unwrap();
                seen = Status::ReqData;
                worker.output.try_write(&buffer[..length]).unwrap();
                worker.output.publish();
            }
        });
        for round in 0..rounds {
            engine.input.execute(&u64::to_le_bytes(round)).unwrap();
            let mut answer = [0; 8];
            assert!(engine.output.wait_readable(8, FAR_NS).unwrap());
            assert!(engine.output.try_read(&mut answer).unwrap());
            assert_eq!(answer, u64::to_le_bytes(round));
        }
    });
}

#[test]
fn the_stream_of_a_dead_worker_is_read_to_its_end_and_told_from_the_next_ones() {
    let heap = Heap::channel();
    let mut engine = heap.engine();
    let mut worker = heap.worker();
    engine.input.execute(b"").unwrap();
    worker.status.stream().unwrap();
    for tag in 0..3 {
        worker.output.send_frame(Kind::Tokens, tag, false, &[0; 16], 0).unwrap();
    }
    // It dies with half a frame published (one that does not keep to frames)
    // and some more not published.
    worker.output.try_write(&[1; 10]).unwrap();
    worker.output.publish();
    worker.output.try_write(&[1; 100]).unwrap();
    drop(worker);
    assert_eq!(engine.begin_epoch(), Ok(2));
    assert_eq!(engine.status.get(), Ok(Status::Idle));
    assert!(!engine.status.is_attached());

    let mut worker = heap.worker();
    assert_eq!(worker.status.epoch(), 2);
    engine.input.execute(b"").unwrap();
    worker.output.send_frame(Kind::Tokens, 77, false, &[], 0).unwrap();
    let mut buffer = [0; 64];
    for tag in 0..3 {
        let frame = engine.output.try_read_frame(&mut buffer).unwrap().unwrap();
        assert!(frame.stale && frame.tag == tag);
    }
    let cut = engine.output.try_read_frame(&mut buffer);
    assert_eq!(cut, Err(FrameError::CutOff { bytes: 10 }));
    let frame = engine.output.try_read_frame(&mut buffer).unwrap().unwrap();
    assert!(!frame.stale && frame.tag == 77);
    assert_eq!(engine.output.stale_bytes(), 0);
}

#[test]
fn submissions_and_completions_survive_their_bytes_and_wrong_ones_are_refused() {
    let blocks = [BlockId::from_words(1, 2), BlockId::from_words(3, u64::MAX)];
    let mut payload = Submission::encode_head(SubmissionKind::Load, 2, 40).to_vec();
    blocks.iter().for_each(|block| payload.extend(encode_block(block)));
    let read = Submission::decode(&payload).unwrap();
    assert_eq!((read.kind, read.at_shard), (SubmissionKind::Load, 40));
    assert!(read.blocks().eq(blocks));
    for length in 0..payload.len() {
        assert!(Submission::decode(&payload[..length]).is_err(), "{length}");
    }
    payload[0] = 99;
    assert!(Submission::decode(&payload).is_err());
    payload[..4].copy_from_slice(&1_u32.to_le_bytes());
    payload[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(Submission::decode(&payload).is_err());

    let done = Completion { hits: 3, failed_shards: 1, ..Completion::default() };
    let bytes = [bytemuck::bytes_of(&done), b"why"].concat();
    assert_eq!(Completion::decode(&bytes), Ok((done, &b"why"[..])));
    assert!(Completion::decode(&bytes[..40]).is_err());
    assert!(tokens(&[0; 17]).is_err());
    let token = TokenRecord { flags: 1 << 30, ..TokenRecord::default() };
    assert!(tokens(bytemuck::bytes_of(&token)).is_err());
}

const TAIL: usize = 0x10_0440 + 192;
const HEAD: usize = 0x10_0440 + 64;

#[test]
fn wild_indices_of_the_other_side_are_errors_on_both() {
    for wild in [1 << 20 | 1, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
        let heap = Heap::channel();
        let (mut engine, mut worker) = (heap.engine(), heap.worker());
        let begin = heap.word(TAIL).load(Ordering::Relaxed);
        heap.word(TAIL).store(begin.wrapping_add(wild), Ordering::Relaxed);
        assert!(engine.output.readable_bytes().is_err(), "{wild:#x}");
        assert!(engine.output.wait_readable(8, 0).is_err());
        assert!(engine.output.try_read(&mut [0; 8]).is_err());
        assert!(engine.begin_epoch().is_err());
        heap.word(TAIL).store(begin, Ordering::Relaxed);
        // A head that is ahead of the tail, and one that runs backwards.
        heap.word(HEAD).store(begin.wrapping_add(wild), Ordering::Relaxed);
        assert!(worker.output.room_bytes().is_err(), "{wild:#x}");
        assert!(matches!(worker.output.wait_room(1 << 20, 0), Ok(()) | Err(WriteError::Wild(_))));
        // As if the engine had begun a new epoch.
        heap.word(40).store(0, Ordering::Relaxed);
        // SAFETY: the other worker is not used any more.
        let again = unsafe { WorkerEnd::attach(heap.parts(), heap.host.clone(), Mode::SLEEPS, 0) };
        // One that gave a byte back twice looks like one that has not read it.
        assert_eq!(again.is_err(), wild != u32::MAX);
    }
}

#[test]
fn what_is_no_channel_is_refused_with_a_reason() {
    let heap = Heap::of(CHANNEL_BYTES as usize);
    assert!(matches!(heap.memory().attach(), Err(ChannelError::NotAChannel { found: 0 })));
    #[repr(align(128))]
    struct Line;
    // SAFETY: aligned, and no byte of it is claimed.
    let short = unsafe { ChannelMemory::new(std::ptr::NonNull::<Line>::dangling().cast(), 0) };
    assert!(matches!(short, Err(ChannelError::Length { .. })));
    heap.memory().initialise();
    assert!(heap.memory().attach().is_ok());
    for (offset, value) in [(0, 9), (16, 0), (24, 2), (28, 64), (32, 1), (0x10_0440, 64)] {
        let word = heap.word(offset);
        let before = word.swap(value, Ordering::Relaxed);
        let error = heap.memory().attach().map(drop).unwrap_err();
        assert!(!error.to_string().is_empty(), "{offset:#x}");
        word.store(before, Ordering::Relaxed);
    }
    assert!(heap.memory().attach().is_ok());
}

/// A small generator of numbers, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as u32
    }
}

#[test]
fn batches_of_all_lengths_arrive_byte_for_byte_however_they_are_read() {
    // Short pieces, pieces that are put aside, long ones; read one way and the
    // other, across the ring's end and the end of the positions' word.
    let rounds: u32 = if cfg!(miri) { 300 } else { 60_000 };
    let mut numbers = Numbers(11);
    let ring = SmallRing::new(1 << 13, u32::MAX - 9_999);
    let (mut producer, mut consumer) = ring.ends();
    let byte = |at: u64| (at ^ (at >> 8) ^ (at >> 16)) as u8;
    let (mut written, mut read) = (0_u64, 0_u64);
    let mut buffer = [0; 700];
    for _ in 0..rounds {
        let length = match numbers.next() % 4 {
            0 => numbers.next() % 32,
            1 => 64,
            2 => numbers.next() % 512,
            _ => numbers.next() % 700,
        } as usize;
        let piece = &mut buffer[..length];
        match numbers.next() % 8 {
            0..4 => {
                piece.iter_mut().zip(written..).for_each(|(place, at)| *place = byte(at));
                match producer.try_write(piece) {
                    Ok(()) => written += length as u64,
                    Err(error) => assert_eq!(error, WriteError::Full),
                }
            }
            4 => producer.publish(),
            5 => {
                if consumer.try_peek(7, piece).unwrap() {
                    assert!(piece.iter().zip(read + 7..).all(|(found, at)| *found == byte(at)));
                }
            }
            6 => {
                let count = consumer.read_some(piece).unwrap();
                assert!(piece[..count].iter().zip(read..).all(|(found, at)| *found == byte(at)));
                read += count as u64;
            }
            _ => {
                if consumer.try_read(piece).unwrap() {
                    assert!(piece.iter().zip(read..).all(|(found, at)| *found == byte(at)));
                    read += length as u64;
                }
            }
        }
    }
    assert!(read > u64::from(rounds) * 10, "{read}");
}

#[test]
fn a_hostile_peer_is_answered_with_errors_whatever_it_writes() {
    // Words that a peer may reach, each with the numbers that hurt most.
    const WORDS: [usize; 9] = [0, 4, 40, 44, 48, 52, 0x440, HEAD, TAIL];
    let rounds = if cfg!(miri) { 5 } else { 3_000 };
    let mut numbers = Numbers(5);
    let mut buffer = vec![0; MAX_PAYLOAD_BYTES];
    for _ in 0..rounds {
        let heap = Heap::channel();
        let (mut engine, mut worker) = (heap.engine(), heap.worker());
        for _ in 0..60 {
            let near = numbers.next() % 64;
            let value = match numbers.next() % 4 {
                0 => near,
                1 => numbers.next(),
                2 => (1_u32 << (numbers.next() % 32)).wrapping_add(near).wrapping_sub(32),
                _ => heap.word(TAIL).load(Ordering::Relaxed).wrapping_add(near * 4),
            };
            if numbers.next().is_multiple_of(3) {
                // Into the bytes of the ring, where the next frame begins.
                let head = heap.word(HEAD).load(Ordering::Relaxed) & 0xf_ffff;
                let at = (head + numbers.next() % 24) & 0xf_fffc;
                heap.word(0x10_0680 + at as usize).store(value, Ordering::Relaxed);
            } else {
                let word = WORDS[numbers.next() as usize % WORDS.len()];
                heap.word(word).store(value, Ordering::Relaxed);
            }
            // None of these may panic, hang, or leave the memory (Miri would
            // say so); what they return is theirs to choose.
            match numbers.next() % 9 {
                0 => drop(engine.output.try_read_frame(&mut buffer)),
                1 => drop(engine.input.execute(&buffer[..near as usize])),
                2 => drop(worker.input.read(&mut buffer)),
                3 => drop(worker.output.send_frame(Kind::Reply, 1, false, &[7; 40], 0)),
                4 => drop(engine.status.interrupt()),
                5 => drop(worker.status.request_data()),
                6 => drop(engine.begin_epoch()),
                7 => drop(engine.output.wait_readable(16, 0)),
                _ => drop(worker.status.wait_while(Status::Idle, 0)),
            }
            let _ = (engine.output.stale_bytes(), worker.input.parameters());
        }
    }
}
