//! A worker channel of any content: attaching to it, and both ends of its ring.

use ucm_core::channel::layout::CHANNEL_BYTES;
use ucm_core::channel::{ChannelMemory, EngineEnd, Mode, WorkerEnd};

use crate::fuzz_targets::Input;
use crate::fuzz_targets::memory::{FuzzHost, Heap};

/// Where the ring's positions and the channel's header are: what a peer that
/// has lost its mind writes to first.
const LINES: [usize; 2] = [0, 0x10_0400];
const LINE_BYTES: usize = 512;

/// Positions, lengths and statuses that the other side made up.
///
/// # Panics
/// That is the finding.
pub fn ring(data: &[u8]) {
    let mut input = Input::new(data);
    let heap = Heap::new(CHANNEL_BYTES as usize);
    // SAFETY: lives as long as `heap`; atomics only, and the ends below.
    let memory = unsafe { ChannelMemory::new(heap.base(), heap.len() as u64) };
    let Ok(memory) = memory else { return };
    memory.initialise();
    let scribble = |input: &mut Input<'_>, most: usize| {
        let line = LINES[usize::from(input.byte()) % LINES.len()];
        input.patch(LINE_BYTES, most, |at, byte| heap.write(line + at, byte));
    };
    if input.byte() & 1 == 1 {
        scribble(&mut input, 8);
    }
    let Ok(parts) = memory.attach() else { return };
    let host = FuzzHost::default();
    // SAFETY: one engine and one worker, both here.
    let engine = unsafe { EngineEnd::attach(parts, host.clone(), Mode::SLEEPS, 10) };
    // SAFETY: as above.
    let worker = unsafe { WorkerEnd::attach(parts, host, Mode::SLEEPS, 10) };
    let (Ok(mut engine), Ok(mut worker)) = (engine, worker) else { return };
    let mut buffer = [0; 4096];
    for _ in 0..32 {
        if input.is_empty() {
            return;
        }
        let action = input.byte();
        let len = 1 + usize::from(input.byte()) * 13;
        match action & 7 {
            0 => scribble(&mut input, 3),
            1 => {
                let _written = worker.output.try_write(&buffer[..len]);
                worker.output.publish();
            }
            2 => _ = engine.output.try_read(&mut buffer[..len]),
            3 => {
                let _some = engine.output.read_some(&mut buffer[..len]);
                engine.output.release();
            }
            4 => _ = engine.output.try_read_frame(&mut buffer),
            5 => {
                let _room = (worker.output.room_bytes(), worker.output.wait_room(len, 0));
                let _readable = (engine.output.readable_bytes(), engine.output.stale_bytes());
            }
            6 => _ = engine.begin_epoch(),
            _ => {
                let _peeked = engine.output.try_peek(u32::from(action) << 4, &mut buffer[..len]);
                engine.output.skip(len as u32);
            }
        }
    }
}
