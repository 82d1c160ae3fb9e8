//! Ids and counters that cross rooms.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Position of an entry in the replicated log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct LogIndex(pub u64);

/// One ordered stream of changes, as registered; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SourceId(pub u32);

/// One (engine, rank) that requests are sent to; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkerId(pub u32);

/// Something of each worker; looked up many times for each request, never iterated in an order that matters.
pub type ByWorker<T> = HashMap<WorkerId, T, BuildHasherDefault<IdHasher>>;

/// One cache that holds blocks; small and dense, reused after its holder is gone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct HolderId(pub u32);

/// One lifetime of a source: the log index of its registration, so it never repeats.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Incarnation(pub u64);

/// Position of a batch inside one incarnation; the first batch has 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Seq(pub u64);

/// Hashes a few small numbers by multiplication; ids are ours, so nobody can choose them to collide.
#[derive(Clone, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(u32::from(byte)));
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0.rotate_left(32) ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
