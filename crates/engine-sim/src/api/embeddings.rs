//! `/v1/embeddings`: vectors fixed by the input; the input passes through the cache like any prompt.

use std::sync::Arc;

use base64::Engine as _;
use cairn_blocks::{BlockKey, Token, next_key};
use cairn_replay::engine_model::{Answer, Request};
use http::StatusCode;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

use super::fields::{self, Fields};
use super::{Call, Failure, LoadGuard, generate, prompts, request};
use crate::engine::{Engine, unix_seconds};
use crate::http::{ApiError, Reply, json_reply};
use crate::rank::{Command, Submission};

/// Length of every vector.
const DIMENSIONS: usize = 64;

/// Embeds every input.
pub(crate) async fn answer(engine: &Arc<Engine>, call: &Call) -> Result<Reply, Failure> {
    let body = fields::object(&call.body)?;
    let fields = Fields(&body);
    let (model, adapter) = request::model(engine, &fields)?;
    let base64 = match fields.text("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(ApiError::field("encoding_format", "give `float` or `base64`").into()),
    };
    let inputs = prompts::embedding(engine, &fields)?;
    let _load = LoadGuard::new(engine);
    let life = engine.life();
    let rank = generate::choose_rank(&life.ranks, &call.headers)?;
    let (sender, mut outputs) = mpsc::unbounded_channel();
    let mut guards = Vec::with_capacity(inputs.len());
    for (at, input) in inputs.iter().enumerate() {
        let empty: Arc<[Token]> = Arc::from([]);
        let mut request = Request::new(engine.ids.next(), input.clone(), Answer::Tokens(empty));
        request.adapter.clone_from(&adapter);
        guards.push(rank.guard(request.id));
        let (taken, reply) = oneshot::channel();
        let choice = at as u32;
        let submission = Submission {
            request,
            choice,
            outputs: sender.clone(),
            remote: None,
            taken,
        };
        rank.send(Command::Submit(Box::new(submission))).await?;
        match reply.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(generate::refused(&error).into()),
            Err(_) => return Err(Failure::Died),
        }
    }
    drop(sender);
    for _ in 0..inputs.len() {
        let Some((at, _)) = outputs.recv().await else {
            return Err(Failure::Died);
        };
        guards[at as usize].finished();
    }
    let data: Vec<Value> = inputs
        .iter()
        .enumerate()
        .map(|(index, input)| {
            let vector = vector(input);
            let embedding = if base64 {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                json!(base64::engine::general_purpose::STANDARD.encode(bytes))
            } else {
                json!(vector)
            };
            json!({"object": "embedding", "index": index, "embedding": embedding})
        })
        .collect();
    let tokens: usize = inputs.iter().map(Vec::len).sum();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0});
    let answer = json!({
        "id": format!("embd-{}", uuid::Uuid::new_v4().simple()),
        "object": "list", "created": unix_seconds() as u64, "model": model, "data": data, "usage": usage,
    });
    Ok(json_reply(StatusCode::OK, &answer))
}

/// A unit vector drawn from the input's hash.
fn vector(input: &[Token]) -> Vec<f32> {
    let mut key = next_key(BlockKey(0), input, &["embedding"]);
    let mut vector = Vec::with_capacity(DIMENSIONS);
    for _ in 0..DIMENSIONS {
        key = next_key(key, &[], &["dimension"]);
        vector.push((key.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0);
    }
    let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    vector.iter().map(|x| x / norm.max(f32::MIN_POSITIVE)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_inputs_have_equal_unit_vectors() {
        let (a, b) = (vector(&[1, 2, 3]), vector(&[1, 2, 4]));
        assert_eq!(a, vector(&[1, 2, 3]));
        assert_ne!(a, b);
        assert!((a.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-4);
    }
}
