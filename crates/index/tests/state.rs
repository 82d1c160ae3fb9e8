//! The state machine: registrations, lifetimes, positions, digests.

#![allow(clippy::unwrap_used)]

#[path = "support/registrations.rs"]
mod support;

use cairn_blocks::{BlockSize, ClusterSeed, Depth};
use cairn_index::{
    BatchOutcome, Command, Confidence, DegradedReason, HolderSpec, Incarnation, IndexState, LeaseState, LogIndex, Op,
    Query, Reach, RegisterOutcome, Reply, Seq, SourceId, SourceSpec, Tier, WorkerId,
};
use support::*;

fn apply(state: &mut IndexState, command: &Command) -> Reply {
    let at = LogIndex(state.applied().0 + 1);
    state.apply(at, command)
}

fn gpu_tokens(state: &IndexState, worker: WorkerId, range: std::ops::Range<u64>) -> u32 {
    let keys = keys(range);
    let mut out = Vec::new();
    let query = Query {
        pool: "llama",
        keys: &keys,
        prompt_tokens: keys.len() as u32 * 16 + 1,
        block_size: BlockSize::new(16).unwrap(),
    };
    state.overlap(&query, &mut out);
    out.iter().find(|o| o.worker == worker).map_or(0, |o| o.overlap.gpu)
}

#[test]
fn the_first_seed_of_a_cluster_stays() {
    let mut state = IndexState::new();
    for (cluster, seed) in [("a", 7), ("b", 8)] {
        apply(
            &mut state,
            &Command::InitCluster {
                cluster: cluster.into(),
                seed: ClusterSeed(seed),
            },
        );
    }
    assert_eq!(
        (state.registry().seed, state.registry().cluster.as_str()),
        (Some(ClusterSeed(7)), "a")
    );
}

#[test]
fn an_incarnation_is_the_log_index_of_its_registration() {
    let mut state = IndexState::new();
    state.skip_to(LogIndex(41));
    let first = register(&mut state, spec(1));
    assert_eq!(
        (first.incarnation, first.seq, first.resumed),
        (Incarnation(42), Seq(0), false)
    );
    assert_eq!(register(&mut state, spec(1)).incarnation, Incarnation(43));
}

#[test]
fn inv_05_batches_apply_in_order_once_and_only_in_their_lifetime() {
    let mut state = IndexState::new();
    let first = register(&mut state, spec(1));
    let op = || vec![store(first.holders[0], &keys(0..4))];
    assert_eq!(
        push(&mut state, &first, 2, op()),
        BatchOutcome::OutOfOrder { expected: Seq(1) }
    );
    assert_eq!(push(&mut state, &first, 1, op()), APPLIED);
    assert_eq!(
        push(
            &mut state,
            &first,
            1,
            vec![Op::Clear {
                holder: first.holders[0]
            }]
        ),
        BatchOutcome::Duplicate
    );
    assert_eq!(
        push(&mut state, &first, 3, op()),
        BatchOutcome::OutOfOrder { expected: Seq(2) }
    );
    assert_eq!(gpu_tokens(&state, first.worker, 0..4), 64);
    let second = register(&mut state, spec(1));
    assert_eq!(
        push(&mut state, &first, 2, op()),
        BatchOutcome::Fenced {
            current: second.incarnation
        }
    );
    let unknown = Registered {
        source: SourceId(99),
        ..first.clone()
    };
    assert_eq!(push(&mut state, &unknown, 1, op()), BatchOutcome::UnknownSource);
    assert_eq!(gpu_tokens(&state, first.worker, 0..4), 0);
}

#[test]
fn a_new_lifetime_keeps_ids_and_drops_the_old_blocks_at_once() {
    let mut state = IndexState::new();
    let first = register(&mut state, spec(1));
    push(
        &mut state,
        &first,
        1,
        vec![
            store(first.holders[0], &keys(0..40)),
            store(first.holders[1], &keys(0..40)),
        ],
    );
    let second = register(&mut state, spec(1));
    assert_eq!(
        (second.source, second.worker, &second.holders),
        (first.source, first.worker, &first.holders)
    );
    assert!(!second.resumed);
    assert_eq!(state.residency().known_blocks(), 0);
    assert_eq!(gpu_tokens(&state, first.worker, 0..40), 0);
}

#[test]
fn an_agent_with_the_mirror_resumes_its_lifetime() {
    let mut state = IndexState::new();
    let first = register(&mut state, spec(1));
    push(&mut state, &first, 1, vec![store(first.holders[0], &keys(0..40))]);
    let again = registered(outcome(&mut state, spec(1), Some(first.incarnation)));
    assert_eq!(
        again,
        Registered {
            seq: Seq(1),
            resumed: true,
            ..first.clone()
        }
    );
    assert_eq!(gpu_tokens(&state, first.worker, 0..40), 640);
    // Another lifetime's mirror, or other caches, begin anew.
    let stale = registered(outcome(&mut state, spec(1), Some(Incarnation(first.incarnation.0 + 7))));
    assert!(!stale.resumed);
    let mut other = spec(1);
    other.holders.pop();
    let other = registered(outcome(&mut state, other, Some(stale.incarnation)));
    assert!(!other.resumed && other.holders.len() == 1);
    assert_eq!(gpu_tokens(&state, first.worker, 0..40), 0);
}

#[test]
fn a_second_agent_is_refused_while_the_lease_lives_and_fences_after() {
    let mut state = IndexState::new();
    let first = register(&mut state, spec(1));
    push(&mut state, &first, 1, vec![store(first.holders[0], &keys(0..4))]);
    let rival = SourceSpec {
        agent: "rival".into(),
        ..spec(1)
    };
    let held = RegisterOutcome::HeldBy {
        agent: "agent-1".into(),
    };
    assert_eq!(outcome(&mut state, rival.clone(), Some(first.incarnation)), held);
    assert_eq!(gpu_tokens(&state, first.worker, 0..4), 64);

    let lapse = Command::LapseLease {
        source: first.source,
        incarnation: first.incarnation,
    };
    assert_eq!(apply(&mut state, &lapse), Reply::Done);
    let lapsed = &state.registry().sources[&first.source];
    assert_eq!(lapsed.lease, LeaseState::Lapsed(state.applied()));
    assert_eq!(lapsed.claim(), Confidence::Degraded(DegradedReason::LeaseLapsed));
    // The mirror of the other agent is not this one's.
    let taken = registered(outcome(&mut state, rival, Some(first.incarnation)));
    assert!(!taken.resumed && taken.worker == first.worker);
    assert_eq!(
        push(&mut state, &first, 2, vec![]),
        BatchOutcome::Fenced {
            current: taken.incarnation
        }
    );
    assert_eq!(apply(&mut state, &lapse), Reply::Unknown);
}

#[test]
fn a_source_of_another_name_takes_a_worker_over_only_after_the_lease() {
    let mut state = IndexState::new();
    let first = register(&mut state, spec(1));
    let renamed = SourceSpec {
        name: "other".into(),
        agent: "rival".into(),
        ..spec(1)
    };
    assert_eq!(
        outcome(&mut state, renamed.clone(), None),
        RegisterOutcome::HeldBy {
            agent: "agent-1".into()
        }
    );
    apply(
        &mut state,
        &Command::LapseLease {
            source: first.source,
            incarnation: first.incarnation,
        },
    );
    let second = register(&mut state, renamed);
    assert_eq!(second.worker, first.worker);
    assert_ne!(second.source, first.source);
    assert_eq!(state.registry().sources.len(), 1);
    assert_eq!(state.registry().workers.len(), 1);
    assert_eq!(state.registry().holders.len(), 2);
}

#[test]
fn a_restored_lease_gives_the_sources_own_word_again() {
    let mut state = IndexState::new();
    let first = register(&mut state, spec(1));
    assert_eq!(
        push(&mut state, &first, 1, vec![Op::Confidence(Confidence::Exact)]),
        APPLIED
    );
    let (source, incarnation) = (first.source, first.incarnation);
    apply(&mut state, &Command::LapseLease { source, incarnation });
    apply(&mut state, &Command::RestoreLease { source, incarnation });
    assert_eq!(state.registry().sources[&source].claim(), Confidence::Exact);
}

#[test]
fn inv_06_a_removed_source_leaves_nothing_and_its_ids_never_come_back() {
    let mut state = IndexState::new();
    let kept = register(&mut state, spec(1));
    push(&mut state, &kept, 1, vec![store(kept.holders[0], &keys(0..10))]);
    let before = (state.residency().known_blocks(), state.residency().weight());
    let gone = register(&mut state, spec(2));
    push(
        &mut state,
        &gone,
        1,
        vec![
            store(gone.holders[0], &keys(0..50)),
            store(gone.holders[1], &keys(0..60)),
        ],
    );
    let remove = Command::RemoveSource {
        source: gone.source,
        incarnation: gone.incarnation,
    };
    assert_eq!(apply(&mut state, &remove), Reply::Done);
    assert_eq!(apply(&mut state, &remove), Reply::Unknown);
    assert_eq!((state.residency().known_blocks(), state.residency().weight()), before);
    assert!(state.audit(gone.source).is_none());
    assert_eq!(state.registry().holders.len(), 2);
    assert_eq!(push(&mut state, &gone, 2, vec![]), BatchOutcome::UnknownSource);
    let next = register(&mut state, spec(2));
    assert!(next.source != gone.source && next.worker != gone.worker);
    assert_eq!(next.holders, gone.holders, "cache ids are dense");
}

#[test]
fn a_pool_goes_with_its_last_worker_unless_an_operator_set_its_policy() {
    let mut state = IndexState::new();
    let policy = |policy: &str| Command::SetPolicy {
        pool: "llama".into(),
        policy: policy.into(),
    };
    assert_eq!(apply(&mut state, &policy("kv")), Reply::Unknown);
    let first = register(&mut state, spec(1));
    let remove = Command::RemoveSource {
        source: first.source,
        incarnation: first.incarnation,
    };
    apply(&mut state, &remove);
    assert!(state.registry().pools.is_empty());
    let first = register(&mut state, spec(1));
    assert_eq!(apply(&mut state, &policy("prefix")), Reply::Done);
    let remove = Command::RemoveSource {
        source: first.source,
        incarnation: first.incarnation,
    };
    apply(&mut state, &remove);
    assert_eq!(state.registry().pools["llama"].policy, "prefix");
}

#[test]
fn draining_survives_a_restart_of_the_engine() {
    let mut state = IndexState::new();
    let first = register(&mut state, spec(1));
    let drain = |worker| Command::SetDraining { worker, draining: true };
    assert_eq!(apply(&mut state, &drain(first.worker)), Reply::Done);
    assert_eq!(apply(&mut state, &drain(WorkerId(77))), Reply::Unknown);
    register(&mut state, spec(1));
    assert!(state.registry().workers[&first.worker].draining);
}

#[test]
fn caches_of_others_are_not_touched() {
    let mut state = IndexState::new();
    let (a, b) = (register(&mut state, spec(1)), register(&mut state, spec(2)));
    push(&mut state, &a, 1, vec![store(a.holders[0], &keys(0..8))]);
    let holder = a.holders[0];
    let ops = vec![
        Op::Clear { holder },
        Op::Remove {
            holder,
            key: keys(0..8)[7],
            depth: Depth(8),
            count: 8,
        },
        store(holder, &keys(50..60)),
    ];
    assert_eq!(push(&mut state, &b, 1, ops), APPLIED);
    assert_eq!(state.counters().foreign_holders, 3);
    assert_eq!(gpu_tokens(&state, a.worker, 0..8), 128);
}

#[test]
fn an_unknown_anchor_consumes_the_batch_and_is_named() {
    let mut state = IndexState::new();
    let first = register(&mut state, spec(1));
    let holder = first.holders[0];
    let below = |n: u64| Op::Store {
        holder,
        anchor: keys(n..n + 1)[0],
        anchor_depth: Depth(n as u32 + 1),
        skip: 0,
        keys: keys(n + 1..n + 2),
    };
    let ops = vec![below(6), store(holder, &keys(0..4)), below(3), below(9)];
    assert_eq!(
        push(&mut state, &first, 1, ops),
        BatchOutcome::Applied {
            unknown_anchors: vec![0, 3]
        }
    );
    assert_eq!(gpu_tokens(&state, first.worker, 0..10), 80);
    // The other cache of the same source may hang below it, but another source's may not.
    let cpu = Op::Store {
        holder: first.holders[1],
        anchor: keys(3..4)[0],
        anchor_depth: Depth(4),
        skip: 0,
        keys: keys(4..6),
    };
    assert_eq!(push(&mut state, &first, 2, vec![cpu]), APPLIED);
}

#[test]
fn contradictions_are_refused_with_their_remedy() {
    let mut state = IndexState::new();
    register(&mut state, spec(1));
    let mut cases: Vec<(SourceSpec, &str)> = Vec::new();
    let mut case = |change: &dyn Fn(&mut SourceSpec), says: &'static str| {
        let mut spec = spec(2);
        change(&mut spec);
        cases.push((spec, says));
    };
    case(&|s| s.pool.block_size = BlockSize::new(32).unwrap(), "configure 16");
    case(&|s| s.name.clear(), "source's name is empty");
    case(&|s| s.agent.clear(), "agent's id is empty");
    case(&|s| s.pool.name.clear(), "pool's name is empty");
    case(&|s| s.worker.engine_url.clear(), "engine's URL is empty");
    case(&|s| s.pool.models.clear(), "no model name");
    case(&|s| s.pool.models = vec!["m".into(); 1000], "256 are allowed");
    case(&|s| s.name = "n".repeat(5000), "shorten it");
    case(&|s| s.worker.host = "h".repeat(5000), "shorten it");
    case(&|s| s.worker.adapters = vec!["a".into(); 9999], "adapters");
    case(&|s| s.worker.rank = 1, "rank 1 of 1");
    case(&|s| s.worker.ranks = 0, "rank 0 of 0");
    case(&|s| s.worker.engine_block_size = 0, "block size 0");
    case(&|s| s.holders.clear(), "names 0 caches");
    case(&|s| s.holders[1].tier = Tier::Gpu, "two caches of tier Gpu");
    case(
        &|s| s.holders[0].reach = Reach::Pool,
        "reachable by its own worker only",
    );
    case(&|s| s.holders[0].fetch_unit = 0, "fetch unit 0");
    let before = state.digest();
    for (spec, says) in cases {
        match outcome(&mut state, spec, None) {
            RegisterOutcome::Invalid { reason } => assert!(reason.contains(says), "{reason} / {says}"),
            other => panic!("{other:?} / {says}"),
        }
    }
    assert_eq!(state.digest(), before, "a refused registration changes nothing");
    // Alone in its pool, a source may change the block size.
    let mut only = spec(1);
    only.pool.block_size = BlockSize::new(32).unwrap();
    register(&mut state, only);
    assert_eq!(state.registry().pools["llama"].spec.block_size.tokens(), 32);
}

#[test]
fn a_pool_is_widened_by_its_workers() {
    let mut state = IndexState::new();
    register(&mut state, spec(1));
    let mut second = spec(2);
    second.pool.models = vec!["llama".into(), "llama-latest".into()];
    second.pool.max_model_len = Some(8192);
    second.pool.model_root = Some("/models/llama".into());
    register(&mut state, second);
    let pool = &state.registry().pools["llama"].spec;
    assert_eq!(pool.models, ["llama", "llama-latest"]);
    assert_eq!(
        (pool.max_model_len, pool.model_root.as_deref()),
        (Some(8192), Some("/models/llama"))
    );
}

#[test]
fn the_digest_covers_blocks_positions_and_registry() {
    let mut state = IndexState::new();
    let mut seen = vec![state.digest()];
    let mut differs = |state: &IndexState| {
        assert!(!seen.contains(&state.digest()));
        seen.push(state.digest());
    };
    let first = register(&mut state, spec(1));
    differs(&state);
    push(&mut state, &first, 1, vec![]);
    differs(&state);
    push(&mut state, &first, 2, vec![store(first.holders[0], &keys(0..3))]);
    differs(&state);
    push(&mut state, &first, 3, vec![store(first.holders[1], &keys(0..3))]);
    differs(&state);
    push(&mut state, &first, 4, vec![Op::Confidence(Confidence::Exact)]);
    differs(&state);
    apply(
        &mut state,
        &Command::SetDraining {
            worker: first.worker,
            draining: true,
        },
    );
    differs(&state);
    apply(
        &mut state,
        &Command::LapseLease {
            source: first.source,
            incarnation: first.incarnation,
        },
    );
    differs(&state);
}

#[test]
fn an_audit_tells_what_a_mirror_would_compute() {
    let mut state = IndexState::new();
    let first = register(&mut state, spec(1));
    push(&mut state, &first, 1, vec![store(first.holders[0], &keys(0..30))]);
    let ops = vec![Op::Remove {
        holder: first.holders[0],
        key: keys(29..30)[0],
        depth: Depth(30),
        count: 10,
    }];
    push(&mut state, &first, 2, ops);
    let mut mirror = cairn_index::HolderDigest::default();
    mirror.add_all(&keys(0..30));
    keys(20..30).into_iter().for_each(|key| mirror.remove(key));
    let audit = state.audit(first.source).unwrap();
    assert_eq!((audit.incarnation, audit.seq), (first.incarnation, Seq(2)));
    assert_eq!(audit.holders[0], (first.holders[0], mirror));
    assert_eq!(audit.holders[1].1, cairn_index::HolderDigest::default());
}

#[test]
fn holders_of_a_new_lifetime_may_differ() {
    let mut state = IndexState::new();
    register(&mut state, spec(1));
    register(&mut state, spec(2));
    let mut more = spec(1);
    more.holders.push(HolderSpec {
        tier: Tier::Shared,
        fetch_unit: 256,
        reach: Reach::Pool,
    });
    let more = register(&mut state, more);
    let mut ids: Vec<u32> = more.holders.iter().map(|h| h.0).collect();
    ids.sort_unstable();
    assert_eq!(ids, [0, 1, 4]);
}
