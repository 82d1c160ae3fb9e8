//! `/sim/...`: switches that make the engine fail on purpose. Only answered on loopback connections.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::fields::{self, Fields};
use super::{Call, Failure};
use crate::engine::{Engine, Hang};
use crate::http::{ApiError, Reply, json_reply};
use crate::rank::{Command, EventsCommand};

/// Longest time that an engine is told to be down, in milliseconds.
const DOWN_MS_MAX: u32 = 600_000;

pub(super) async fn answer(engine: &Arc<Engine>, call: &Call) -> Result<Reply, Failure> {
    if !call.peer.is_loopback() {
        return Err(ApiError::status(StatusCode::FORBIDDEN, "/sim/ is only answered on loopback").into());
    }
    if call.method == Method::GET && call.path == "/sim/state" {
        return Ok(json_reply(StatusCode::OK, &state(engine).await?));
    }
    if call.method != Method::POST {
        return Err(ApiError::status(StatusCode::METHOD_NOT_ALLOWED, "use POST").into());
    }
    let body = fields::object(&call.body)?;
    let fields = Fields(&body);
    let faults = &engine.faults;
    match call.path.as_str() {
        "/sim/drop_events" => {
            let count = count(&fields, "batches")?;
            let from_replay = fields.flag("from_replay")?;
            for losses in &engine.losses {
                losses.drop_from_replay.store(u64::from(from_replay), Ordering::Relaxed);
                losses.drop_live.store(count, Ordering::Relaxed);
            }
        }
        "/sim/restart" => {
            let down = fields.number("down_ms", 0, DOWN_MS_MAX)?.unwrap_or(0);
            let restarted = engine.restart(Duration::from_millis(u64::from(down))).await;
            restarted.map_err(|error| ApiError::status(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
        }
        "/sim/hang" => {
            let hang = match fields.text("what")? {
                None | Some("core") => Hang::Core,
                Some("all") => Hang::All,
                Some("none") => Hang::None,
                Some(_) => return Err(ApiError::field("what", "give `core`, `all` or `none`").into()),
            };
            faults.set_hang(hang);
            let stands = hang != Hang::None || engine.sleeping.load(Ordering::Relaxed);
            engine.tell_all(|| Command::Pause(stands)).await;
        }
        "/sim/unavailable" => faults.unavailable.store(count(&fields, "requests")?, Ordering::Relaxed),
        "/sim/cut_streams" => {
            let after = fields.number("after_chunks", 0, u32::MAX)?.unwrap_or(1);
            faults.cut_after.store(after as usize, Ordering::Relaxed);
            faults.cut_streams.store(count(&fields, "streams")?, Ordering::Relaxed);
        }
        "/sim/slow" => {
            let factor = fields
                .get("factor")
                .and_then(Value::as_f64)
                .filter(|f| (0.0..=1e6).contains(f));
            let factor = factor.ok_or_else(|| ApiError::field("factor", "give a number from 0 to 1000000"))?;
            engine.tell_all(|| Command::Slow(factor)).await;
        }
        "/sim/kill_events" => engine.tell_all(|| Command::Events(EventsCommand::Kill)).await,
        "/sim/reopen_events" => engine.tell_all(|| Command::Events(EventsCommand::Reopen)).await,
        "/sim/lose_replay" => engine.tell_all(|| Command::Events(EventsCommand::LoseReplay)).await,
        "/sim/clear" => clear(engine).await,
        _ => return Err(ApiError::status(StatusCode::NOT_FOUND, format!("there is no switch {}", call.path)).into()),
    }
    Ok(json_reply(StatusCode::OK, &json!({"ok": true})))
}

/// A count, or `null` for until told otherwise; 1 where the field is missing.
fn count(fields: &Fields<'_>, name: &'static str) -> Result<i64, ApiError> {
    match fields.0.get(name) {
        Some(Value::Null) => Ok(-1),
        Some(_) => Ok(i64::from(fields.number(name, 0, u32::MAX)?.unwrap_or(1))),
        None => Ok(1),
    }
}

/// Ends every fault; what was lost stays lost.
async fn clear(engine: &Engine) {
    for losses in &engine.losses {
        losses.drop_live.store(0, Ordering::Relaxed);
    }
    engine.faults.unavailable.store(0, Ordering::Relaxed);
    engine.faults.cut_streams.store(0, Ordering::Relaxed);
    engine.faults.set_hang(Hang::None);
    let asleep = engine.sleeping.load(Ordering::Relaxed);
    engine.tell_all(|| Command::Pause(asleep)).await;
    engine.tell_all(|| Command::Slow(1.0)).await;
}

async fn state(engine: &Engine) -> Result<Value, Failure> {
    let life = engine.life();
    let mut ranks = Vec::new();
    for rank in &life.ranks {
        let snapshot = rank.snapshot().await?;
        let (gauges, counters) = (snapshot.gauges, snapshot.counters);
        ranks.push(json!({
            "next_seq": snapshot.next_seq,
            "dropped_batches": snapshot.dropped_batches,
            "endpoint": rank.endpoint,
            "replay_endpoint": rank.replay_endpoint,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "loading": gauges.loading,
            "cached_blocks": gauges.cached_blocks,
            "cpu_blocks": gauges.cpu_blocks,
            "held": gauges.held,
            "steps": counters.steps,
            "aborted": counters.finished_abort,
        }));
    }
    Ok(json!({
        "engine_id": life.engine_id,
        "started": life.started,
        "sleeping": engine.sleeping.load(Ordering::Relaxed),
        "hang": format!("{:?}", engine.faults.hang()).to_lowercase(),
        "ranks": ranks,
    }))
}
