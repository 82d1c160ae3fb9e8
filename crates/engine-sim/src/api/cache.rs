//! Where events are, emptying the cache, and sleep.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::StatusCode;
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use super::{Call, Failure};
use crate::engine::{Engine, Hang};
use crate::http::{Reply, json_reply, ok};
use crate::rank::Command;

/// Every rank's event sockets with their real ports.
pub(crate) fn sources(engine: &Engine) -> Reply {
    let life = engine.life();
    let mut sources = Map::new();
    for (rank, handle) in life.ranks.iter().enumerate() {
        let Some(endpoint) = &handle.endpoint else { continue };
        let topic = &engine.config.events.topic;
        let source = json!({"endpoint": endpoint, "replay_endpoint": handle.replay_endpoint, "topic": topic});
        sources.insert(rank.to_string(), source);
    }
    json_reply(StatusCode::OK, &Value::Object(sources))
}

/// SGLang's description of itself.
pub(crate) fn server_info(engine: &Engine) -> Reply {
    let life = engine.life();
    let config = &engine.config;
    let first = life.ranks.first();
    let events = first.and_then(|rank| rank.endpoint.as_ref()).map(|endpoint| {
        json!({
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": first.and_then(|rank| rank.replay_endpoint.clone()),
            "topic": config.events.topic,
            "buffer_steps": config.events.buffer_steps,
        })
        .to_string()
    });
    let root = config.model_root();
    json_reply(
        StatusCode::OK,
        &json!({
            "version": config.events.wire.engine_version(),
            "model_path": root,
            "tokenizer_path": root,
            "served_model_name": config.model,
            "page_size": config.cache.block_size,
            "dp_size": config.ranks,
            "context_length": config.max_model_len,
            "max_running_requests": config.scheduler.max_num_seqs,
            "chunked_prefill_size": config.scheduler.max_batched_tokens,
            "max_total_num_tokens": u64::from(config.cache.gpu_blocks - 1) * u64::from(config.cache.block_size),
            "kv_events_config": events,
        }),
    )
}

/// Empties every rank's prefix cache.
pub(crate) async fn reset(engine: &Arc<Engine>, call: &Call) -> Result<Reply, Failure> {
    let (external, preempt) = (call.asks("reset_external"), call.asks("reset_running_requests"));
    let done = reset_all(engine, external, preempt).await?;
    let status = if done { StatusCode::OK } else { StatusCode::CONFLICT };
    Ok(json_reply(status, &json!({"success": done})))
}

async fn reset_all(engine: &Engine, external: bool, preempt: bool) -> Result<bool, Failure> {
    let mut done = true;
    for rank in &engine.life().ranks {
        let (answer, reply) = oneshot::channel();
        rank.send(Command::Reset {
            external,
            preempt,
            answer,
        })
        .await?;
        done &= reply.await.map_err(|_| Failure::Died)?;
    }
    Ok(done)
}

/// Puts the engine to sleep, which empties its cache, or wakes it.
pub(crate) async fn sleep(engine: &Arc<Engine>, asleep: bool) -> Result<Reply, Failure> {
    if asleep {
        reset_all(engine, true, true).await?;
    }
    engine.sleeping.store(asleep, Ordering::Relaxed);
    let stands = asleep || engine.faults.hang() != Hang::None;
    engine.tell_all(|| Command::Pause(stands)).await;
    Ok(ok())
}
