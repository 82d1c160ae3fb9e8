//! Processes die and events are lost while requests run: none fails that reached a live router, and the index is exact again.
//!
//! `CAIRN_SOAK=1` runs the full lengths.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "support/load.rs"]
mod load;
mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use load::{Load, STARTS};
use serde_json::{Value, json};
use support::watch::Watch;
use support::{Cluster, ask, chat, eventually, eventually_within, get, metric, post, prose};

/// Requests a second while processes die.
const RATE: u64 = 50;

fn soak() -> bool {
    std::env::var_os("CAIRN_SOAK").is_some()
}

fn pause_for_load() -> Duration {
    if soak() {
        Duration::from_secs(15)
    } else {
        Duration::from_secs(3)
    }
}

/// Lets the load go on for a while, and makes sure that it does.
fn run_on(load: &Load) {
    let before = load.answered();
    std::thread::sleep(pause_for_load());
    assert!(load.answered() > before, "no request was answered meanwhile");
}

fn leader(cluster: &Cluster) -> u64 {
    eventually("a leader is known", || {
        let status = std::panic::catch_unwind(|| cluster.status()).ok()?;
        status["leader"].as_u64().filter(|id| *id != 0)
    })
}

/// All members agree: one applied index, one digest.
fn digests_agree(cluster: &Cluster) -> Value {
    eventually("all members have one digest at one applied index", || {
        let status = std::panic::catch_unwind(|| cluster.status()).ok()?;
        let members = status["members"].as_array()?;
        let first = &members[0];
        let same = members.iter().all(|m| {
            m["role"] != "unreachable" && m["digest"] == first["digest"] && m["applied_index"] == first["applied_index"]
        });
        (same && members.len() == 3).then_some(status.clone())
    })
}

fn all_exact(cluster: &Cluster) {
    eventually("every worker is exact", || {
        let status = std::panic::catch_unwind(|| cluster.status()).ok()?;
        let workers = status["workers"].as_array()?;
        (workers.len() == 4 && workers.iter().all(|w| w["exact"] == true && w["lease_live"] == true)).then_some(())
    });
}

/// Tokens that a router would credit the best worker with, for each shared start.
fn credits(router: &str) -> Vec<u64> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("body.json");
    (0..STARTS)
        .map(|s| {
            std::fs::write(
                &file,
                chat(&prose(s + 1_000, 320), "what would be reused", false).to_string(),
            )
            .unwrap();
            let decision = ask(&[
                "explain",
                "--router",
                router,
                "--json",
                "--body",
                file.to_str().unwrap(),
            ]);
            decision["candidates"]
                .as_array()
                .unwrap()
                .iter()
                .filter_map(|c| c["gpu_tokens"].as_u64())
                .max()
                .unwrap_or(0)
        })
        .collect()
}

#[test]
fn requests_survive_the_death_of_every_kind_of_process() {
    let cluster = Cluster::up(&["--sim-speed", "20"]);
    let routers = vec![cluster.router(0), cluster.router(1)];
    let load = Load::start(routers.clone(), RATE);
    run_on(&load);

    let old_leader = leader(&cluster);
    cluster.crash(&format!("index-{old_leader}"));
    run_on(&load);
    let new_leader = leader(&cluster);
    let follower = (1..=3).find(|id| *id != new_leader && *id != old_leader).unwrap();
    digests_agree_later(&cluster);
    crash_current(&cluster, &format!("index-{follower}"));
    run_on(&load);
    crash_current(&cluster, "router-1");
    run_on(&load);
    crash_current(&cluster, "agent-1");
    run_on(&load);
    all_exact(&cluster);
    for name in ["agent-1", "agent-2", "index-1", "index-2", "index-3"] {
        crash_current(&cluster, name);
    }
    run_on(&load);
    all_exact(&cluster);

    let tally = load.end();
    assert!(
        tally.failures.is_empty(),
        "{} of {} failed: {:?}",
        tally.failures.len(),
        tally.sent,
        &tally.failures[..tally.failures.len().min(5)]
    );
    an_engine_dies(&cluster, routers);
    digests_agree(&cluster);
    cluster.end();
}

/// What an engine had not begun to answer is answered by another one; streams that it had begun end with an error that
/// says so.
fn an_engine_dies(cluster: &Cluster, routers: Vec<String>) {
    let load = Load::start(routers, RATE);
    run_on(&load);
    crash_current(cluster, "engine-1");
    run_on(&load);
    let tally = load.end();
    let failed: Vec<&String> = tally.failures.iter().filter(|f| !f.contains("upstream_cut")).collect();
    assert!(
        failed.is_empty(),
        "{} of {} failed: {failed:?}",
        failed.len(),
        tally.sent
    );
    let health = format!("{}/health", cluster.engine(0));
    eventually("the engine is up again", || {
        let answer = support::agent().get(&health).call().ok()?;
        (answer.status() == 200).then_some(())
    });
    all_exact(cluster);
}

/// Members agree again while requests run: digests are compared at equal applied index only.
fn digests_agree_later(cluster: &Cluster) {
    eventually("three members are reachable", || {
        let status = std::panic::catch_unwind(|| cluster.status()).ok()?;
        status["members"]
            .as_array()?
            .iter()
            .all(|m| m["role"] != "unreachable")
            .then_some(())
    });
}

/// Kills a child that may have been restarted since the cluster came up.
fn crash_current(cluster: &Cluster, name: &str) {
    let data = cluster.ready["data"].as_str().unwrap();
    let config = format!("{data}/config/{name}.toml");
    let running = || -> Vec<u64> {
        let found = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
            let pid: u64 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            String::from_utf8_lossy(&line).contains(&config).then_some(pid)
        });
        found.collect()
    };
    let pid = eventually("it runs, once", || <[u64; 1]>::try_from(running()).ok())[0];
    support::signal(pid, rustix::process::Signal::KILL);
}

#[test]
fn a_restarted_router_decides_exactly_again_without_any_engine_resending() {
    let cluster = Cluster::up(&["--sim-speed", "0"]);
    for s in 0..STARTS {
        let (status, answer) = post(
            &format!("{}/v1/chat/completions", cluster.router(0)),
            &chat(&prose(s + 1_000, 320), "first", false),
        );
        assert_eq!(status, 200, "{answer}");
    }
    // The events of one prompt come in several batches: what two looks in a row agree on is all there is.
    let mut last = Vec::new();
    let before = eventually("all starts are credited", || {
        let credits = credits(&cluster.router(0));
        let settled = credits == last && credits.iter().all(|c| *c > 0);
        last.clone_from(&credits);
        settled.then_some(credits)
    });
    let sent: Vec<String> = (0..4)
        .map(|e| get(&format!("{}/sim/state", cluster.engine(e))).1)
        .collect();
    crash_current(&cluster, "router-1");
    eventually("the router answers again", || {
        support::agent()
            .get(format!("{}/ready", cluster.router(0)))
            .call()
            .ok()
            .filter(|r| r.status() == 200)
    });
    let ready = Watch::start();
    eventually("it credits what it credited before", || {
        (credits(&cluster.router(0)) == before).then_some(())
    });
    ready.within(Duration::from_secs(2), "exactly the credit of before");
    let now: Vec<String> = (0..4)
        .map(|e| get(&format!("{}/sim/state", cluster.engine(e))).1)
        .collect();
    assert_eq!(seqs(&sent), seqs(&now), "no engine published anything meanwhile");
    cluster.end();
}

fn seqs(states: &[String]) -> Vec<Value> {
    let seq = |s: &String| serde_json::from_str::<Value>(s).unwrap()["ranks"][0]["next_seq"].clone();
    states.iter().map(seq).collect()
}

/// Batches that an engine published and nobody heard, so far.
fn dropped(engine: &str) -> Option<u64> {
    let state: Value = serde_json::from_str(&get(&format!("{engine}/sim/state")).1).unwrap();
    state["ranks"][0]["dropped_batches"].as_u64()
}

/// Number of the next prompt that was never sent before.
static NEXT_PROMPT: AtomicU64 = AtomicU64::new(0);

/// Makes an engine publish `batches` event batches that nobody hears.
fn lose_batches(engine: &str, batches: u64, from_replay: bool) {
    let before = dropped(engine).unwrap();
    let (status, said) = post(
        &format!("{engine}/sim/drop_events"),
        &json!({"batches": batches, "from_replay": from_replay}),
    );
    assert_eq!(status, 200, "{said}");
    eventually_within("the batches are lost", Duration::from_secs(600), || {
        let senders: Vec<_> = (0..16)
            .map(|_| {
                let url = format!("{engine}/v1/completions");
                let from = NEXT_PROMPT.fetch_add(64, Ordering::Relaxed);
                std::thread::spawn(move || {
                    let agent = support::agent();
                    for i in from..from + 64 {
                        let tokens: Vec<u64> = (0..33)
                            .map(|t| (i * 7_919 + t * 104_729 + t * t * i + i / 3_900 * (t + 1)) % 3_900 + 10)
                            .collect();
                        let body = json!({"model": "cairn-demo", "prompt": tokens, "max_tokens": 1});
                        let mut answer = agent.post(&url).send_json(&body).unwrap();
                        assert_eq!(answer.status(), 200);
                        answer.body_mut().read_to_string().unwrap();
                    }
                })
            })
            .collect();
        senders.into_iter().for_each(|s| s.join().unwrap());
        (dropped(engine)? >= before + batches).then_some(())
    });
}

#[test]
fn lost_event_batches_are_replayed_or_said_and_then_it_is_exact_again() {
    let cluster = Cluster::up(&["--sim-speed", "0"]);
    let engine = cluster.engine(0);
    let load = Load::start(vec![cluster.router(0), cluster.router(1)], RATE);
    run_on(&load);
    for batches in [5, 500] {
        lose_batches(&engine, batches, false);
        all_exact(&cluster);
    }
    lose_batches(&engine, if soak() { 50_000 } else { 2_000 }, true);
    std::thread::sleep(pause_for_load());
    let tally = load.end();
    assert!(tally.failures.is_empty(), "{:?}", tally.failures);

    // Predictions may not exceed what engines really reused by more than 1 % while suspects are about.
    let before = audit(&cluster);
    let load = Load::start(vec![cluster.router(0), cluster.router(1)], RATE);
    std::thread::sleep(pause_for_load());
    load.end();
    let after = audit(&cluster);
    let (predicted, cached) = (after.0 - before.0, after.1 - before.1);
    assert!(cached > 0.0, "nothing was reused");
    assert!(
        predicted <= cached * 1.01,
        "predicted {predicted} tokens, engines reused {cached}"
    );
    // What engines reused told the agent of suspects long before its cache had turned over.
    eventually("a suspect is confirmed or cut by what the engine reused", || {
        let pages = agents_pages(&cluster);
        let looked_at = pages.iter().map(|page| {
            metric(page, "cairn_agent_suspects_confirmed_total") + metric(page, "cairn_agent_suspects_cut_total")
        });
        (looked_at.sum::<f64>() > 0.0).then_some(())
    });
    turn_over_until_exact(&cluster, &engine);
    digests_agree(&cluster);
    cluster.end();
}

fn agents_pages(cluster: &Cluster) -> Vec<String> {
    let agents = cluster.ready["agents"].as_array().unwrap();
    agents
        .iter()
        .map(|ops| get(&format!("http://{}/metrics", ops.as_str().unwrap())).1)
        .collect()
}

/// New prompts fill the engine's cache until nothing that was in it is left: then every worker is exact again.
fn turn_over_until_exact(cluster: &Cluster, engine: &str) {
    let mut n = 0u64;
    eventually("a turnover makes the worker exact again", || {
        for _ in 0..16 {
            n += 1;
            let tokens: Vec<u64> = (0..4_000)
                .map(|t| (n * 6_271 + t * 7_907 + t * t * n) % 3_900 + 10)
                .collect();
            let body = json!({"model": "cairn-demo", "prompt": tokens, "max_tokens": 1});
            assert_eq!(post(&format!("{engine}/v1/completions"), &body).0, 200);
        }
        let status = std::panic::catch_unwind(|| cluster.status()).ok()?;
        let workers = status["workers"].as_array()?;
        (workers.len() == 4 && workers.iter().all(|w| w["exact"] == true)).then_some(())
    });
}

/// Predicted and really cached tokens over both routers.
fn audit(cluster: &Cluster) -> (f64, f64) {
    let pages: Vec<String> = (0..2)
        .map(|r| get(&format!("{}/metrics", cluster.router(r))).1)
        .collect();
    let sum = |name: &str| pages.iter().map(|p| metric(p, name)).sum();
    (
        sum("cairn_router_predicted_tokens_total"),
        sum("cairn_router_cached_tokens_total"),
    )
}
