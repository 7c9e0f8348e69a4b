//! A segment's life: made whole, joined with care, removed by the last one out.
//!
//! - [`options`]: what a segment should be.
//! - [`peek`]: its header, read from the file before anything is mapped.
//! - `create`: a new one, invisible until it is complete.
//! - `join`: one that is there; checks, refusals, and replacing what is dead.
//! - [`handle`]: the attached segment, and leaving.
//! - [`watcher`]: looking without taking part.
//!
//! Files: `ucm.<id>.ctrl` is the segment's name. Its data are in
//! `ucm.<id>.<nonce>.data.0`, linked before the control file and unlinked
//! after it, so wherever a process dies, either there is a whole segment or
//! there is none (and perhaps an orphan that `gc` removes). `ucm.<id>.birth`
//! exists while somebody creates: without it, eight ranks that start together
//! would each reserve the whole segment, and seven of them in vain.
//!
//! Every process that has a segment open holds a shared lock on its presence
//! byte, from before the checks until it leaves; participants hold their own
//! bytes besides. Attaching, leaving and collecting take the lifecycle byte,
//! then look whether the name still means the file they opened. Under that
//! byte, "nobody holds presence or a participant's byte" cannot change.

pub(crate) mod create;
pub mod handle;
pub(crate) mod join;
pub mod options;
pub mod peek;
pub mod watcher;
