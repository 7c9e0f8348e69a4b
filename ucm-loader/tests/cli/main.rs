//! The tool as its users have it: the real binary, small sizes, private directories.
#![allow(clippy::unwrap_used)]

mod arguments;
mod bench;
#[path = "../common/mod.rs"]
mod common;
mod demo;
mod machine;
mod replay;
mod segments;
mod store;
