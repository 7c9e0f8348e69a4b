//! Key to slot: buckets of one cache line, two choices a key, no locks.

pub mod bucket;
pub mod probe;
