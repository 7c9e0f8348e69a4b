//! The helper that writes into slots for others, as a device's DMA would: also after their death.
//!
//! It keeps the rule that IO keeps: what was asked for is written before its
//! deadline, well within a quarantine, or not at all. It looks at the clock
//! after each write too. If it was not scheduled in time, that is counted,
//! and no test then concludes anything from bytes.

use std::time::Duration;

use ucm_core::sync::Ordering;
use ucm_posix::{Segment, monotonic_ns};

use crate::actor::rank::{slot_words, write_words};
use crate::board::{Board, Tally, Transfer, stage};
use crate::keys;

/// Performs transfers until the board says stop and none is left.
pub fn serve(segment: &Segment, board: &Board) {
    let quarantine_ns = segment.plane().io_quarantine_ns();
    loop {
        let stopping = board.transfers_are_over();
        let mut pending = false;
        for transfer in board.transfers() {
            if transfer.stage.load(Ordering::SeqCst) == stage::SUBMITTED {
                pending = true;
                if monotonic_ns() >= transfer.due_ns.load(Ordering::SeqCst) {
                    perform(segment, board, transfer, quarantine_ns);
                }
            }
        }
        if stopping && !pending {
            return;
        }
        std::thread::sleep(Duration::from_micros(300));
    }
}

fn perform(segment: &Segment, board: &Board, transfer: &Transfer, quarantine_ns: u64) {
    let submitted_ns = transfer.submitted_ns.load(Ordering::SeqCst);
    let id = transfer.id.load(Ordering::SeqCst);
    let words = slot_words(segment, transfer.slot.load(Ordering::SeqCst));
    let late = monotonic_ns() > submitted_ns + quarantine_ns / 2;
    let (Some(words), false) = (words, late) else {
        board.count(Tally::TransfersRefused);
        transfer.stage.store(stage::REFUSED, Ordering::SeqCst);
        return;
    };
    write_words(words, id, 0..keys::payload_words(id));
    if monotonic_ns() > submitted_ns + quarantine_ns {
        board.count(Tally::TransfersOverran);
    }
    board.count(Tally::Transfers);
    transfer.stage.store(stage::DONE, Ordering::SeqCst);
}
