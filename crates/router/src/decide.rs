//! From tokens to a reserved worker: chain -> overlap -> choose -> reserve.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use cairn_blocks::{BlockKey, Chain, Namespace};
use cairn_index::{Query, WorkerId, WorkerOverlap};
use cairn_routing::{
    Choice, ChoiceError, DecisionRecord, Ending, KeySource, Micros, Plan, PolicyConfig, RequestFacts, Routing, Ticket,
    text_keys,
};

use crate::error::ApiError;
use crate::fleet::{Fleet, Pool};
use crate::state::Router;
use crate::tokenize::{Degraded, Tokens};

/// Answer length that is reckoned with where a request doesn't limit it, and at most; in tokens.
const EXPECTED_OUTPUT: u32 = 256;
/// Bytes that a block of stand-in keys covers count as this many tokens.
const TEXT_BLOCK_TOKENS: u32 = 16;

/// A request as far as decisions care; owns what [`RequestFacts`] borrows.
pub(crate) struct Asked<'a> {
    /// Its pool.
    pub pool: &'a Pool,
    /// Adapter, empty for the base model.
    pub adapter: &'a str,
    /// Keys of the first prompt.
    pub keys: Vec<BlockKey>,
    /// Keys of further prompts with their lengths in tokens; an array of prompts is one request.
    pub more: Vec<(Vec<BlockKey>, u32)>,
    /// Length of the first prompt in tokens.
    pub first_tokens: u32,
    /// Length of all prompts in tokens.
    pub prompt_tokens: u32,
    /// What the keys are made from.
    pub key_source: KeySource,
    /// Why they aren't whole.
    pub degraded: Option<Degraded>,
    /// Token ids of each prompt as far as they are known, where somebody wants to see them.
    pub ids: Option<Vec<Vec<u32>>>,
    /// What steers affinity only.
    pub affinity: Vec<u8>,
    /// The prompt's text, for policies that look at it.
    pub prefix: Vec<u8>,
    /// Longest answer asked for.
    pub max_tokens: Option<u32>,
    /// Policy that the request may name itself.
    pub policy: Option<String>,
    /// Whether it may be split.
    pub may_split: bool,
}

impl<'a> Asked<'a> {
    /// Chains the tokens of a request below its namespace.
    pub(crate) fn chain(fleet: &Fleet, pool: &'a Pool, adapter: &'a str, salt: &str, tokens: Tokens) -> Self {
        let namespace = Namespace {
            seed: fleet.seed,
            pool: &pool.name,
            block_size: pool.block_size,
            adapter,
            salt,
        };
        let root = namespace.root();
        let mut prompt_tokens = tokens.total();
        if tokens.estimated_rest > 0 {
            // Only a true length may be too long.
            prompt_tokens = prompt_tokens.min(pool.max_model_len.map_or(u32::MAX, |max| max.saturating_sub(1)));
        }
        let mut keys = Vec::new();
        let mut more = Vec::new();
        let mut first_tokens = prompt_tokens;
        let key_source = match tokens.degraded {
            _ if tokens.prompts.is_empty() => {
                text_keys(root.0, tokens.text.as_bytes(), &mut keys);
                KeySource::Text
            }
            Some(Degraded::Budget) => KeySource::PartialTokens,
            Some(Degraded::Media | Degraded::NoTokenizer | Degraded::Failed | Degraded::Mismatch) | None => {
                KeySource::Exact
            }
        };
        for (position, prompt) in tokens.prompts.iter().enumerate() {
            let chain = Chain::new(root, pool.block_size, prompt, &[]);
            let length = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
            if position == 0 {
                keys = chain.keys;
                first_tokens = if tokens.prompts.len() == 1 {
                    prompt_tokens
                } else {
                    length
                };
            } else {
                more.push((chain.keys, length));
            }
        }
        Self {
            pool,
            adapter,
            keys,
            more,
            first_tokens,
            prompt_tokens,
            key_source,
            degraded: tokens.degraded,
            ids: None,
            affinity: Vec::new(),
            prefix: tokens.text.into_bytes(),
            max_tokens: None,
            policy: None,
            may_split: false,
        }
    }

    /// As the routing core wants it.
    pub(crate) fn facts<'b>(&'b self, excluded: &'b [WorkerId]) -> RequestFacts<'b> {
        RequestFacts {
            pool: &self.pool.name,
            adapter: self.adapter,
            prompt_tokens: self.prompt_tokens,
            block_tokens: match self.key_source {
                KeySource::Text => TEXT_BLOCK_TOKENS,
                KeySource::Exact | KeySource::PartialTokens => self.pool.block_size.tokens(),
            },
            keys: &self.keys,
            key_source: self.key_source,
            affinity: &self.affinity,
            prefix: &self.prefix,
            expected_output: self.max_tokens.unwrap_or(EXPECTED_OUTPUT).min(EXPECTED_OUTPUT),
            priority: 0,
            excluded,
            policy: self.policy.as_deref(),
            may_split: self.may_split,
        }
    }

    /// What each worker holds of it by the committed view.
    pub(crate) fn overlap(&self, router: &Router) -> Vec<WorkerOverlap> {
        let mut found = Vec::new();
        if self.key_source == KeySource::Text {
            return found;
        }
        let state = router.view.state.read();
        let query = |keys, prompt_tokens| Query {
            pool: &self.pool.name,
            keys,
            prompt_tokens,
            block_size: self.pool.block_size,
        };
        state.overlap(&query(&self.keys, self.first_tokens), &mut found);
        let mut further = Vec::new();
        for (keys, tokens) in &self.more {
            state.overlap(&query(keys, *tokens), &mut further);
            // Both lists hold every worker of the pool in the order of its id.
            for (sum, one) in found.iter_mut().zip(&further) {
                sum.overlap.gpu += one.overlap.gpu;
                sum.overlap.cpu += one.overlap.cpu;
                sum.overlap.shared += one.overlap.shared;
            }
        }
        found
    }
}

/// A reserved request; dropping it gives the reservation back.
pub(crate) struct Reservation {
    router: Arc<Router>,
    ticket: Option<Ticket>,
}

impl Reservation {
    /// The first token (or the whole answer) is here.
    pub(crate) fn first_token(&mut self) {
        if let Some(ticket) = &mut self.ticket {
            self.router.routing.lock().first_token(self.router.now(), ticket);
            self.router.reservations_changed.notify_one();
        }
    }

    /// The first token should be here by now, but the answer doesn't show it.
    pub(crate) fn assume_first_token(&mut self) {
        if let Some(ticket) = &mut self.ticket {
            self.router.routing.lock().assume_first_token(self.router.now(), ticket);
            self.router.reservations_changed.notify_one();
        }
    }

    /// The prefill leg of a split answered.
    pub(crate) fn prefill_done(&mut self) {
        if let Some(ticket) = &mut self.ticket {
            self.router.routing.lock().prefill_done(self.router.now(), ticket);
            self.router.reservations_changed.notify_one();
        }
    }

    /// The transfer between the legs of a split failed.
    pub(crate) fn transfer_failed(&self) {
        if let Some(ticket) = &self.ticket {
            self.router.routing.lock().transfer_failed(self.router.now(), ticket);
        }
    }

    /// Tokens that the committed view promised at the decision.
    pub(crate) fn predicted(&self) -> u32 {
        self.ticket.as_ref().map_or(0, Ticket::predicted)
    }

    /// Ends it.
    pub(crate) fn finish(mut self, ending: Ending, blamed: Option<WorkerId>) {
        self.give_back(ending, blamed);
    }

    fn give_back(&mut self, ending: Ending, blamed: Option<WorkerId>) {
        if let Some(ticket) = self.ticket.take() {
            self.router
                .routing
                .lock()
                .finish(self.router.now(), ticket, ending, blamed);
            self.router.reservations_changed.notify_one();
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.give_back(Ending::Cancelled, None);
    }
}

/// What another policy would have done.
#[derive(Clone, Copy)]
pub(crate) struct Shadowed {
    /// The worker that would have computed the prompt.
    pub worker: WorkerId,
    /// Tokens that it would have computed.
    pub new_tokens: u32,
}

fn shadow(
    router: &Router,
    routing: &mut Routing,
    now: Micros,
    choice: &Choice,
    facts: &RequestFacts<'_>,
) -> Option<Shadowed> {
    if router.config.shadow.is_empty() {
        return None;
    }
    let (Plan::Whole { worker } | Plan::Split { prefill: worker, .. }) =
        routing.shadow(now, choice, facts, &router.config.shadow)?;
    let candidate = routing
        .candidates()
        .iter()
        .find(|candidate| candidate.worker == worker)?;
    Some(Shadowed {
        worker,
        new_tokens: candidate.terms.new_tokens,
    })
}

/// A decision that was made and reserved.
pub(crate) struct Decided {
    /// What was chosen and why.
    pub choice: Choice,
    /// The reservation.
    pub reservation: Reservation,
    /// All inputs, for the record.
    pub record: Option<DecisionRecord>,
    /// Where the shadow policy would have sent it, and the prompt tokens that it would have computed.
    pub shadow: Option<Shadowed>,
    /// How long it took, overlap included.
    pub took: std::time::Duration,
}

/// Workers beyond this many make a record too large to keep for every decision.
pub(crate) const RECORD_WORKERS_MAX: usize = 128;

/// Looks the request up in the view, chooses and reserves.
pub(crate) fn decide(router: &Arc<Router>, asked: &Asked<'_>, excluded: &[WorkerId]) -> Result<Decided, ApiError> {
    let started = Instant::now();
    let overlaps = tracing::info_span!("overlap", blocks = asked.keys.len()).in_scope(|| asked.overlap(router));
    let facts = asked.facts(excluded);
    let now = router.at(started);
    let mut routing = router.routing.lock();
    // A worker that was just removed can be chosen once at most; the second choice doesn't know it any more.
    for _ in 0..2 {
        let choice = routing.decide(now, &facts, &overlaps).map_err(refuse)?;
        let Some(ticket) = routing.reserve(now, &choice, &facts) else {
            continue;
        };
        let shadow = shadow(router, &mut routing, now, &choice, &facts);
        let record = (routing.candidates().len() <= RECORD_WORKERS_MAX).then(|| routing.record(now, &choice, &facts));
        drop(routing);
        router.reservations_changed.notify_one();
        let reservation = Reservation {
            router: Arc::clone(router),
            ticket: Some(ticket),
        };
        return Ok(Decided {
            choice,
            reservation,
            record,
            shadow,
            took: started.elapsed(),
        });
    }
    Err(ApiError::unavailable(
        "too_many_requests_in_flight",
        "this router holds as many requests as it can; ask again",
    ))
}

/// No worker can take it.
pub(crate) fn refuse(error: ChoiceError) -> ApiError {
    use cairn_routing::WhyNot;
    match error {
        ChoiceError::EmptyPool => ApiError::unavailable("no_engine", error.to_string()),
        ChoiceError::NoneEligible {
            most: WhyNot::TooLong, ..
        } => ApiError::invalid("context_length_exceeded", error.to_string()),
        ChoiceError::NoneEligible { .. } => ApiError::unavailable("no_engine", error.to_string()),
    }
}

/// Names of policies of which the request's text decides.
pub(crate) fn looks_at_text(policy: &str) -> bool {
    matches!(policy, "prefix" | "chwbl" | "session")
}

/// The name of a pool's policy: the router's own word on the pool, the index's, the router's default.
pub(crate) fn policy_name<'a>(router: &'a Router, pool: &'a Pool) -> &'a str {
    let own = router.config.pool.iter().find(|own| own.name == pool.name);
    [own.map_or("", |own| &own.policy), &pool.policy]
        .into_iter()
        .find(|name| !name.is_empty())
        .unwrap_or(&router.config.policy)
}

/// The configured policy of each pool, with its options.
pub(crate) fn policy_of(router: &Router, pool: &Pool) -> Result<PolicyConfig, String> {
    let name = policy_name(router, pool);
    match router.config.pool.iter().find(|own| own.name == pool.name) {
        Some(own) if !own.options.is_empty() => with_options(name, &own.options),
        _ => PolicyConfig::by_name(name).map_err(|e| e.to_string()),
    }
}

/// A policy by its name and options.
pub(crate) fn with_options(name: &str, options: &BTreeMap<String, toml::Value>) -> Result<PolicyConfig, String> {
    let mut table: toml::Table = options.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    table.insert("name".into(), toml::Value::String(name.into()));
    let config: PolicyConfig = table.try_into().map_err(|e: toml::de::Error| e.to_string())?;
    config.build().map_err(|e| e.to_string())?;
    Ok(config)
}
