//! A single-producer, single-consumer ring: [`layout`] is what both ends share,
//! [`producer`] and [`consumer`] are the ends, one of each.

pub mod consumer;
pub mod layout;
pub mod producer;

pub use consumer::Consumer;
pub use layout::{Ring, Slot};
pub use producer::{Full, Producer};
