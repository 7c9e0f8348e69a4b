//! One place in the host cache: its state word ([`word`]) and its metadata ([`meta`]).

pub mod meta;
pub mod word;
