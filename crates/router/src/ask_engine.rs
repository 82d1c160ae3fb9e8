//! What an engine itself makes of a text: its `/tokenize`, to check a tokenizer against, and in place of a missing one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::engines::{Engine, Health};
use crate::fleet::Pool;
use crate::forward::{Leg, begin};
use crate::state::Router;
use crate::tokenize::{Job, PoolTokens, Tokens, Verified};

/// Largest accepted answer: a million ids.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// Texts whose ids are kept, and ids kept in all.
const KEPT_MAX: usize = 4_096;
const KEPT_IDS_MAX: usize = 8 << 20;
/// An engine that can't be asked isn't asked again for this long.
const PAUSE: Duration = Duration::from_secs(30);
/// Longest wait of a check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// Ids that engines gave, by hash of the question, and whether asking works at all.
#[derive(Default)]
pub(crate) struct Asked {
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    by_question: HashMap<u128, Arc<Vec<Vec<u32>>>>,
    ids: usize,
    not_before: Option<Instant>,
}

#[derive(Deserialize)]
struct Answer {
    tokens: Vec<u32>,
}

/// A text and a conversation on which tokenizers, templates and special tokens tell themselves apart.
const SAMPLE_TEXT: &str = "Check: naïve façade \u{1f642} 漢字, 12345.678; def f(x):\n\treturn x**2  # it's  spaced\r\n";

fn sample_chat() -> Value {
    json!({"messages": [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4 \u{1f642}."},
        {"role": "user", "content": "And 3 × 7? Don't explain."},
    ]})
}

/// The ids of a request by an engine's word, within `allowed`; `None` where no engine of the pool tells.
pub(crate) async fn encode(router: &Router, pool: &Pool, job: &Job, allowed: Duration) -> Option<Tokens> {
    let store = &router.asked_engines;
    if store.kept.lock().not_before.is_some_and(|at| Instant::now() < at) {
        return None;
    }
    let questions = questions(pool, job);
    let key = key_of(&pool.name, &questions);
    if let Some(found) = store.kept.lock().by_question.get(&key) {
        return Some(Tokens {
            prompts: found.as_ref().clone(),
            ..Tokens::default()
        });
    }
    let engine = any_healthy(pool)?;
    let asking = async {
        let mut prompts = Vec::new();
        for question in questions {
            prompts.push(ask(router, engine, question).await.ok()?);
        }
        Some(prompts)
    };
    let Ok(Some(prompts)) = tokio::time::timeout(allowed, asking).await else {
        store.kept.lock().not_before = Some(Instant::now() + PAUSE);
        return None;
    };
    let mut kept = store.kept.lock();
    let more: usize = prompts.iter().map(Vec::len).sum();
    if kept.by_question.len() >= KEPT_MAX || kept.ids + more > KEPT_IDS_MAX {
        // Starting over is simple and bounded; a busy prefix is asked for again once.
        *kept = Kept::default();
        router
            .metrics
            .bounded
            .get_or_create(&crate::metrics::Reason { reason: "asked_tokens" })
            .inc();
    }
    kept.ids += more;
    kept.by_question.insert(key, Arc::new(prompts.clone()));
    Some(Tokens {
        prompts,
        ..Tokens::default()
    })
}

fn any_healthy(pool: &Pool) -> Option<&Engine> {
    pool.workers
        .iter()
        .map(|worker| &*worker.engine)
        .find(|engine| engine.health() == Health::Healthy)
}

fn questions(pool: &Pool, job: &Job) -> Vec<Value> {
    let model = pool.models.first().unwrap_or(&pool.name);
    match job {
        Job::Texts { texts, add_special } => texts
            .iter()
            .map(|text| json!({"model": model, "prompt": text, "add_special_tokens": add_special}))
            .collect(),
        Job::Plain(turns) => {
            let messages: Vec<Value> = turns
                .messages()
                .iter()
                .map(|m| json!({"role": m.role, "content": m.content}))
                .collect();
            vec![json!({"model": model, "messages": messages})]
        }
        Job::Chat(chat) => {
            let mut question = chat.clone();
            question["model"] = json!(model);
            vec![question]
        }
    }
}

fn key_of(pool: &str, questions: &[Value]) -> u128 {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    hash.update(pool.as_bytes());
    for question in questions {
        hash.update(question.to_string().as_bytes());
    }
    let bytes: [u8; 32] = hash.finalize().into();
    let mut half = [0; 16];
    half.copy_from_slice(&bytes[..16]);
    u128::from_le_bytes(half)
}

/// Why an engine didn't tell.
enum NoAnswer {
    /// It has no such path, or can't do this.
    Unsupported,
    /// It is away or broken.
    Failed,
}

async fn ask(router: &Router, engine: &Engine, question: Value) -> Result<Vec<u32>, NoAnswer> {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    let leg = Leg {
        engine,
        rank: None,
        path: http::Uri::from_static("/tokenize"),
        headers,
        body: Bytes::from(question.to_string()),
    };
    let begun = begin(&router.upstream, leg).await.map_err(|_| NoAnswer::Failed)?;
    match begun.head.status {
        StatusCode::OK => {}
        status if status.is_client_error() => return Err(NoAnswer::Unsupported),
        _ => return Err(NoAnswer::Failed),
    }
    let mut bytes = bytes::BytesMut::from(&begun.first.unwrap_or_default()[..]);
    let rest = Limited::new(begun.rest, ANSWER_BYTES_MAX)
        .collect()
        .await
        .map_err(|_| NoAnswer::Failed)?;
    bytes.extend_from_slice(&rest.to_bytes());
    let answer: Answer = serde_json::from_slice(&bytes).map_err(|_| NoAnswer::Unsupported)?;
    Ok(answer.tokens)
}

/// Compares a pool's tokenizer and template with what one of its engines makes of the samples.
pub(crate) async fn verify(router: &Router, pool: &Pool, slot: &PoolTokens) {
    let (Some(tokens), Some(engine)) = (slot.get(), any_healthy(pool)) else {
        return;
    };
    let checks = [
        Job::Texts {
            texts: vec![SAMPLE_TEXT.to_string()],
            add_special: true,
        },
        Job::Chat(sample_chat()),
    ];
    let mut compared = 0;
    for job in checks {
        // A model without a chat template has nothing to compare.
        let Some(own) = crate::tokenize::ids(&tokens, &job) else {
            continue;
        };
        for question in questions(pool, &job) {
            match tokio::time::timeout(CHECK_TIMEOUT, ask(router, engine, question)).await {
                Ok(Ok(theirs)) if own.first() == Some(&theirs) => compared += 1,
                Ok(Ok(_)) => {
                    tracing::warn!(
                        pool = pool.name,
                        engine = engine.url,
                        "the tokenizer gives other ids than the engine: requests are routed by their text; name the \
                         engine's own tokenizer folder under [[pool]]"
                    );
                    return slot.set_verified(Verified::Differs);
                }
                Ok(Err(NoAnswer::Unsupported)) => {}
                Ok(Err(NoAnswer::Failed)) | Err(_) => return,
            }
        }
    }
    slot.set_verified(if compared > 0 {
        Verified::Equal
    } else {
        Verified::Unsupported
    });
}
