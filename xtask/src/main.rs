//! `cargo xtask`: the workspace's chores.
fn main() {}
