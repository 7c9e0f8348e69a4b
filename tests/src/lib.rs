//! The harness of the tests across processes: actors, the stage they act on, and the audit after.
//!
//! An [`actor`](actor::Actor) is a process of its own that does one thing per
//! line on its standard input and answers each with one line. A
//! [`Stage`](stage::Stage) is a segment in a directory of its own, the actors
//! on it, and a watchdog that ends a hang with a dump of the segment's state.
//! [`audit`] says what must be true when nobody is in the middle of something.
//!
//! Nothing here asserts how long anything takes. The watchdog is the only clock.

pub mod actor;
pub mod audit;
pub mod board;
pub mod chaos;
pub mod fuzz_targets;
pub mod keys;
pub mod process;
pub mod product;
pub mod rank_process;
pub mod rng;
pub mod setup;
pub mod stage;
