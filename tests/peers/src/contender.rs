//! What every index must be able to do to be measured, each in the form of calling that is fastest for it.

use crate::clock::CpuClock;
use crate::log::{BlockId, Event, Log};

/// One index under measurement.
pub trait Contender: Sized {
    /// Some events in this index's own form.
    type Batch;
    /// A query in this index's own form.
    type Query;
    /// An element of a query: what a router has just computed.
    type Key;

    /// An empty index for a log's workers.
    fn new(log: &Log) -> Self;
    /// Puts events into this index's form; not timed.
    fn prepare(&mut self, log: &Log, events: &[Event]) -> Self::Batch;
    /// Applies them; timed. What is left of the batch is dropped outside the timing.
    fn ingest(&mut self, batch: &mut Self::Batch);
    /// Puts a prompt into this index's form; not timed.
    fn query(&self, log: &Log, prompt: &[BlockId]) -> Self::Query;
    /// The keys of a query, to be warmed or made cold before it is asked.
    fn keys(query: &Self::Query) -> &[Self::Key];
    /// Answers; timed.
    fn find(&mut self, query: &mut Self::Query);
    /// The last answer as (worker, leading blocks); not timed.
    fn answer(&self, out: &mut Vec<(u32, u32)>);
    /// CPU time of the thread that ingests.
    fn clock(&self) -> CpuClock {
        CpuClock::this_thread()
    }
    /// Events that the index refused: it says that it lacks a parent or a block that the worker holds.
    fn refused(&self) -> u64 {
        0
    }
    /// Bytes that aren't allocated through the allocator: mappings of the index's own.
    fn mapped_bytes(&self) -> usize {
        0
    }
}
