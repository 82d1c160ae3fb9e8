//! Waits until requests are answered, and tells what runs and what to try.

use std::time::Duration;

use anyhow::bail;
use bytes::Bytes;
use http::Method;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::child::{Running, tail};
use super::plan::Plan;
use crate::inspect::ask_http;
use crate::output;

/// Longest wait between the last child's ready line and a router that can reach every engine.
const SERVING_TIMEOUT: Duration = Duration::from_secs(60);
/// What is waited for is said after this long.
const SAID_AFTER: Duration = Duration::from_secs(8);
/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Waits until every router sees every engine, with the index's word on each.
pub async fn wait_until_serving(plan: &Plan, children: &[Running]) -> anyhow::Result<()> {
    let begun = Instant::now();
    let deadline = begun + SERVING_TIMEOUT;
    let mut said = false;
    for port in &plan.routers {
        loop {
            let seen = ask_http::json(
                Method::GET,
                &format!("http://127.0.0.1:{port}/cairn/status"),
                None,
                Bytes::new(),
            )
            .await;
            let waiting_for = match &seen {
                Ok(status) => match missing(plan, status) {
                    None => break,
                    Some(why) => why,
                },
                Err(error) => error.to_string(),
            };
            if !said && begun.elapsed() > SAID_AFTER {
                said = true;
                let (log, left) = (plan.data.join("log"), SERVING_TIMEOUT - SAID_AFTER);
                output::note(format!(
                    "still waiting, for {left:?} more: {waiting_for} (logs: {})",
                    log.display()
                ));
            }
            if Instant::now() > deadline {
                let agents = children
                    .iter()
                    .filter(|c| c.spec.role == "agent")
                    .map(|c| tail(&c.spec.log));
                let logs: Vec<String> = agents.collect();
                bail!(
                    "the router on port {port} is not serving all engines after {SERVING_TIMEOUT:?}: {waiting_for}\nagents' logs:\n{}",
                    logs.join("\n")
                );
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
    Ok(())
}

/// What a router still lacks.
fn missing(plan: &Plan, status: &Value) -> Option<String> {
    let workers = status
        .get("workers")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    for engine in &plan.engines {
        let rank_of = |w: &&Value| {
            w["worker"]
                .as_str()
                .is_some_and(|name| name.strip_prefix(engine.as_str()).is_some_and(|r| r.starts_with('#')))
        };
        let ranks: Vec<&Value> = workers.iter().filter(rank_of).collect();
        if ranks.is_empty() {
            return Some(format!(
                "no worker of {engine} is known; is the engine up, and does {engine}/v1/models answer from this host?"
            ));
        }
        if let Some(unfit) = ranks.iter().find(|w| w["health"] != "healthy") {
            return Some(format!("{engine} takes no requests: its state is {}", unfit["health"]));
        }
    }
    None
}

/// A name that requests may use, as the first router tells it.
pub async fn served_model(plan: &Plan) -> String {
    let url = format!("http://127.0.0.1:{}/v1/models", plan.routers[0]);
    let list = ask_http::json(Method::GET, &url, None, Bytes::new()).await;
    let first = list
        .ok()
        .and_then(|list| Some(list.pointer("/data/0/id")?.as_str()?.to_owned()));
    // Something to fill in, where an engine has just gone.
    first.unwrap_or_else(|| "MODEL".to_owned())
}

/// This program as one would call it from here.
fn program() -> String {
    let Ok(path) = std::env::current_exe() else {
        return "cairn".to_owned();
    };
    let below = std::env::current_dir()
        .ok()
        .and_then(|here| Some(path.strip_prefix(here).ok()?.to_owned()));
    let text = match below {
        Some(below) if below.components().count() == 1 => format!("./{}", below.display()),
        Some(below) => below.display().to_string(),
        None => path.display().to_string(),
    };
    if text.contains(char::is_whitespace) {
        return format!("'{text}'");
    }
    text
}

/// Prints what runs.
pub fn print(plan: &Plan, children: &[Running], model: &str, took: Duration, as_json: bool) {
    let routers: Vec<String> = plan
        .routers
        .iter()
        .map(|port| format!("http://127.0.0.1:{port}"))
        .collect();
    let index: Vec<String> = plan.index.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    if as_json {
        let pids: Value = children
            .iter()
            .map(|c| (c.spec.name.clone(), json!(c.pid())))
            .collect::<serde_json::Map<_, _>>()
            .into();
        let agents: Vec<Value> = children
            .iter()
            .filter(|c| c.spec.role == "agent")
            .map(|c| c.ready.get("ops").cloned().unwrap_or_else(|| json!(c.spec.name)))
            .collect();
        let line = json!({
            "ready": true, "routers": routers, "index": index, "engines": plan.engines, "agents": agents,
            "pids": pids, "data": plan.data.display().to_string(),
        });
        output::line(line.to_string());
        return;
    }
    let engines = match (plan.simulated, plan.engines.len()) {
        (true, 1) => "simulated engine",
        (true, _) => "simulated engines",
        (false, 1) => "engine of yours",
        (false, _) => "engines of yours",
    };
    output::line(format!(
        "Cairn is up after {:.1} s (state and logs: {})",
        took.as_secs_f64(),
        plan.data.display()
    ));
    output::line(format!("  routers  {}", routers.join("  ")));
    output::line(format!("  index    {}", index.join("  ")));
    output::line(format!(
        "  {} {engines}  {}",
        plan.engines.len(),
        plan.engines.join("  ")
    ));
    output::line(try_next(plan, model, &routers[0], &index[0]));
}

fn try_next(plan: &Plan, model: &str, router: &str, index: &str) -> String {
    let cairn = program();
    let body = format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"What is a cairn?"}}]}}"#);
    let mut text = format!(
        "\nTry next:\n  curl {router}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n  \
         echo '{body}' | {cairn} explain --router {router} --body -\n  \
         {cairn} explain --router {router} --last\n  {cairn} status --index {index}\n"
    );
    if plan.simulated {
        let own = format!("{cairn} up --engine http://HOST:8000 --engine http://HOST:8001");
        text.push_str(&format!("With engines of your own:\n  {own}\n"));
    }
    text.push_str("Ctrl-C ends everything.");
    text
}
