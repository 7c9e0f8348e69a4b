//! A rank's share: how many slots it may pin, how many loads it may own, how far it may look ahead.
//!
//! The pins bound keeps ranks from starving each other: if every rank stays
//! within `slots / ranks`, whoever is below its share finds a slot. The claims
//! bound keeps the first rank to arrive from owning everything: it claims only
//! a few loads ahead of those in flight, and the others find the rest.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::doorbell::Doorbell;

/// What is left of both shares.
#[derive(Debug)]
pub(crate) struct Budget {
    pins: AtomicU32,
    claims: AtomicU32,
    /// Shards dispatched that are not READY yet.
    ahead: AtomicU32,
    max_pins: u32,
    max_claims: u32,
    max_ahead: u32,
    freed: Doorbell,
}

impl Budget {
    pub(crate) fn new(max_pins: u32, max_claims: u32, max_ahead: u32) -> Self {
        Self {
            pins: AtomicU32::new(0),
            claims: AtomicU32::new(0),
            ahead: AtomicU32::new(0),
            max_pins: max_pins.max(1),
            max_claims: max_claims.max(1),
            max_ahead: max_ahead.max(1),
            freed: Doorbell::default(),
        }
    }

    pub(crate) fn max_pins(&self) -> u32 {
        self.max_pins
    }

    /// Whether one more shard may be asked for: it may turn out to be a claim.
    pub(crate) fn has_room(&self) -> bool {
        self.pins.load(Ordering::Acquire) < self.max_pins
            && self.claims.load(Ordering::Acquire) < self.max_claims
            && self.ahead.load(Ordering::Acquire) < self.max_ahead
    }

    /// Waits for room, at most `timeout_ns`. May return early.
    pub(crate) fn wait_for_room(&self, timeout_ns: u64) {
        let heard = self.freed.listen();
        if !self.has_room() {
            self.freed.sleep(heard, timeout_ns);
        }
    }

    pub(crate) fn pin(&self) {
        self.pins.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn unpin(&self) {
        self.pins.fetch_sub(1, Ordering::AcqRel);
        self.freed.ring();
    }

    pub(crate) fn claim(&self) {
        self.claims.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn claim_done(&self) {
        self.claims.fetch_sub(1, Ordering::AcqRel);
        self.freed.ring();
    }

    /// A shard that is not READY yet goes to the transfer stage.
    pub(crate) fn look_ahead(&self) {
        self.ahead.fetch_add(1, Ordering::AcqRel);
    }

    /// It is READY, or lost.
    pub(crate) fn caught_up(&self) {
        self.ahead.fetch_sub(1, Ordering::AcqRel);
        self.freed.ring();
    }

    /// Wakes whoever waits for room, to look at something else.
    pub(crate) fn nudge(&self) {
        self.freed.ring();
    }
}
