//! Registration, the contiguous protocol, leases, drains.

use std::time::Duration;

use cairn_index::{BatchOutcome, Incarnation, RegisterOutcome, Seq};
use cairn_proto::v1;

use crate::agent::{Agent, Push, ingest, register, spec};
use crate::harness::{Cluster, admin, eventually};

async fn answers(push: &mut Push, n: usize) -> Vec<BatchOutcome> {
    let mut all = Vec::new();
    while all.len() < n {
        all.extend(push.answers().await.unwrap().into_iter().map(|answer| answer.outcome));
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_node_takes_every_node_has_and_all_agree() {
    let cluster = Cluster::start(3).await;
    let follower = cluster.follower().await;
    let mut agent = Agent::register(vec![cluster.address(follower)], "a").await;
    agent.push_until(40, 20).await;
    cluster.agree().await;
    for i in 0..3 {
        agent.verify(&cluster.address(i), 20).await;
        let audit = agent.audit(&cluster.address(i)).await;
        assert!(audit.found);
        assert_eq!(
            (audit.seq, audit.incarnation, audit.holders[0].blocks),
            (40, agent.incarnation, 800)
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_apply_in_order_only_and_repeats_are_acknowledged() {
    let cluster = Cluster::start(1).await;
    let agent = Agent::register(vec![cluster.address(0)], "a").await;
    let mut push = Push::open(&cluster.address(0)).await.unwrap();
    push.send(vec![
        agent.batch(1, 2),
        agent.batch(3, 2),
        agent.batch(2, 2),
        agent.batch(1, 2),
    ])
    .await;
    let applied = || BatchOutcome::Applied {
        unknown_anchors: vec![],
    };
    let expect = vec![
        applied(),
        BatchOutcome::OutOfOrder { expected: Seq(2) },
        applied(),
        BatchOutcome::Duplicate,
    ];
    assert_eq!(answers(&mut push, 4).await, expect);

    let mut unanchored = agent.batch(3, 2);
    let Some(v1::op::Op::Store(store)) = &mut unanchored.ops[0].op else {
        panic!()
    };
    store.anchor_depth = 7;
    push.send(vec![unanchored]).await;
    assert_eq!(
        answers(&mut push, 1).await,
        vec![BatchOutcome::Applied {
            unknown_anchors: vec![0]
        }]
    );

    let mut stale = agent.batch(4, 2);
    stale.incarnation -= 1;
    let mut stranger = agent.batch(4, 2);
    stranger.source = 999;
    push.send(vec![stale, stranger]).await;
    let fenced = BatchOutcome::Fenced {
        current: Incarnation(agent.incarnation),
    };
    assert_eq!(answers(&mut push, 2).await, vec![fenced, BatchOutcome::UnknownSource]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_pushes_end_the_stream_naming_the_field() {
    let cluster = Cluster::start(1).await;
    let agent = Agent::register(vec![cluster.address(0)], "a").await;
    let mut empty = agent.batch(1, 1);
    empty.ops[0].op = None;
    let mut huge = agent.batch(1, 1);
    huge.ops = vec![huge.ops[0].clone(); 3000];
    for (batches, word) in [
        (vec![empty], "op"),
        (vec![huge], "batch.ops"),
        (vec![agent.batch(1, 0)], "store.keys"),
    ] {
        let mut push = Push::open(&cluster.address(0)).await.unwrap();
        push.send(batches).await;
        let status = push.answers().await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().contains(word), "{status}");
    }
    let mut missing = spec("b", "b");
    missing.pool = None;
    let request = v1::RegisterRequest {
        spec: Some(missing),
        resume_incarnation: 0,
    };
    let status = ingest(&cluster.address(0)).register(request).await.unwrap_err();
    assert!(status.message().contains("spec.pool"), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_agent_is_refused_while_the_first_lives_and_fences_it_later() {
    let cluster = Cluster::start_with(3, |config| {
        config.lease_ms = 3_000;
        config.lease_grace_ms = 60_000;
    })
    .await;
    let addresses: Vec<String> = (0..3).map(|i| cluster.address(i)).collect();
    let mut first = Agent::register(addresses.clone(), "a").await;
    let living = first.renewing(&addresses[0]);
    first.push_until(1, 4).await;
    let other = spec("a", "somebody else");
    let refused = register(&addresses, &other, 0).await.outcome;
    assert_eq!(refused, RegisterOutcome::HeldBy { agent: "a".to_owned() });
    drop(living);

    // The first agent falls silent: its lease lapses, and the worker says so.
    let leader = cluster.leader().await;
    eventually("the lease lapses", || async {
        let status = admin(&cluster.address(leader))
            .status(v1::StatusRequest {})
            .await
            .ok()?
            .into_inner();
        (!status.workers[0].lease_live && status.workers[0].reason == "lease_lapsed").then_some(())
    })
    .await;
    assert_eq!(
        first.credit(&addresses[leader], 1, 4).await.unwrap(),
        64,
        "its blocks stay during the grace"
    );
    let RegisterOutcome::Registered { incarnation, .. } = register(&addresses, &other, 0).await.outcome else {
        panic!()
    };
    let mut push = Push::open(&addresses[leader]).await.unwrap();
    push.send(vec![first.batch(2, 4)]).await;
    assert_eq!(
        answers(&mut push, 1).await,
        vec![BatchOutcome::Fenced { current: incarnation }]
    );
    let renew = vec![v1::Lease {
        source: first.source,
        incarnation: first.incarnation,
    }];
    push.requests
        .send(v1::PushRequest { batches: vec![], renew })
        .await
        .unwrap();
    assert_eq!(
        answers(&mut push, 1).await,
        vec![BatchOutcome::Fenced { current: incarnation }]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lapsed_source_is_restored_when_heard_and_leaves_without_residue_when_not() {
    let cluster = Cluster::start_with(1, |config| {
        config.lease_ms = 1_000;
        config.lease_grace_ms = 5_000;
    })
    .await;
    let address = cluster.address(0);
    let mut agent = Agent::register(vec![address.clone()], "a").await;
    agent.push_until(1, 4).await;
    let live = |wanted: bool| {
        let address = address.clone();
        async move {
            let status = admin(&address).status(v1::StatusRequest {}).await.ok()?.into_inner();
            (status.workers.first()?.lease_live == wanted).then_some(())
        }
    };
    eventually("the lease lapses", || live(false)).await;
    let living = agent.renewing(&address);
    eventually("the lease is restored", || live(true)).await;
    drop(living);
    eventually("the source is removed after the grace", || async {
        let status = admin(&address).status(v1::StatusRequest {}).await.ok()?.into_inner();
        status.workers.is_empty().then_some(())
    })
    .await;
    assert!(!agent.audit(&address).await.found);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewed_sources_never_lapse_through_a_change_of_leader() {
    let mut cluster = Cluster::start_with(3, |config| config.lease_ms = 3_000).await;
    let addresses: Vec<String> = (0..3).map(|i| cluster.address(i)).collect();
    let agent = Agent::register(addresses.clone(), "a").await;
    let leader = cluster.leader().await;
    cluster.stop(leader).await;
    let next = cluster.leader().await;
    let _living = agent.renewing(&addresses[next]);
    // Longer than a lease.
    let begun = std::time::Instant::now();
    let mut looked = 0;
    while looked == 0 || begun.elapsed() < Duration::from_secs(4) {
        if let Ok(status) = admin(&addresses[next]).status(v1::StatusRequest {}).await {
            assert!(status.into_inner().workers[0].lease_live);
            looked += 1;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drains_and_policies_are_set_through_any_node_and_unknown_names_are_told() {
    let cluster = Cluster::start(3).await;
    let addresses: Vec<String> = (0..3).map(|i| cluster.address(i)).collect();
    let agent = Agent::register(addresses.clone(), "a").await;
    let follower = cluster.follower().await;
    let mut client = admin(&addresses[follower]);
    let mut drain = v1::DrainRequest {
        engine_url: "http://a:8000/".to_owned(),
        rank: 0,
        all_ranks: false,
        undo: false,
    };
    assert_eq!(
        client.drain(drain.clone()).await.unwrap().into_inner().workers,
        vec![agent.worker]
    );
    let status = client.status(v1::StatusRequest {}).await.unwrap().into_inner();
    assert!(status.workers[0].draining);
    eventually("every member answers for itself", || async {
        let members = admin(&addresses[follower])
            .members(v1::MembersRequest {})
            .await
            .ok()?
            .into_inner()
            .members;
        let answers = |m: &v1::Member| ["leader", "follower"].contains(&m.role.as_str()) && m.applied_index > 0;
        (members.len() == 3 && members.iter().all(answers)).then_some(())
    })
    .await;
    drain.undo = true;
    client.drain(drain.clone()).await.unwrap();
    drain.engine_url = "http://nobody:1".to_owned();
    let message = client.drain(drain).await.unwrap_err();
    assert!(message.message().contains("http://a:8000#0"), "{message}");

    let policy = |pool: &str| v1::SetPolicyRequest {
        pool: pool.to_owned(),
        policy: "random".to_owned(),
    };
    client.set_policy(policy("pool")).await.unwrap();
    assert_eq!(
        client.set_policy(policy("none")).await.unwrap_err().code(),
        tonic::Code::NotFound
    );

    let remove = v1::RemoveRequest {
        source: agent.source,
        incarnation: agent.incarnation,
    };
    ingest(&addresses[follower]).remove(remove).await.unwrap();
    assert!(!agent.audit(&addresses[cluster.leader().await]).await.found);
}
