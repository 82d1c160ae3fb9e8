//! What was decided, with everything that it was decided from.

use cairn_index::WorkerId;
use serde::{Deserialize, Serialize};

use crate::choice::{ChoiceError, Plan, choose};
use crate::ids::{maybe_worker_id, worker_id};
use crate::policy::{Candidate, PolicyConfig, PolicyError, Reason};
use crate::{KeySource, Micros, Reuse, Terms, WhyNot};

/// The outcome of a decision: small, without its candidates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Who serves the request.
    pub plan: Plan,
    /// The next best worker for the whole request, or for its prefill.
    pub runner_up: Option<WorkerId>,
    /// Why.
    pub reason: Reason,
    /// What the committed view promised at the worker that computes the prompt, without speculation and trust.
    pub predicted: Reuse,
    /// Leading tokens that a request on its way to the same worker computes.
    pub speculative_tokens: u32,
    /// Terms of the worker that computes the prompt, with the transfer of a split.
    pub terms: Terms,
    /// Counts this router's decisions.
    pub ordinal: u64,
    /// The decision's chance.
    pub draw: u64,
}

impl Choice {
    /// The worker that computes the prompt.
    #[must_use]
    pub fn prefill_worker(&self) -> WorkerId {
        match self.plan {
            Plan::Whole { worker } => worker,
            Plan::Split { prefill, .. } => prefill,
        }
    }

    /// The worker that answers.
    #[must_use]
    pub fn answering_worker(&self) -> WorkerId {
        match self.plan {
            Plan::Whole { worker } => worker,
            Plan::Split { decode, .. } => decode,
        }
    }
}

/// A pair of workers whose transfers fail too often at the time of a decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AvoidedPair {
    /// Prefill side.
    #[serde(with = "worker_id")]
    pub prefill: WorkerId,
    /// Decode side.
    #[serde(with = "worker_id")]
    pub decode: WorkerId,
}

/// One decision with all its inputs; holds no text, token, key or salt.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecisionRecord {
    /// Layout of this record.
    pub version: u32,
    /// On the router's clock.
    pub at_us: Micros,
    /// The request's pool.
    pub pool: String,
    /// The policy with its parameters.
    pub policy: PolicyConfig,
    /// Counts this router's decisions.
    pub ordinal: u64,
    /// The decision's chance.
    pub draw: u64,
    /// Seeded hash of what affinity hung on, 0 for nothing.
    pub identity: u64,
    /// Prompt length.
    pub prompt_tokens: u32,
    /// What its keys were made from.
    pub key_source: KeySource,
    /// Urgency.
    pub priority: i32,
    /// Whether a split was possible.
    pub may_split: bool,
    /// Pairs that were avoided.
    pub avoided: Vec<AvoidedPair>,
    /// Every worker of the pool, sorted by id.
    pub candidates: Vec<Candidate>,
    /// The choice: the only worker, or the prefill side.
    #[serde(with = "worker_id")]
    pub chosen: WorkerId,
    /// The decode side of a split.
    #[serde(with = "maybe_worker_id")]
    pub decode: Option<WorkerId>,
    /// The next best.
    #[serde(with = "maybe_worker_id")]
    pub runner_up: Option<WorkerId>,
    /// Why.
    pub reason: Reason,
}

/// Layout that this code writes and reads.
pub const RECORD_VERSION: u32 = 4;

/// A record that doesn't give its own decision again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// Written by another release.
    #[error("record version {0} isn't {RECORD_VERSION}; verify it with the release that wrote it")]
    Version(u32),
    /// Its policy can't be made.
    #[error("the record's policy can't be made")]
    Policy(#[source] PolicyError),
    /// The cost model gives other terms for a worker's inputs.
    #[error("worker {worker}: the cost model gives other terms than recorded; the record was changed or the model was")]
    Terms {
        /// Which worker.
        worker: u32,
    },
    /// Candidates aren't sorted by worker.
    #[error("the record's candidates aren't sorted by worker; the record was changed")]
    Unsorted,
    /// No candidate can serve.
    #[error("the record names no worker that can serve")]
    NoWorker(#[source] ChoiceError),
    /// Another worker wins.
    #[error("the record's choice is {recorded}, made again it is {again}")]
    Choice {
        /// What the record says.
        recorded: String,
        /// What comes out now.
        again: String,
    },
}

impl DecisionRecord {
    /// Makes the decision again from the recorded inputs and compares every term, the choice, the runner-up and the reason.
    pub fn verify(&self) -> Result<(), VerifyError> {
        if self.version != RECORD_VERSION {
            return Err(VerifyError::Version(self.version));
        }
        if !self.candidates.is_sorted_by(|a, b| a.worker < b.worker) {
            return Err(VerifyError::Unsorted);
        }
        if let Some(off) = self.candidates.iter().find(|c| c.inputs.terms() != c.terms) {
            return Err(VerifyError::Terms { worker: off.worker.0 });
        }
        let policy = self.policy.build().map_err(VerifyError::Policy)?;
        let made = choose(
            &*policy,
            &self.candidates,
            self.ordinal,
            self.draw,
            self.identity,
            self.may_split,
            |p, d| self.avoided.contains(&AvoidedPair { prefill: p, decode: d }),
            &mut crate::choice::Scratch::default(),
        )
        .map_err(VerifyError::NoWorker)?;
        let (chosen, decode) = match made.plan {
            Plan::Whole { worker } => (worker, None),
            Plan::Split { prefill, decode } => (prefill, Some(decode)),
        };
        let again = (chosen, decode, made.runner_up, made.reason);
        let recorded = (self.chosen, self.decode, self.runner_up, self.reason);
        if again != recorded {
            let words = |(c, d, r, why): (WorkerId, Option<WorkerId>, Option<WorkerId>, Reason)| {
                format!(
                    "{} (decode {:?}, runner-up {:?}, {})",
                    c.0,
                    d.map(|w| w.0),
                    r.map(|w| w.0),
                    why.as_str()
                )
            };
            return Err(VerifyError::Choice {
                recorded: words(recorded),
                again: words(again),
            });
        }
        Ok(())
    }
}

/// One candidate for people: milliseconds, and words for why not.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CandidateTerms {
    /// Which worker.
    pub worker: u32,
    /// Whether it could have been chosen.
    pub eligible: bool,
    /// Why not, or why only as a last resort.
    pub why_not: Option<WhyNot>,
    /// Reusable in GPU memory.
    pub gpu_tokens: u32,
    /// Further, in CPU memory.
    pub cpu_tokens: u32,
    /// Further, in shared storage.
    pub shared_tokens: u32,
    /// Further, from a peer.
    pub peer_tokens: u32,
    /// Leading tokens that a request on its way computes.
    pub speculative_tokens: u32,
    /// Tokens it would compute.
    pub new_tokens: u32,
    /// Requests on it.
    pub in_flight: u32,
    /// Wait for the prefill's start.
    pub queue_ms: f64,
    /// Fetches.
    pub fetch_ms: f64,
    /// Computing.
    pub prefill_ms: f64,
    /// Transfer of a split.
    pub transfer_ms: f64,
    /// What its work costs others.
    pub others_ms: f64,
    /// What those that waited for a copy of the prompt's start have paid of it.
    pub paid_ms: f64,
    /// The sum, less what is paid.
    pub cost_ms: f64,
}

impl From<&Candidate> for CandidateTerms {
    fn from(c: &Candidate) -> Self {
        let ms = |us: u64| Micros(us).ms();
        Self {
            worker: c.worker.0,
            eligible: c.why_not.is_none() || c.prefill_leg || c.decode_leg,
            why_not: c.why_not,
            gpu_tokens: c.inputs.gpu_tokens,
            cpu_tokens: c.inputs.cpu_tokens,
            shared_tokens: c.inputs.shared_tokens,
            peer_tokens: c.inputs.peer_tokens,
            speculative_tokens: c.inputs.speculative_tokens,
            new_tokens: c.terms.new_tokens,
            in_flight: c.inputs.in_flight,
            queue_ms: ms(c.terms.queue_us),
            fetch_ms: ms(c.terms.fetch_us),
            prefill_ms: ms(c.terms.prefill_us),
            transfer_ms: ms(c.terms.transfer_us),
            others_ms: ms(c.terms.others_us),
            paid_ms: ms(c.terms.paid_us),
            cost_ms: c.terms.cost().ms(),
        }
    }
}
