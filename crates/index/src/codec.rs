//! The index's own stored bytes: commands of the log and the feed, and snapshots of the whole state.
//!
//! Both begin with a version. Numbers are LEB128 varints, keys 8 raw little-endian bytes, strings length-framed. Readers
//! take hostile input: every length is bounded before memory is asked for, and what was read is checked.

mod command;
mod registry;
mod snapshot;
mod wire;

pub use command::{
    BATCHES_MAX, COMMAND_VERSION, KEYS_PER_STORE_MAX, OPS_PER_BATCH_MAX, decode_command, encode_command,
    encode_command_into,
};
pub(crate) use registry::registry_digest;
pub use snapshot::{SNAPSHOT_VERSION, decode_snapshot, encode_snapshot};
pub use wire::DecodeError;
pub(crate) use wire::{In, Out};
