//! `cairn status`: members, workers, and what the index claims about them.

use cairn_proto::v1::{Member, Role, StatusReply, StatusRequest, WorkerStatus};
use clap::Args;
use serde_json::{Value, json};

use super::IndexAccess;
use crate::output;

/// Arguments of `cairn status`.
#[derive(Args, Debug)]
pub struct StatusArgs {
    #[command(flatten)]
    access: IndexAccess,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Asks and prints.
pub fn run(args: StatusArgs) -> anyhow::Result<()> {
    let status = super::block_on(
        args.access
            .ask(|mut admin| async move { admin.status(StatusRequest {}).await }),
    )?;
    if args.json {
        output::line(serde_json::to_string(&to_json(&status))?);
    } else {
        print(&status);
    }
    Ok(())
}

/// The members of a reply as JSON.
pub fn members_json(members: &[Member]) -> Value {
    members
        .iter()
        .map(|m| {
            json!({"id": m.id, "address": m.address, "role": m.role, "term": m.term,
                   "applied_index": m.applied_index, "digest": m.digest, "log_bytes": m.log_bytes})
        })
        .collect()
}

fn worker_json(worker: &WorkerStatus) -> Value {
    json!({
        "worker": worker.worker, "engine_url": worker.engine_url, "rank": worker.rank, "pool": worker.pool,
        "role": role_name(worker), "source": worker.source, "agent": worker.agent,
        "incarnation": worker.incarnation, "seq": worker.seq, "exact": worker.exact, "reason": reason(worker),
        "lease_live": worker.lease_live, "draining": worker.draining,
        "blocks": {"gpu": worker.gpu_blocks, "cpu": worker.cpu_blocks, "shared": worker.shared_blocks},
        "lag_ms": heard_ms(worker),
    })
}

fn to_json(status: &StatusReply) -> Value {
    json!({
        "cluster": status.cluster, "node": status.node, "leader": status.leader,
        "members": members_json(&status.members),
        "workers": status.workers.iter().map(worker_json).collect::<Value>(),
    })
}

fn role_name(worker: &WorkerStatus) -> &'static str {
    match worker.role() {
        Role::Both => "both",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    }
}

fn reason(worker: &WorkerStatus) -> Option<&str> {
    (!worker.reason.is_empty()).then_some(worker.reason.as_str())
}

/// Milliseconds since the node that answered heard the worker's agent; `None` where it hasn't yet.
fn heard_ms(worker: &WorkerStatus) -> Option<u64> {
    (worker.lag_ms > 0).then_some(worker.lag_ms)
}

/// Prints members as a table.
pub fn print_members(members: &[Member]) {
    let mut rows = vec![
        ["NODE", "ADDRESS", "ROLE", "TERM", "APPLIED", "DIGEST"]
            .map(String::from)
            .to_vec(),
    ];
    rows.extend(members.iter().map(|m| {
        vec![
            m.id.to_string(),
            m.address.clone(),
            m.role.clone(),
            m.term.to_string(),
            m.applied_index.to_string(),
            m.digest.clone(),
        ]
    }));
    output::table(&rows);
}

fn print(status: &StatusReply) {
    output::line(format!(
        "cluster {} (asked node {}, leader {})",
        status.cluster, status.node, status.leader
    ));
    print_members(&status.members);
    output::line("");
    let head = [
        "WORKER",
        "ENGINE",
        "POOL",
        "ROLE",
        "STATE",
        "GPU BLOCKS",
        "CPU BLOCKS",
        "SHARED",
        "HEARD",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows.extend(status.workers.iter().map(|w| {
        let state = match (w.draining, reason(w)) {
            (true, _) => "draining".to_owned(),
            (false, None) => "exact".to_owned(),
            (false, Some(reason)) => format!("degraded: {reason}"),
        };
        vec![
            w.worker.to_string(),
            format!("{}#{}", w.engine_url, w.rank),
            w.pool.clone(),
            role_name(w).to_owned(),
            state,
            w.gpu_blocks.to_string(),
            w.cpu_blocks.to_string(),
            w.shared_blocks.to_string(),
            heard_ms(w).map_or_else(|| "-".to_owned(), |ms| format!("{ms} ms ago")),
        ]
    }));
    output::table(&rows);
    if status.workers.is_empty() {
        output::line("no workers: is an agent running, and does it reach this index?");
    }
}
