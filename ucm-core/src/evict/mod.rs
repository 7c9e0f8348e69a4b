//! Which slot gives way: CLOCK with second chance, and a reserve for prefetch.

pub mod clock;
