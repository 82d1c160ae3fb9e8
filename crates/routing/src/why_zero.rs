//! Why a worker gets no credit for a request, as far as this router can tell.

use cairn_index::{Confidence, DegradedReason};
use serde::Serialize;

use crate::{KeySource, ViewState};

/// One thing that leads to no credit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WhyZero {
    /// The prompt has no full block.
    PromptShorterThanBlock,
    /// Its keys end at once, before media without a stable identity or because tokenising ran out of time.
    NoKeys,
    /// Keys are made from text since the tokenizer is away or its template took no such messages.
    NoTokenizer,
    /// This router has no view of the index.
    NoView,
    /// The worker's events don't come, so its cache is guessed.
    WorkerSilent,
    /// The worker's block size, tokenizer or hashes don't agree with its pool.
    WorkerMismatch,
    /// The worker is being brought back in step.
    WorkerCatchingUp,
    /// The worker holds nothing at all.
    CacheEmpty,
    /// It holds blocks, but not the prompt's first one: another salt, adapter or prompt start, or it was evicted.
    FirstBlockMissing,
    /// It holds fewer leading tokens than it can serve at once.
    BelowFetchUnit,
    /// Its engine keeps reusing less than the index says, so it isn't believed.
    NotTrusted,
}

impl WhyZero {
    /// What it means and what to do.
    #[must_use]
    pub fn advice(self) -> &'static str {
        match self {
            Self::PromptShorterThanBlock => "the prompt is shorter than one block; nothing of it can be reused",
            Self::NoKeys => "no block of the prompt could be named; check media identities and the tokenizer's budget",
            Self::NoTokenizer => {
                "the prompt's tokens aren't known: no tokenizer (give its directory to the router), or its template refused \
                 the messages; `degraded` says which"
            }
            Self::NoView => "the router has no view of the index; check that index nodes are reachable",
            Self::WorkerSilent => {
                "the engine publishes no KV events; start it with event publishing and check its agent"
            }
            Self::WorkerMismatch => "the engine's block size, tokenizer or hashes differ from its pool's; run doctor",
            Self::WorkerCatchingUp => "the agent is repairing its event stream; credit returns when it is in step",
            Self::CacheEmpty => "the engine holds no block: it is new, was restarted, or its cache was reset",
            Self::FirstBlockMissing => {
                "the engine holds other prefixes: check salt, adapter and the start of the prompt, or it was evicted"
            }
            Self::BelowFetchUnit => "the match is shorter than the engine's own block or the tier's chunk",
            Self::NotTrusted => "the engine reported far fewer cached tokens than predicted; see its drift",
        }
    }
}

/// What `why_zero` looks at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZeroFacts {
    /// Prompt length.
    pub prompt_tokens: u32,
    /// Canonical block size.
    pub block_tokens: u32,
    /// Keys that were made.
    pub keys: usize,
    /// What they were made from.
    pub key_source: KeySource,
    /// State of the view.
    pub view: ViewState,
    /// What the index claims about the worker.
    pub confidence: Confidence,
    /// Blocks that the worker holds, whatever their chain.
    pub held_blocks: u64,
    /// Whether it holds the prompt's first block.
    pub first_block: bool,
    /// Belief in its predictions, in 1/1024.
    pub trust: u32,
}

/// Reasons for no credit, the most decisive first; empty where there is none to be seen.
#[must_use]
pub fn why_zero(facts: &ZeroFacts) -> Vec<WhyZero> {
    let mut reasons = Vec::new();
    let mut say = |when: bool, why: WhyZero| {
        if when {
            reasons.push(why);
        }
    };
    say(
        facts.prompt_tokens < facts.block_tokens.max(1) + 1,
        WhyZero::PromptShorterThanBlock,
    );
    say(
        facts.keys == 0 && facts.prompt_tokens > facts.block_tokens,
        WhyZero::NoKeys,
    );
    say(facts.key_source == KeySource::Text, WhyZero::NoTokenizer);
    say(facts.view == ViewState::Absent, WhyZero::NoView);
    match facts.confidence {
        Confidence::Exact => {}
        Confidence::Degraded(DegradedReason::Silent | DegradedReason::NoEvents) => say(true, WhyZero::WorkerSilent),
        Confidence::Degraded(DegradedReason::Mismatch) => say(true, WhyZero::WorkerMismatch),
        Confidence::Degraded(
            DegradedReason::Gap
            | DegradedReason::Replaying
            | DegradedReason::Hybrid
            | DegradedReason::LeaseLapsed
            | DegradedReason::Bounded,
        ) => say(true, WhyZero::WorkerCatchingUp),
    }
    say(facts.held_blocks == 0, WhyZero::CacheEmpty);
    let named = facts.keys > 0 && facts.key_source != KeySource::Text;
    say(
        facts.held_blocks > 0 && named && !facts.first_block,
        WhyZero::FirstBlockMissing,
    );
    say(facts.first_block && facts.trust < 64, WhyZero::NotTrusted);
    say(facts.first_block && facts.trust >= 64, WhyZero::BelowFetchUnit);
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_named_and_the_most_decisive_comes_first() {
        let fine = ZeroFacts {
            prompt_tokens: 1_000,
            block_tokens: 16,
            keys: 62,
            key_source: KeySource::Exact,
            view: ViewState::Current,
            confidence: Confidence::Exact,
            held_blocks: 500,
            first_block: false,
            trust: 1024,
        };
        let check =
            |facts: ZeroFacts, expect: WhyZero| assert_eq!(why_zero(&facts).first(), Some(&expect), "{facts:?}");
        check(fine, WhyZero::FirstBlockMissing);
        check(ZeroFacts { held_blocks: 0, ..fine }, WhyZero::CacheEmpty);
        check(
            ZeroFacts {
                first_block: true,
                ..fine
            },
            WhyZero::BelowFetchUnit,
        );
        check(
            ZeroFacts {
                first_block: true,
                trust: 16,
                ..fine
            },
            WhyZero::NotTrusted,
        );
        check(
            ZeroFacts {
                prompt_tokens: 16,
                keys: 1,
                ..fine
            },
            WhyZero::PromptShorterThanBlock,
        );
        check(ZeroFacts { keys: 0, ..fine }, WhyZero::NoKeys);
        check(
            ZeroFacts {
                key_source: KeySource::Text,
                ..fine
            },
            WhyZero::NoTokenizer,
        );
        check(
            ZeroFacts {
                view: ViewState::Absent,
                ..fine
            },
            WhyZero::NoView,
        );
        check(
            ZeroFacts {
                confidence: Confidence::Degraded(DegradedReason::Silent),
                ..fine
            },
            WhyZero::WorkerSilent,
        );
    }
}
