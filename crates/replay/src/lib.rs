//! Replay: a trace through simulated engines and the routing core, in seeded virtual time.
//!
//! [`engine_model`] is the engine core that the simulated engine process runs too. [`trace`] reads and makes workloads;
//! [`run`] runs one through a fleet under every policy with the code that decides in live routers. No I/O, no clock,
//! no chance but the seed's: equal input gives equal output.

#![cfg_attr(test, allow(clippy::unwrap_used, missing_docs))]

mod calibrate;
pub mod engine_model;
mod html;
mod options;
mod report;
mod run;
pub mod trace;
mod tune;

pub use calibrate::{CalibrateError, Fitted, Sample, fit};
pub use options::{ENGINES_MAX, InvalidOptions, Model, Options, ROUTERS_MAX, Scenario, reference_timing};
pub use report::{Difference, FirstToken, Report, Run, Window};
pub use run::{ReplayError, run};
pub use tune::{best, grid};
