//! Nodes that die, pause, lose their disks or come back: nothing acknowledged is lost, and all copies agree.

use std::time::{Duration, Instant};

use cairn_index_node::{Config, start};
use cairn_proto::v1;

use crate::agent::Agent;
use crate::child::{self, ChildNode};
use crate::harness::{Cluster, PATIENCE, admin, channel, eventually, node_config};
use crate::watch::Watch;

const BLOCKS: u64 = 8;

fn addresses(nodes: &[ChildNode]) -> Vec<String> {
    nodes.iter().map(ChildNode::address).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_the_leader_or_a_follower_under_writes_loses_no_acknowledged_batch() {
    let directory = tempfile::tempdir().unwrap();
    let mut nodes = child::three(directory.path()).await;
    let mut agent = Agent::register(addresses(&nodes), "a").await;
    for round in 1..=2u64 {
        let leader = child::leader(&nodes).await;
        let victim = if round == 1 { leader } else { (leader + 1) % 3 };
        let mut upto = agent.acked + 20;
        agent.push_until(upto, BLOCKS).await;
        nodes[victim].kill();
        let killed = Watch::start();
        upto += 20;
        agent.push_until(upto, BLOCKS).await;
        killed.within(Duration::from_secs(10), "writes go on");
        nodes[victim].restart();
        child::agree(&nodes).await;
    }
    for node in &nodes {
        agent.verify(&node.address(), BLOCKS).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_all_nodes_at_once_loses_no_acknowledged_batch() {
    let directory = tempfile::tempdir().unwrap();
    let mut nodes = child::three(directory.path()).await;
    let mut agent = Agent::register(addresses(&nodes), "a").await;
    let rounds: u64 = std::env::var("CAIRN_CRASH_ROUNDS").map_or(3, |rounds| rounds.parse().unwrap());
    for round in 1..=rounds {
        agent.push_until(round * 15, BLOCKS).await;
        let (acked, incarnation) = (agent.acked, agent.incarnation);
        // More is on its way when the power goes.
        let writer = tokio::spawn(async move {
            let _ = tokio::time::timeout(Duration::from_millis(100), agent.push_until(acked + 1000, BLOCKS)).await;
            agent
        });
        tokio::time::sleep(Duration::from_millis(60)).await;
        nodes.iter_mut().for_each(ChildNode::kill);
        agent = writer.await.unwrap();
        nodes.iter_mut().for_each(ChildNode::restart);
        let restarted = Watch::start();
        child::leader(&nodes).await;
        restarted.within(Duration::from_secs(20), "a leader");
        child::agree(&nodes).await;
        for node in &nodes {
            agent.verify(&node.address(), BLOCKS).await;
            let audit = agent.audit(&node.address()).await;
            assert!(
                audit.seq >= agent.acked && audit.incarnation == incarnation,
                "{audit:?}"
            );
        }
        agent.acked = agent.audit(&nodes[0].address()).await.seq;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_keeps_a_quorum_and_every_batch() {
    let mut cluster = Cluster::start(3).await;
    let all: Vec<String> = (0..3).map(|i| cluster.address(i)).collect();
    let mut agent = Agent::register(all.clone(), "a").await;
    for i in 0..3 {
        cluster.stop(i).await;
        let upto = agent.acked + 10;
        agent.push_until(upto, BLOCKS).await;
        cluster.restart(i).await;
        cluster.agree().await;
    }
    for address in &all {
        agent.verify(address, BLOCKS).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_cluster_answers_exactly_again_and_no_agent_is_asked() {
    let mut cluster = Cluster::start(3).await;
    let all: Vec<String> = (0..3).map(|i| cluster.address(i)).collect();
    let mut agent = Agent::register(all.clone(), "a").await;
    agent.push_until(30, BLOCKS).await;
    let (_, digest) = cluster.agree().await;
    for i in 0..3 {
        cluster.stop(i).await;
    }
    for i in 0..3 {
        cluster.restart(i).await;
    }
    cluster.leader().await;
    assert_eq!(cluster.agree().await.1, digest);
    for address in &all {
        agent.verify(address, BLOCKS).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wiped_member_under_its_old_id_is_refused_and_the_others_go_on() {
    let mut cluster = Cluster::start(3).await;
    let all: Vec<String> = (0..3).map(|i| cluster.address(i)).collect();
    let mut agent = Agent::register(all.clone(), "a").await;
    agent.push_until(10, BLOCKS).await;
    let victim = cluster.follower().await;
    cluster.stop(victim).await;
    std::fs::remove_dir_all(&cluster.configs[victim].data_dir).unwrap();
    let config = cluster.configs[victim].clone();
    let mut wiped = eventually("the port is free", || async { start(config.clone()).await.ok() }).await;
    let words = tokio::time::timeout(PATIENCE, wiped.wait())
        .await
        .unwrap()
        .unwrap_err()
        .to_string();
    for word in ["data_dir is empty", "new node_id", "members replace"] {
        assert!(words.contains(word), "{words}");
    }
    agent.push_until(20, BLOCKS).await;
    let leader = cluster.leader().await;
    let seen = eventually("the others see that it was emptied", || async {
        let status = admin(&all[leader])
            .status(v1::StatusRequest {})
            .await
            .ok()?
            .into_inner();
        status.members.into_iter().find(|m| m.role == "emptied")
    })
    .await;
    assert_eq!(seen.id, cluster.configs[victim].node_id);
    wiped.stop().await;

    // The remedy that the message names.
    let newcomer = cluster.joiner(9, "fresh").await;
    let request = v1::ReplaceMemberRequest {
        old_id: cluster.configs[victim].node_id,
        new_id: 9,
        new_address: cluster.address(newcomer),
    };
    let members = admin(&all[leader])
        .replace_member(request)
        .await
        .unwrap()
        .into_inner()
        .members;
    assert_eq!(members.len(), 3);
    cluster.agree().await;
    agent.verify(&cluster.address(newcomer), BLOCKS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_leader_says_how_old_its_answers_are_and_is_superseded() {
    let directory = tempfile::tempdir().unwrap();
    let nodes = child::three(directory.path()).await;
    let mut agent = Agent::register(addresses(&nodes), "a").await;
    agent.push_until(5, BLOCKS).await;
    let paused = child::leader(&nodes).await;
    nodes[paused].signal("-STOP");
    let others: Vec<String> = (0..3).filter(|i| *i != paused).map(|i| nodes[i].address()).collect();
    agent.addresses = others;
    tokio::time::sleep(Duration::from_secs(4)).await;
    agent.push_until(10, BLOCKS).await;
    nodes[paused].signal("-CONT");
    // Whatever it answers now is either old and says so, or has what was acknowledged meanwhile.
    let request = || v1::OverlapRequest {
        pool: "pool".to_owned(),
        keys: crate::agent::keys(agent.source, 10, BLOCKS),
        prompt_tokens: u32::MAX,
    };
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        let mut client = v1::feed_client::FeedClient::new(channel(&nodes[paused].address()));
        if let Ok(reply) = client.overlap(request()).await {
            let reply = reply.into_inner();
            let fresh = reply.workers.iter().any(|w| u64::from(w.gpu_tokens) == BLOCKS * 16);
            assert!(
                fresh || reply.quorum_age_ms > 1_000,
                "stale and {} ms old",
                reply.quorum_age_ms
            );
        }
    }
    child::agree(&nodes).await;
    agent.verify(&nodes[paused].address(), BLOCKS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_quorum_nothing_is_acknowledged_and_reads_say_their_age() {
    let mut cluster = Cluster::start(3).await;
    let leader = cluster.leader().await;
    let all: Vec<String> = (0..3).map(|i| cluster.address(i)).collect();
    let mut agent = Agent::register(all.clone(), "a").await;
    agent.push_until(3, BLOCKS).await;
    cluster.agree().await;
    for i in (0..3).filter(|i| *i != leader) {
        cluster.stop(i).await;
    }
    let stuck = tokio::time::timeout(Duration::from_secs(3), agent.push_until(4, BLOCKS)).await;
    assert!(stuck.is_err() && agent.acked == 3);
    let reply = eventually("the node notices", || async {
        let request = v1::OverlapRequest {
            pool: "pool".to_owned(),
            keys: vec![],
            prompt_tokens: 1,
        };
        let mut client = v1::feed_client::FeedClient::new(channel(&all[leader]));
        let reply = client.overlap(request).await.ok()?.into_inner();
        (reply.quorum_age_ms > 2_000).then_some(reply)
    })
    .await;
    assert_eq!(reply.workers.len(), 1, "it still serves what it has");
    assert_eq!(agent.credit(&all[leader], 3, BLOCKS).await.unwrap(), 128);
    for i in (0..3).filter(|i| *i != leader) {
        cluster.restart(i).await;
    }
    agent.push_until(4, BLOCKS).await;
    cluster.agree().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_and_changes_of_members_go_on_without_a_dead_member_and_it_catches_up_later() {
    // Log behind snapshots may be cut by bytes here, so that the member is away for "long" after seconds.
    let mut cluster = Cluster::start_with(3, |config| {
        config.snapshot_after_mib = 1;
        config.keep_log_mib_max = 1;
    })
    .await;
    let dead = cluster.follower().await;
    cluster.stop(dead).await;
    let leader = cluster.leader().await;
    let all: Vec<String> = (0..3).map(|i| cluster.address(i)).collect();
    let mut agent = Agent::register(vec![all[leader].clone()], "a").await;
    // 6 MiB of block changes.
    agent.push_until(400, 2_000).await;
    // The store grows by segments of 8 MiB: this bounds what lies on disk, not what the log holds.
    eventually("the log's store stays small although a member is away", || async {
        let member = cluster.nodes[leader].as_ref().unwrap().member();
        (member.log_bytes < 64 << 20).then_some(())
    })
    .await;
    let newcomer = cluster.joiner(7, "seven").await;
    let request = v1::AddMemberRequest {
        id: 7,
        address: cluster.address(newcomer),
    };
    let members = admin(&all[leader])
        .add_member(request)
        .await
        .unwrap()
        .into_inner()
        .members;
    assert_eq!(members.len(), 4);
    cluster.agree().await;
    // The dead one comes back and gets what it missed, by log or by snapshot.
    cluster.restart(dead).await;
    cluster.agree().await;
    agent.verify(&all[dead], 2_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_locked_and_damaged_directories_are_refused_naming_cause_and_remedy() {
    let mut cluster = Cluster::start(1).await;
    let mut agent = Agent::register(vec![cluster.address(0)], "a").await;
    agent.push_until(3, BLOCKS).await;
    let config = cluster.configs[0].clone();
    let at = |config: &Config| Config {
        listen: "127.0.0.1:0".parse().unwrap(),
        peers: vec![],
        ..config.clone()
    };
    let refused = |config: Config, words: &'static [&'static str]| async move {
        let message = match start(config).await {
            Ok(_) => panic!("it started"),
            Err(error) => error.to_string(),
        };
        for word in words {
            assert!(message.contains(word), "{message} should say {word}");
        }
    };
    refused(at(&config), &["in use by another process"]).await;
    refused(config.clone(), &["can't listen", "listen"]).await;
    cluster.stop(0).await;
    refused(
        Config {
            cluster: "other".to_owned(),
            ..at(&config)
        },
        &["belongs to cluster", "test", "other"],
    )
    .await;
    refused(
        Config {
            node_id: 5,
            ..at(&config)
        },
        &["belongs to node", "1", "5"],
    )
    .await;
    refused(
        Config {
            free_disk_mib_min: 1 << 40,
            ..at(&config)
        },
        &["bytes left", "free space"],
    )
    .await;
    std::fs::write(config.data_dir.join("log/blobs/1"), b"x").unwrap();
    refused(at(&config), &["blobs", "damaged", "new id"]).await;
    std::fs::remove_file(config.data_dir.join("log/blobs/1")).unwrap();
    let file = config.data_dir.join("identity.json");
    let text = std::fs::read(&file).unwrap();
    std::fs::write(&file, b"{").unwrap();
    refused(at(&config), &["identity.json", "move the directory aside"]).await;
    std::fs::write(&file, text).unwrap();
    cluster.restart(0).await;
    cluster.leader().await;
    agent.verify(&cluster.address(0), BLOCKS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_of_another_cluster_are_refused_at_the_first_start() {
    let cluster = Cluster::start(1).await;
    let directory = tempfile::tempdir().unwrap();
    let mut config = node_config(2, "127.0.0.1:0".parse().unwrap(), directory.path().join("d"));
    config.cluster = "mine".to_owned();
    config.peers = vec![
        cairn_index_node::PeerConfig {
            id: 1,
            address: cluster.address(0),
        },
        cairn_index_node::PeerConfig {
            id: 2,
            address: "127.0.0.1:9".to_owned(),
        },
    ];
    let mut stranger = start(config.clone()).await.unwrap();
    let words = stranger.wait().await.unwrap_err().to_string();
    assert!(words.contains("cluster \"test\"") && words.contains("peers"), "{words}");
    stranger.stop().await;
    // A node that the running cluster doesn't know is told how to get in.
    config.cluster = "test".to_owned();
    config.data_dir = directory.path().join("e");
    let mut uninvited = start(config).await.unwrap();
    let words = uninvited.wait().await.unwrap_err().to_string();
    assert!(
        words.contains("join = true") && words.contains("members add"),
        "{words}"
    );
    uninvited.stop().await;
}
