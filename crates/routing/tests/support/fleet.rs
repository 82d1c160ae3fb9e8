//! Small fleets for the tests of this crate.
#![allow(clippy::unwrap_used, missing_docs, dead_code)]

use cairn_blocks::BlockKey;
use cairn_index::WorkerId;
use cairn_routing::{Choice, Micros, Plan, RequestFacts, RouterName, Routing, RoutingConfig, WorkerFacts};

pub const POOL: &str = "pool";

pub fn workers(n: u32) -> Vec<WorkerFacts> {
    (0..n).map(|w| WorkerFacts::new(WorkerId(w), POOL)).collect()
}

pub fn named(name: &str, seed: u64, workers: &[WorkerFacts]) -> Routing {
    let config = RoutingConfig {
        router: RouterName(name.to_owned()),
        boot: 1,
        seed,
        identity_seed: 77,
        policies: Vec::new(),
    };
    let mut routing = Routing::new(config).unwrap();
    for facts in workers {
        routing.set_worker(Micros(0), facts.clone());
    }
    routing
}

pub fn core(seed: u64, workers: &[WorkerFacts]) -> Routing {
    named("router", seed, workers)
}

pub fn request<'a>(prompt_tokens: u32) -> RequestFacts<'a> {
    RequestFacts {
        pool: POOL,
        prompt_tokens,
        block_tokens: 16,
        expected_output: 100,
        ..RequestFacts::default()
    }
}

/// Keys of a prompt of `family`: `n` blocks.
pub fn keys(family: u64, n: u64) -> Vec<BlockKey> {
    let mut x = family.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            BlockKey(x)
        })
        .collect()
}

pub fn whole(choice: &Choice) -> WorkerId {
    match choice.plan {
        Plan::Whole { worker } => worker,
        Plan::Split { .. } => panic!("a split where none was asked for"),
    }
}

/// Keeps a request in flight for the rest of a test.
pub fn keep(ticket: cairn_routing::Ticket) {
    let _ = ticket;
}
