//! The control plane as memory: [`geometry`] lays it out, [`header`] identifies
//! it, [`attach`] makes and checks it, [`counters`] counts.

pub mod attach;
pub mod counters;
pub mod geometry;
pub mod header;
pub mod health;
