//! The cost model: from what is known about one worker, in integers, to milliseconds until the first token.
//!
//! Everything here is integer arithmetic over recorded inputs, so that a decision made again from its record gives
//! the same bits on any machine.

use serde::{Deserialize, Serialize};

use crate::Micros;
use crate::occupied::WHOLE;

/// Context length at which attention costs as much per token as all else: 1.4e11 FLOPs per token against 2.62e6 per
/// token and token of context in a 70B model (2 FLOPs per weight; 4 x layers x width per context token).
pub const CONTEXT_SCALE_TOKENS: u64 = 53_435;

/// Work that running answers take from each scheduler step, per sequence: about 0.2 ms of a 70B model's step at long
/// contexts. It also lets an idle worker win against one that streams.
pub const STEP_PER_SEQUENCE_US: u64 = 200;

/// What a millisecond of new prefill work counts for those that come after it on an idle fleet, in percent of itself:
/// little, but a copy that isn't needed still takes memory from others.
pub const PRICE_BASE_PERCENT: u64 = 10;

/// The same on top where every worker always has prefills to do. A newcomer waits for work that is there with the
/// probability that workers are busy, and passes its own wait on to those behind it, so the price grows with that share;
/// the factor was chosen among neighbours between 250 and 400, whose percentiles on public conversations, agents and
/// synthetic mixes differ by little more than chance.
pub const PRICE_BUSY_PERCENT: u64 = 350;

/// The least price where somebody computes the same start already: a burst of one cold prefix would otherwise be computed
/// on every idle worker. At 100 a second copy is made only when waiting for the first costs more than computing it again.
pub const PRICE_ON_ITS_WAY_PERCENT: u64 = 100;

/// Added to the wait of a worker whose load report is stale while others' are fresh, so that it alone is de-weighted.
pub const STALE_REPORT_US: u64 = 20_000;

/// Fixed cost of starting any fetch from another tier.
pub const FETCH_START_US: u64 = 1_000;

/// Fixed part of a KV transfer between two engines before any was seen: one more HTTP leg and the connector's handshake.
pub const TRANSFER_START_US: u32 = 5_000;

fn transfer_start_us() -> u32 {
    TRANSFER_START_US
}

/// Speeds of one worker, rounded to integers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Speeds {
    /// Fixed part of each prefill.
    pub prefill_start_us: u32,
    /// Per token of prefill at no context.
    pub prefill_ns_per_token: u32,
    /// Per token fetched from CPU memory.
    pub cpu_ns_per_token: u32,
    /// Per token fetched from shared storage.
    pub shared_ns_per_token: u32,
    /// Fixed part of moving KV from prefill to decode.
    #[serde(default = "transfer_start_us")]
    pub transfer_start_us: u32,
    /// Per token fetched from a peer or moved from prefill to decode.
    pub transfer_ns_per_token: u32,
    /// A request's usual time from first to last token.
    pub service_us: u64,
}

/// What the model is fed about one worker and one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Inputs {
    /// Prompt length.
    pub prompt_tokens: u32,
    /// Expected answer length.
    pub expected_output: u32,
    /// Reusable in GPU memory, by the committed view.
    pub gpu_tokens: u32,
    /// Further, in CPU memory.
    pub cpu_tokens: u32,
    /// Further, from a peer.
    pub peer_tokens: u32,
    /// Further, in shared storage.
    pub shared_tokens: u32,
    /// Leading tokens that will be there because a request on its way computes them.
    pub speculative_tokens: u32,
    /// How much of the committed credit the engine has lately confirmed, in 1/1024.
    pub trust: u32,
    /// Requests on the worker: all reservations and what the engine reports beyond them.
    pub in_flight: u32,
    /// Those of them that wait for their first token.
    pub waiting: u32,
    /// Prefill work outstanding, in tokens at no context.
    pub queued_work: u64,
    /// How long the head of that queue has been computed already.
    pub head_done_us: u64,
    /// Context tokens of running answers.
    pub context_tokens: u64,
    /// Sequences it runs at once, 0 unknown.
    pub max_num_seqs: u32,
    /// KV capacity in tokens, 0 unknown.
    pub capacity_tokens: u64,
    /// KV use by the engine's own report in 1/1024 of capacity; 0 where unknown.
    pub kv_usage: u32,
    /// Its report is stale while another candidate's is fresh.
    pub stale: bool,
    /// Decisions of this router since it was last chosen, at most [`NEVER_CHOSEN`].
    pub since_chosen: u32,
    /// Prefill work that this router lately gave it, fading over a minute.
    pub recent_work: u64,
    /// What a millisecond of new prefill work counts there for those that come after it, in percent of itself.
    pub price_percent: u32,
    /// What those that waited for a copy of the prompt's start have paid for one here (see `starts`).
    pub paid_us: u64,
    /// Its speeds.
    pub speeds: Speeds,
}

/// Price of new work where workers had prefills to do for `share` of their time, of [`WHOLE`]; `on_its_way` where a
/// request that was sent already computes a start of this one's prompt.
pub(crate) fn price_percent(share: u64, on_its_way: bool) -> u32 {
    let least = if on_its_way { PRICE_ON_ITS_WAY_PERCENT } else { 0 };
    (PRICE_BASE_PERCENT + PRICE_BUSY_PERCENT * share.min(WHOLE) / WHOLE).max(least) as u32
}

/// `since_chosen` of a worker that this router hasn't chosen yet.
pub const NEVER_CHOSEN: u32 = u32::MAX;

/// Full trust in [`Inputs::trust`].
pub const TRUST_FULL: u32 = 1024;

/// What the model says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Terms {
    /// Tokens the worker would compute.
    pub new_tokens: u32,
    /// The same as work, in tokens at no context.
    pub new_work: u64,
    /// Until the prefill starts.
    pub queue_us: u64,
    /// Fetching from other tiers.
    pub fetch_us: u64,
    /// Computing the rest.
    pub prefill_us: u64,
    /// Moving KV to the decode worker; 0 for whole requests.
    pub transfer_us: u64,
    /// What others pay for the new work.
    pub others_us: u64,
    /// What of all this is paid already by those that waited for another copy of the prompt's start.
    pub paid_us: u64,
}

impl Terms {
    /// Estimated time to the first token.
    #[must_use]
    pub fn ttft(&self) -> Micros {
        Micros(self.queue_us + self.fetch_us + self.prefill_us + self.transfer_us)
    }

    /// What the `kv` policy minimises: time to the first token and the price of the work, less what is paid.
    #[must_use]
    pub fn cost(&self) -> Micros {
        Micros((self.ttft().0 + self.others_us).saturating_sub(self.paid_us))
    }
}

/// Prefill work of `new` tokens behind `cached` ones, in tokens at no context: attention grows with the context.
#[must_use]
pub fn work(new: u32, cached: u32) -> u64 {
    let (new, cached) = (u64::from(new), u64::from(cached));
    new + new * (cached + new / 2) / CONTEXT_SCALE_TOKENS
}

fn span(work: u64, ns_per_token: u32) -> u64 {
    work.saturating_mul(u64::from(ns_per_token)) / 1_000
}

impl Inputs {
    /// Applies the model.
    #[must_use]
    pub fn terms(&self) -> Terms {
        let speeds = &self.speeds;
        let most = self.prompt_tokens.saturating_sub(1);
        let trusted = |tokens: u32| (u64::from(tokens) * u64::from(self.trust.min(TRUST_FULL)) / 1024) as u32;
        let gpu = trusted(self.gpu_tokens).max(self.speculative_tokens).min(most);
        let local = gpu
            .max(trusted(self.gpu_tokens.saturating_add(self.cpu_tokens)))
            .min(most);
        let peer = local
            .max(trusted(self.fetched_end().saturating_sub(self.shared_tokens)))
            .min(most);
        let shared = peer.max(trusted(self.fetched_end())).min(most);

        // A fetch that is slower than computing would be a loss, and a nearer tier that is slower than a farther one a
        // mistake of measurement: such a tier counts as fast as the other, no worse.
        let cpu_ns = speeds.cpu_ns_per_token.min(speeds.prefill_ns_per_token);
        let peer_ns = speeds
            .transfer_ns_per_token
            .min(speeds.prefill_ns_per_token)
            .max(cpu_ns);
        let shared_ns = speeds.shared_ns_per_token.min(speeds.prefill_ns_per_token).max(peer_ns);
        let fetch = span(u64::from(local - gpu), cpu_ns)
            + span(u64::from(peer - local), peer_ns)
            + span(u64::from(shared - peer), shared_ns);
        let start = if shared > gpu { FETCH_START_US } else { 0 };
        let prefill_of = |reused: u32| {
            let work = work(self.prompt_tokens - reused, reused);
            (
                work,
                u64::from(speeds.prefill_start_us) + span(work, speeds.prefill_ns_per_token),
            )
        };
        let (with_work, with_us) = prefill_of(shared);
        let (without_work, without_us) = prefill_of(gpu);
        let price = |work: u64| span(work, speeds.prefill_ns_per_token) * u64::from(self.price_percent) / 100;
        let fetches = with_us + fetch + start + price(with_work) <= without_us + price(without_work);
        let (reused, new_work, prefill_us) = if fetches {
            (shared, with_work, with_us)
        } else {
            (gpu, without_work, without_us)
        };
        // Fetched blocks need GPU memory like computed ones.
        let queue_us = self.queue_us(self.prompt_tokens - gpu);
        let fetch_us = if fetches { fetch + start } else { 0 };
        let others_us = price(new_work);
        Terms {
            new_tokens: self.prompt_tokens - reused,
            new_work,
            queue_us,
            fetch_us,
            prefill_us,
            transfer_us: 0,
            others_us,
            paid_us: self.paid_us,
        }
    }

    fn fetched_end(&self) -> u32 {
        self.gpu_tokens
            .saturating_add(self.cpu_tokens)
            .saturating_add(self.shared_tokens)
            .saturating_add(self.peer_tokens)
    }

    /// Time until a new prefill starts: the prefills before it, a free slot, free memory, and the steps it shares.
    fn queue_us(&self, new_tokens: u32) -> u64 {
        let speeds = &self.speeds;
        let ahead = span(self.queued_work, speeds.prefill_ns_per_token)
            + u64::from(self.waiting) * u64::from(speeds.prefill_start_us);
        let ahead = ahead.saturating_sub(self.head_done_us);
        let steps = u64::from(self.in_flight.saturating_sub(self.waiting)) * STEP_PER_SEQUENCE_US;
        let slots = match self.max_num_seqs {
            0 => 0,
            max if self.in_flight < max => 0,
            max => u64::from(self.in_flight - max + 1) * speeds.service_us / u64::from(max),
        };
        let stale = if self.stale { STALE_REPORT_US } else { 0 };
        ahead + steps + slots + self.memory_us(new_tokens) + stale
    }

    /// Wait for KV memory: the part of the capacity that is missing, at the pace at which answers end.
    fn memory_us(&self, new_tokens: u32) -> u64 {
        if self.capacity_tokens == 0 {
            return 0;
        }
        let used = (self.capacity_tokens * u64::from(self.kv_usage.min(1024)) / 1024).max(self.context_tokens);
        let need = used + self.queued_work + u64::from(new_tokens) + u64::from(self.expected_output);
        let missing = need.saturating_sub(self.capacity_tokens).min(self.capacity_tokens);
        (u128::from(missing) * u128::from(self.speeds.service_us) / u128::from(self.capacity_tokens)) as u64
    }

    /// Wait of a decode leg: a slot, memory for the whole context, and the steps it shares.
    #[must_use]
    pub fn decode_us(&self) -> u64 {
        let steps = u64::from(self.in_flight) * STEP_PER_SEQUENCE_US;
        let slots = match self.max_num_seqs {
            0 => 0,
            max if self.in_flight < max => 0,
            max => u64::from(self.in_flight - max + 1) * self.speeds.service_us / u64::from(max),
        };
        steps + slots + self.memory_us(self.prompt_tokens.saturating_sub(self.gpu_tokens))
    }

    /// Moving what a decode worker lacks of the prompt.
    #[must_use]
    pub fn transfer_us(&self) -> u64 {
        let lacking = self.prompt_tokens.saturating_sub(self.gpu_tokens);
        u64::from(self.speeds.transfer_start_us) + span(u64::from(lacking), self.speeds.transfer_ns_per_token)
    }

    /// What computing the prompt here takes from the answers that run here: each waits for the whole prefill.
    #[must_use]
    pub fn disturbance_us(&self, prefill_us: u64) -> u64 {
        let running = u64::from(self.in_flight.saturating_sub(self.waiting));
        // A stalled answer loses tokens it would have sent, but its reader has some already: a quarter of a wait.
        prefill_us.saturating_mul(running) / 4
    }
}
