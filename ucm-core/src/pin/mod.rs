//! References: one counter per participant and slot, so a dead rank's are exactly known.

pub mod table;
