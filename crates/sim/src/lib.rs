//! The seeded, single-threaded world in which the cores meet every fault, under the invariants' eyes.
//!
//! One heap of (time, sequence, event), one generator, no clock and no hash-ordered iteration: a seed fixes the whole
//! run, and a test proves that before anything else is claimed. Engines are the replay engine model, agents the ingest
//! core, index nodes and router views the index core, routers the routing core. What is modelled here is only what
//! lies between them: an ordered log with leader changes, a network that delays, loses and splits, and processes that
//! die, hang and come back. [`run`] plays one seed and says which invariant broke, if any.
#![cfg_attr(test, allow(clippy::unwrap_used, missing_docs))]

mod agents;
mod checks;
mod cluster;
mod elections;
mod engines;
mod faults;
mod feed;
mod model;
mod plan;
mod reporting;
mod requests;
mod rng;
mod routers;
mod trace;
mod world;

pub use checks::Violation;
pub use plan::{Bug, Plan};
pub use trace::Trace;
pub use world::{Report, run};
