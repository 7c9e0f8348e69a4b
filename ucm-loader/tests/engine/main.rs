//! The engine as a library, as its users have it: whole engines over real segments and backends.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod devices;
mod failures;
mod limits;
mod loads;
mod processes;
mod tasks;
mod ways;
