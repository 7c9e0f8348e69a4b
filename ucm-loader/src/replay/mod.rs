//! Traffic: recorded and made up, and a model of what the cache should make of it.
//!
//! [`trace`] reads recorded requests, [`synthetic`] makes some up; both give
//! [`TraceRequest`](trace::TraceRequest)s. [`model`] is the cache's policy in
//! one process without concurrency, for comparison.

pub mod model;
pub mod synthetic;
pub mod trace;
