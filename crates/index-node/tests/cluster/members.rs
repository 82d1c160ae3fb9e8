//! Members are added, removed and replaced while the cluster serves.

use cairn_proto::v1;

use crate::agent::Agent;
use crate::harness::{Cluster, admin, eventually};

fn add(id: u64, address: String) -> v1::AddMemberRequest {
    v1::AddMemberRequest { id, address }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_of_one_grows_to_three_and_shrinks_again_under_writes() {
    let mut cluster = Cluster::start(1).await;
    let first = cluster.address(0);
    let mut agent = Agent::register(vec![first.clone()], "a").await;
    for id in [2, 3] {
        let newcomer = cluster.joiner(id, &format!("j{id}")).await;
        let upto = agent.acked + 20;
        let address = cluster.address(newcomer);
        let (_, added) = tokio::join!(agent.push_until(upto, 8), async {
            admin(&first).add_member(add(id, format!("http://{address}/"))).await
        });
        let members = added.unwrap().into_inner().members;
        assert!(
            members.iter().any(|m| m.id == id && m.role == "follower"),
            "{members:?}"
        );
    }
    cluster.agree().await;
    agent.verify(&cluster.address(2), 8).await;

    // The first node leaves while it leads: another one takes over.
    let others: Vec<String> = vec![cluster.address(1), cluster.address(2)];
    let _ = admin(&first).remove_member(v1::RemoveMemberRequest { id: 1 }).await;
    cluster.stop(0).await;
    cluster.leader().await;
    agent.addresses = others.clone();
    let upto = agent.acked + 10;
    agent.push_until(upto, 8).await;
    eventually("the removed one is gone from the members", || async {
        let members = admin(&others[0])
            .members(v1::MembersRequest {})
            .await
            .ok()?
            .into_inner()
            .members;
        (members.len() == 2 && members.iter().all(|m| m.id != 1)).then_some(())
    })
    .await;
    cluster.agree().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_member_changes_are_refused_with_the_reason() {
    let mut cluster = Cluster::start(3).await;
    let follower = cluster.follower().await;
    let address = cluster.address(follower);
    let refused = |result: Result<tonic::Response<v1::MembersReply>, tonic::Status>, word: &str| {
        let status = result.unwrap_err();
        assert!(status.message().contains(word), "{status} should say {word}");
    };
    let newcomer = cluster.joiner(4, "four").await;
    let fresh = cluster.address(newcomer);
    refused(admin(&address).add_member(add(0, fresh.clone())).await, "id");
    refused(admin(&address).add_member(add(5, fresh.clone())).await, "has id 4");
    refused(
        admin(&address).add_member(add(4, "127.0.0.1:1".to_owned())).await,
        "join = true",
    );
    refused(
        admin(&address).remove_member(v1::RemoveMemberRequest { id: 77 }).await,
        "isn't a member",
    );
    let replace = v1::ReplaceMemberRequest {
        old_id: 77,
        new_id: 4,
        new_address: fresh.clone(),
    };
    refused(admin(&address).replace_member(replace).await, "isn't a voter");
    admin(&address).add_member(add(4, fresh.clone())).await.unwrap();
    admin(&address).add_member(add(4, fresh)).await.unwrap();
    assert_eq!(
        admin(&address)
            .members(v1::MembersRequest {})
            .await
            .unwrap()
            .into_inner()
            .members
            .len(),
        4
    );
    let alone = Cluster::start(1).await;
    refused(
        admin(&alone.address(0))
            .remove_member(v1::RemoveMemberRequest { id: 1 })
            .await,
        "only voter",
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newcomer_after_a_cut_log_joins_by_snapshot_while_writes_go_on() {
    let mut cluster = Cluster::start_with(1, |config| {
        config.snapshot_after_mib = 1;
        config.keep_log_mib_max = 1;
    })
    .await;
    let address = cluster.address(0);
    let mut agent = Agent::register(vec![address.clone()], "a").await;
    agent.push_until(300, 1_500).await;
    let newcomer = cluster.joiner(2, "two").await;
    let fresh = cluster.address(newcomer);
    let (_, added) = tokio::join!(agent.push_until(400, 1_500), async {
        admin(&address).add_member(add(2, fresh.clone())).await
    });
    added.unwrap();
    cluster.agree().await;
    agent.verify(&fresh, 1_500).await;
}
