//! Routing: load ledger, cost model and policies that choose a worker for a request.
//!
//! Sans-IO: time comes in as [`Micros`], chance from a seed. A router's shell owns one [`Routing`], tells it about
//! workers, loads and other routers, and for each request calls [`Routing::decide`], [`Routing::reserve`],
//! [`Routing::first_token`] and [`Routing::finish`].

#![cfg_attr(test, allow(clippy::unwrap_used, missing_docs))]

mod breaker;
mod choice;
pub mod cost;
mod decision;
mod draw;
mod drift;
mod facts;
mod fleet;
mod ids;
mod ledger;
mod occupied;
mod overlay;
mod pairs;
pub mod policy;
mod rates;
mod retry;
mod routing;
mod starts;
mod text;
mod time;
mod why_zero;

pub use breaker::{Breaker, BreakerState};
pub use choice::{ChoiceError, Plan};
pub use cost::{Inputs, Speeds, Terms};
pub use decision::{AvoidedPair, CandidateTerms, Choice, DecisionRecord, RECORD_VERSION, VerifyError};
pub use drift::Drift;
pub use facts::{KeySource, RequestFacts, Reuse, ReuseOf, WhyNot, WorkerFacts};
pub use ids::RouterName;
pub use ledger::{
    FRAME_LIFE, FrameOutcome, LedgerCounters, Load, LoadReport, MAX_REMOTE_ROUTERS, MAX_RESERVATIONS,
    MAX_WORKERS_PER_FRAME, REPORT_LIFE, RemoteReservation, Reserved, RouterFrame, SpeculativePrefix,
};
pub use overlay::STRIDE;
pub use pairs::PairHealth;
pub use policy::{Candidate, Policy, PolicyConfig, PolicyError, Reason};
pub use rates::{DEFAULT_SPEEDS, Rates};
pub use retry::{EXTRA_FLOOR, EXTRA_PERCENT, MAX_ATTEMPTS, RetryBudget};
pub use routing::{
    CONFIRM_LIFE, Ending, MAX_FRAME_KEYS, MAX_FRAME_PREFIXES, Routing, RoutingConfig, Ticket, ViewState,
};
pub use text::{TEXT_BLOCK_BYTES, text_keys};
pub use time::Micros;
pub use why_zero::{WhyZero, ZeroFacts, why_zero};

use ids::Slot;
