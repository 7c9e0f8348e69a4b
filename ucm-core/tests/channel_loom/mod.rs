//! Models of the worker channel: the ring's publication, its sleep and wake,
//! and the exchange of statuses with the input between them.

use std::sync::Arc;

use loom::sync::{Condvar, Mutex};
use loom::thread;

use ucm_core::channel::layout::{RingLines, StateHeader};
use ucm_core::channel::sleep::Barrier;
use ucm_core::channel::{
    ByteArea, ByteConsumer, ByteProducer, ByteRing, ControlBlock, EngineEnd, Mode, Parameters,
    Parts, Status, WorkerEnd,
};
use ucm_core::host::Waiter;
use ucm_core::sync::{AtomicU32, Cell, Ordering, fence};

use super::{FAR_NS, explore};

/// A futex without a timeout: a wake-up that is lost is a deadlock.
#[derive(Clone)]
struct Host(Arc<(Mutex<()>, Condvar)>);

impl Host {
    fn new() -> Self {
        Self(Arc::new((Mutex::new(()), Condvar::new())))
    }
}

impl Waiter for Host {
    fn now_ns(&self) -> u64 {
        1
    }
    fn wait(&self, word: &AtomicU32, expected: u32, _timeout_ns: u64) {
        let guard = self.0.0.lock().unwrap();
        // Relaxed: the mutex orders it with whoever wakes, as the kernel's lock does.
        if word.load(Ordering::Relaxed) == expected {
            drop(self.0.1.wait(guard).unwrap());
        }
    }
    fn wake_all(&self, _word: &AtomicU32) {
        let _guard = self.0.0.lock().unwrap();
        self.0.1.notify_all();
    }
    fn pause(&self, _ns: u64) {
        thread::yield_now();
    }
}

impl Barrier for Host {
    fn register(&self) -> bool {
        true
    }
    fn heavy_fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// What lies in shared memory, made where the model checker can see it. It is
/// leaked for the run of a model: both threads borrow from it.
struct Memory {
    header: StateHeader,
    control: ControlBlock,
    input_length_bytes: AtomicU32,
    input: Vec<Cell<u8>>,
    lines: RingLines,
    bytes: Vec<Cell<u8>>,
}

// SAFETY: the cells check for themselves who enters them when.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Memory {
    fn new(position: u32) -> Arc<Self> {
        let cells = |count| (0..count).map(|_| Cell::new(0)).collect();
        Arc::new(Self {
            header: StateHeader::new(),
            control: ControlBlock::new(),
            input_length_bytes: AtomicU32::new(0),
            input: cells(8),
            lines: RingLines::new(4, position),
            bytes: cells(4),
        })
    }

    fn parts(&self) -> Parts<'_> {
        Parts {
            header: &self.header,
            control: &self.control,
            input_length_bytes: &self.input_length_bytes,
            input: ByteArea::of_cells(&self.input),
            max_input_bytes: 4,
            output: ByteRing::new(&self.lines, ByteArea::of_cells(&self.bytes)),
        }
    }
}

fn producer(memory: &Memory, host: Host, peer: u32) -> ByteProducer<'_, Host> {
    // SAFETY: the only one of its model.
    unsafe { ByteProducer::new(memory.parts().output, host, Mode::LIGHT, peer, 0) }.unwrap()
}

fn consumer(memory: &Memory, host: Host, peer: u32) -> ByteConsumer<'_, Host> {
    // SAFETY: the only one of its model.
    unsafe { ByteConsumer::new(memory.parts().output, host, Mode::LIGHT, peer, 0) }.unwrap()
}

/// Both may sleep, and are fenced by the kernel; or each fences for itself.
const PEERS: [u32; 2] = [3, 2];

#[test]
fn a_byte_ring_publishes_bytes_before_their_index_and_reuses_them_after() {
    explore(3, || {
        // The second message wraps, and passes the end of the index's word.
        let memory = Memory::new(u32::MAX - 2);
        let host = Host::new();
        let (m, h) = (memory.clone(), host.clone());
        let sending = thread::spawn(move || {
            let mut producer = producer(&m, h, 1);
            for value in 1..=3_u8 {
                while producer.try_write(&[value; 2]).is_err() {
                    thread::yield_now();
                }
                producer.publish();
            }
        });
        let mut consumer = consumer(&memory, host, 1);
        for value in 1..=3_u8 {
            let mut out = [0; 2];
            while !consumer.try_read(&mut out).unwrap() {
                thread::yield_now();
            }
            assert_eq!(out, [value; 2]);
        }
        sending.join().unwrap();
    });
}

#[test]
fn a_reader_that_falls_asleep_is_woken_by_what_comes() {
    for peer in PEERS {
        explore(3, move || {
            let memory = Memory::new(0);
            let host = Host::new();
            let (m, h) = (memory.clone(), host.clone());
            let sending = thread::spawn(move || {
                let mut producer = producer(&m, h, peer);
                for value in 1..=2_u8 {
                    producer.try_write(&[value]).unwrap();
                    producer.publish();
                }
            });
            let mut consumer = consumer(&memory, host, peer);
            for value in 1..=2_u8 {
                assert!(consumer.wait_readable(1, FAR_NS).unwrap());
                let mut out = [0];
                assert!(consumer.try_read(&mut out).unwrap());
                assert_eq!(out, [value]);
            }
            sending.join().unwrap();
        });
    }
}

#[test]
fn a_writer_that_falls_asleep_before_a_full_ring_is_woken_by_room() {
    explore(3, || {
        let memory = Memory::new(0);
        let host = Host::new();
        let (m, h) = (memory.clone(), host.clone());
        let sending = thread::spawn(move || {
            let mut producer = producer(&m, h, 3);
            for value in 1..=2_u8 {
                producer.wait_room(4, FAR_NS).unwrap();
                producer.try_write(&[value; 4]).unwrap();
                producer.publish();
            }
        });
        let mut consumer = consumer(&memory, host, 3);
        for value in 1..=2_u8 {
            assert!(consumer.wait_readable(4, FAR_NS).unwrap());
            let mut out = [0; 4];
            assert!(consumer.try_read(&mut out).unwrap());
            consumer.release();
            assert_eq!(out, [value; 4]);
        }
        sending.join().unwrap();
    });
}

#[test]
fn a_status_carries_the_message_with_it_and_wakes_who_waits_for_it() {
    explore(3, || {
        let memory = Memory::new(0);
        let host = Host::new();
        let (m, h) = (memory.clone(), host.clone());
        let working = thread::spawn(move || {
            // SAFETY: the only one of its model.
            let worker = unsafe { WorkerEnd::attach(m.parts(), h, Mode::LIGHT, 0) };
            let mut worker = worker.unwrap();
            let mut seen = Status::Idle;
            for value in 1..=2_u8 {
                seen = worker.status.wait_while(seen, FAR_NS).unwrap();
                assert_eq!(seen, Status::ExecInfer);
                let mut message = [0; 4];
                assert_eq!(worker.input.read(&mut message), Ok(2));
                assert_eq!(message[..2], [value; 2]);
                assert_eq!(worker.input.parameters().unwrap().token_limit, value.into());
                worker.status.request_data().unwrap();
                seen = Status::ReqData;
            }
        });
        // SAFETY: the only one of its model.
        let engine = unsafe { EngineEnd::attach(memory.parts(), host, Mode::LIGHT, 0) };
        let mut engine = engine.unwrap();
        for value in 1..=2_u8 {
            let parameters = Parameters { token_limit: value.into(), ..Parameters::default() };
            engine.input.set_parameters(&parameters).unwrap();
            engine.input.execute(&[value; 2]).unwrap();
            let seen = engine.status.wait_while(Status::ExecInfer, FAR_NS).unwrap();
            assert_eq!(seen, Status::ReqData);
        }
        working.join().unwrap();
    });
}

#[test]
fn an_interrupt_and_an_end_at_the_same_time_leave_exactly_one_of_them() {
    explore(3, || {
        let memory = Memory::new(0);
        let host = Host::new();
        // SAFETY: the only one of its model.
        let engine = unsafe { EngineEnd::attach(memory.parts(), host.clone(), Mode::LIGHT, 0) };
        let mut engine = engine.unwrap();
        engine.input.execute(&[1]).unwrap();
        let m = memory.clone();
        let working = thread::spawn(move || {
            // SAFETY: the only one of its model.
            let worker = unsafe { WorkerEnd::attach(m.parts(), host, Mode::LIGHT, 0) }.unwrap();
            let finished = worker.status.finish().is_ok();
            if !finished {
                worker.status.interrupted().unwrap();
            }
            finished
        });
        let interrupted = engine.status.interrupt().is_ok();
        assert_ne!(working.join().unwrap(), interrupted);
        let end = if interrupted { Status::Idle } else { Status::Done };
        assert_eq!(engine.status.get(), Ok(end));
    });
}
