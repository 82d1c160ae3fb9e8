//! Policies: given the same candidates, which worker takes the request.
//!
//! A policy is a pure function from recorded integers to a score for each candidate; it keeps no state and draws no
//! chance of its own. What others would keep inside (a round-robin counter, a hash ring, a session table) comes from the
//! decision's ordinal, its draw and rendezvous hashing. So a decision made again from its record comes out the same, and
//! the simulator, the shadow and the live router run the very same code.

mod chwbl;
mod kv;
mod least_requests;
mod least_tokens;
mod lmetric;
mod max_hit;
mod prefix;
mod random;
mod round_robin;
mod session;
mod sticky;

use cairn_index::WorkerId;
use serde::{Deserialize, Serialize};

use crate::cost::{Inputs, Terms};
use crate::ids::worker_id;
use crate::{RequestFacts, WhyNot, draw};

pub use chwbl::Chwbl;
pub use kv::Kv;
pub use least_requests::LeastRequests;
pub use least_tokens::LeastTokens;
pub use lmetric::Lmetric;
pub use max_hit::MaxHit;
pub use prefix::{CONCURRENCY_THRESHOLD, PREFIX_LENGTH, Prefix};
pub use random::Random;
pub use round_robin::RoundRobin;
pub use session::Session;
pub use sticky::Sticky;

/// Lower is better.
pub type Score = u64;

/// One worker as a policy sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Candidate {
    /// Which worker.
    #[serde(with = "worker_id")]
    pub worker: WorkerId,
    /// Why it can't serve the whole request, or only as a last resort; `None` where it can.
    pub why_not: Option<WhyNot>,
    /// Whether it can serve the prefill of a split.
    pub prefill_leg: bool,
    /// Whether it can serve the decode of a split.
    pub decode_leg: bool,
    /// What the cost model was fed.
    pub inputs: Inputs,
    /// What it said.
    pub terms: Terms,
}

/// All that a policy may look at.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// The candidates to score, sorted by worker; never empty.
    pub candidates: &'a [Candidate],
    /// Counts the decisions of this router.
    pub ordinal: u64,
    /// The decision's chance.
    pub draw: u64,
    /// What [`Policy::identity`] gave for the request, 0 for nothing.
    pub identity: u64,
}

/// Why a choice was made, as the policy sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The lowest cost, with reuse of cached tokens.
    LeastCostWithReuse,
    /// The lowest cost; nothing of it cached where it goes.
    LeastCost,
    /// A prefix that is on its way to that worker.
    JoinsPrefixOnItsWay,
    /// By chance.
    Chance,
    /// Its turn.
    Turn,
    /// The least load.
    LeastLoad,
    /// Its prefix or session belongs there.
    Affinity,
    /// Its affine worker is at its threshold.
    Overflow,
    /// The longest match.
    LongestMatch,
    /// The only worker that can.
    Only,
    /// A last resort: every worker has something against it.
    LastResort,
    /// A split pays.
    Split,
}

impl Reason {
    /// Words for people and for closed label sets.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::LeastCostWithReuse => "least_cost_with_reuse",
            Self::LeastCost => "least_cost",
            Self::JoinsPrefixOnItsWay => "joins_prefix_on_its_way",
            Self::Chance => "chance",
            Self::Turn => "turn",
            Self::LeastLoad => "least_load",
            Self::Affinity => "affinity",
            Self::Overflow => "overflow",
            Self::LongestMatch => "longest_match",
            Self::Only => "only",
            Self::LastResort => "last_resort",
            Self::Split => "split",
        }
    }
}

/// One way of choosing. See the module.
pub trait Policy: Send + Sync + std::fmt::Debug {
    /// Its name and parameters, from which [`PolicyConfig::build`] makes it again.
    fn config(&self) -> PolicyConfig;

    /// Hash of what the request's affinity hangs on; 0 for nothing. `seed` is the cluster's, so that routers agree.
    fn identity(&self, request: &RequestFacts<'_>, seed: u64) -> u64 {
        let _ = (request, seed);
        0
    }

    /// Scores every candidate; `scores` has their number.
    fn score(&self, situation: &Situation<'_>, scores: &mut [Score]);

    /// How far above the best score a candidate still counts as equally good.
    fn tolerance(&self, best: Score) -> Score {
        let _ = best;
        0
    }

    /// Says why `chosen` (a position in the candidates) won.
    fn reason(&self, situation: &Situation<'_>, chosen: usize) -> Reason;
}

/// Positions of the best and the second best candidate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pick {
    /// The choice.
    pub chosen: usize,
    /// The next best.
    pub runner_up: Option<usize>,
}

/// Steps of `1 << bits` to a doubling: amounts in one step are equal.
fn coarse(work: u64, bits: u32) -> u32 {
    let top = (work | 1).ilog2();
    let next = if top >= bits {
        work >> (top - bits) & ((1 << bits) - 1)
    } else {
        0
    };
    top << bits | next as u32
}

/// Steps of about a fifth: new tokens that differ by less are equal.
const NEW_BITS: u32 = 2;

/// Steps of about a tenth: what workers were given lately evens out as far as what is given next can be foreseen.
const GIVEN_BITS: u32 = 3;

/// Lets `policy` choose. Equally good ones are told apart by the least new tokens and the least work lately given, both in
/// steps, then the least requests, then who waited longest for a request of this router, then a seeded draw; never by
/// their order.
pub fn pick(policy: &dyn Policy, situation: &Situation<'_>, scores: &mut Vec<Score>) -> Pick {
    let candidates = situation.candidates;
    scores.clear();
    scores.resize(candidates.len(), Score::MAX);
    policy.score(situation, scores);
    let best = scores.iter().copied().min().unwrap_or(Score::MAX);
    let level = best.saturating_add(policy.tolerance(best));
    let rank = |at: usize| {
        let c = &candidates[at];
        let tied = scores[at] <= level;
        let beyond = if tied { 0 } else { scores[at] };
        let (new, given, busy, rest) = if tied {
            let rest = u32::MAX - c.inputs.since_chosen;
            (
                coarse(c.terms.new_tokens.into(), NEW_BITS),
                coarse(c.inputs.recent_work, GIVEN_BITS),
                c.inputs.in_flight,
                rest,
            )
        } else {
            (0, 0, 0, 0)
        };
        (
            beyond,
            new,
            given,
            busy,
            rest,
            draw::pair(situation.draw, u64::from(c.worker.0)),
        )
    };
    let mut first: Option<(usize, _)> = None;
    let mut second: Option<(usize, _)> = None;
    for at in 0..candidates.len() {
        let r = rank(at);
        match &first {
            Some((_, best)) if r >= *best => {
                if second.as_ref().is_none_or(|(_, s)| r < *s) {
                    second = Some((at, r));
                }
            }
            Some(_) | None => {
                second = first.take();
                first = Some((at, r));
            }
        }
    }
    Pick {
        chosen: first.map_or(0, |(at, _)| at),
        runner_up: second.map(|(at, _)| at),
    }
}

/// A policy's name and parameters, as in configuration and records.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PolicyConfig {
    /// Least estimated time to the first token; Cairn's default.
    #[default]
    Kv,
    /// Uniformly at random.
    Random,
    /// In turn.
    RoundRobin,
    /// Fewest requests in flight.
    LeastRequests,
    /// Fewest tokens outstanding.
    LeastTokens,
    /// By the session's identity, else fewest requests.
    Session,
    /// SageMaker's prefix-aware routing.
    Prefix {
        /// How much of the prompt's start counts, in bytes of text.
        #[serde(default = "prefix::default_length")]
        prefix_length: u32,
        /// Requests in flight on the affine worker from which on requests overflow.
        #[serde(default = "prefix::default_threshold")]
        concurrency_threshold: u32,
    },
    /// Consistent hashing with bounded loads.
    Chwbl {
        /// Allowed load in percent of the mean, above 100.
        #[serde(default = "chwbl::default_load")]
        load_percent: u32,
        /// How much of the prompt's start counts, in bytes of text.
        #[serde(default = "prefix::default_length")]
        prefix_length: u32,
    },
    /// The longest match, whatever the load: a warning, not a proposal.
    MaxHit,
    /// New prefill tokens times batch size.
    Lmetric,
    /// Workers with most of the prompt cached, the least busy of them, unless it leads by too much.
    Sticky {
        /// Part of the prompt that must be cached, in percent.
        #[serde(default = "sticky::default_cached")]
        cached_percent: u32,
        /// Lead over the least busy worker, in tokens of outstanding prefill, that releases the request.
        #[serde(default = "sticky::default_tau")]
        tau_tokens: u32,
    },
}

/// A policy that can't be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// No policy has this name.
    #[error("policy {0:?} isn't known; use one of {names}", names = PolicyConfig::NAMES.join(", "))]
    UnknownName(String),
    /// A parameter is out of its range.
    #[error("policy {policy}: {field} is {value}; give {min} to {max}")]
    OutOfRange {
        /// The policy.
        policy: &'static str,
        /// The parameter.
        field: &'static str,
        /// What it is.
        value: u64,
        /// Least allowed.
        min: u64,
        /// Most allowed.
        max: u64,
    },
}

fn within(policy: &'static str, field: &'static str, value: u32, range: (u32, u32)) -> Result<(), PolicyError> {
    if value >= range.0 && value <= range.1 {
        return Ok(());
    }
    let (value, min, max) = (u64::from(value), u64::from(range.0), u64::from(range.1));
    Err(PolicyError::OutOfRange {
        policy,
        field,
        value,
        min,
        max,
    })
}

impl PolicyConfig {
    /// All names.
    pub const NAMES: [&'static str; 11] = [
        "kv",
        "random",
        "round-robin",
        "least-requests",
        "least-tokens",
        "session",
        "prefix",
        "chwbl",
        "max-hit",
        "lmetric",
        "sticky",
    ];

    /// The policy of that name with its default parameters; empty means `kv`.
    pub fn by_name(name: &str) -> Result<Self, PolicyError> {
        Ok(match name {
            "" | "kv" => Self::Kv,
            "random" => Self::Random,
            "round-robin" => Self::RoundRobin,
            "least-requests" => Self::LeastRequests,
            "least-tokens" => Self::LeastTokens,
            "session" => Self::Session,
            "prefix" => Self::Prefix {
                prefix_length: prefix::default_length(),
                concurrency_threshold: prefix::default_threshold(),
            },
            "chwbl" => Self::Chwbl {
                load_percent: chwbl::default_load(),
                prefix_length: prefix::default_length(),
            },
            "max-hit" => Self::MaxHit,
            "lmetric" => Self::Lmetric,
            "sticky" => Self::Sticky {
                cached_percent: sticky::default_cached(),
                tau_tokens: sticky::default_tau(),
            },
            other => return Err(PolicyError::UnknownName(other.to_owned())),
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::Random => "random",
            Self::RoundRobin => "round-robin",
            Self::LeastRequests => "least-requests",
            Self::LeastTokens => "least-tokens",
            Self::Session => "session",
            Self::Prefix { .. } => "prefix",
            Self::Chwbl { .. } => "chwbl",
            Self::MaxHit => "max-hit",
            Self::Lmetric => "lmetric",
            Self::Sticky { .. } => "sticky",
        }
    }

    /// Checks the parameters and makes the policy.
    pub fn build(&self) -> Result<Box<dyn Policy>, PolicyError> {
        Ok(match *self {
            Self::Kv => Box::new(Kv),
            Self::Random => Box::new(Random),
            Self::RoundRobin => Box::new(RoundRobin),
            Self::LeastRequests => Box::new(LeastRequests),
            Self::LeastTokens => Box::new(LeastTokens),
            Self::Session => Box::new(Session),
            Self::Prefix {
                prefix_length,
                concurrency_threshold,
            } => Box::new(Prefix::new(prefix_length, concurrency_threshold)?),
            Self::Chwbl {
                load_percent,
                prefix_length,
            } => Box::new(Chwbl::new(load_percent, prefix_length)?),
            Self::MaxHit => Box::new(MaxHit),
            Self::Lmetric => Box::new(Lmetric),
            Self::Sticky {
                cached_percent,
                tau_tokens,
            } => Box::new(Sticky::new(cached_percent, tau_tokens)?),
        })
    }
}
