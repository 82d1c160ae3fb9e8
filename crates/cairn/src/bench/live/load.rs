//! Sends a trace's requests when they are due, whether or not earlier ones are answered, and reads what engines reused.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use cairn_replay::trace::Trace;
use cairn_routing::PolicyConfig;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::prompts;
use crate::output;

/// Longest wait for one answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
/// Failures that are told in words.
const FAILURES_TOLD: u64 = 3;

type HttpClient = Client<HttpConnector, Full<Bytes>>;

/// What came of one run, or of several.
#[derive(Default)]
pub struct Outcome {
    prompt_tokens: u64,
    cached_tokens: u64,
    pub first_token_ms: Vec<f64>,
    pub failed: u64,
    pub behind_ms_max: f64,
}

struct Answer {
    prompt_tokens: u64,
    cached_tokens: u64,
    first_token: Duration,
}

impl Outcome {
    /// Share of prompt tokens that engines reused.
    pub fn hit(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64
    }

    /// Adds a further run.
    pub fn merge(&mut self, other: Outcome) {
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.first_token_ms.extend(other.first_token_ms);
        self.failed += other.failed;
        self.behind_ms_max = self.behind_ms_max.max(other.behind_ms_max);
    }

    fn take(&mut self, answer: anyhow::Result<Answer>) {
        match answer {
            Ok(answer) => {
                self.prompt_tokens += answer.prompt_tokens;
                self.cached_tokens += answer.cached_tokens;
                self.first_token_ms.push(answer.first_token.as_secs_f64() * 1e3);
            }
            Err(error) => {
                self.failed += 1;
                if self.failed <= FAILURES_TOLD {
                    output::note(format!("a request failed: {error:#}"));
                }
            }
        }
    }
}

/// Sends everything; requests go round the routers, as in a replay.
pub async fn run(trace: &Trace, routers: &[String], policy: &PolicyConfig) -> anyhow::Result<Outcome> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: HttpClient = Client::builder(TokioExecutor::new()).build(connector);
    let urls: Vec<Arc<str>> = routers
        .iter()
        .map(|url| format!("{url}/v1/completions").into())
        .collect();
    let mut outcome = Outcome::default();
    let mut asking: JoinSet<anyhow::Result<Answer>> = JoinSet::new();
    let began = Instant::now();
    for (index, row) in trace.rows.iter().enumerate() {
        let body = Bytes::from(prompts::body(trace, index, policy));
        let due = began + Duration::from_micros(row.at.0);
        tokio::time::sleep_until(due).await;
        outcome.behind_ms_max = outcome.behind_ms_max.max(due.elapsed().as_secs_f64() * 1e3);
        asking.spawn(ask(client.clone(), urls[index % urls.len()].clone(), body));
        while let Some(answer) = asking.try_join_next() {
            outcome.take(answer.context("a request's task ended early")?);
        }
    }
    while let Some(answer) = asking.join_next().await {
        outcome.take(answer.context("a request's task ended early")?);
    }
    Ok(outcome)
}

async fn ask(client: HttpClient, url: Arc<str>, body: Bytes) -> anyhow::Result<Answer> {
    let request = Request::builder()
        .method(Method::POST)
        .uri(&*url)
        .header("content-type", "application/json")
        .body(Full::new(body))
        .with_context(|| format!("`{url}` is not a URL"))?;
    let read = async {
        let sent = Instant::now();
        let response = client.request(request).await.with_context(|| format!("asking {url}"))?;
        let status = response.status();
        let mut body = response.into_body();
        let (mut text, mut first) = (Vec::new(), None);
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame
                .with_context(|| format!("reading the answer of {url}"))?
                .into_data()
            {
                first.get_or_insert_with(|| sent.elapsed());
                text.extend_from_slice(&data);
            }
        }
        let text = String::from_utf8_lossy(&text);
        if status != StatusCode::OK {
            bail!("{url} answered {status}: {}", text.trim());
        }
        let usage = usage(&text).with_context(|| format!("{url} told no usage"))?;
        Ok(Answer {
            prompt_tokens: usage.0,
            cached_tokens: usage.1,
            first_token: first.unwrap_or_default(),
        })
    };
    tokio::time::timeout(ANSWER_TIMEOUT, read)
        .await
        .with_context(|| format!("{url} did not answer within {ANSWER_TIMEOUT:?}"))?
}

/// Prompt tokens and those of them that were cached, from a stream's last event that tells.
fn usage(text: &str) -> Option<(u64, u64)> {
    let events = text.lines().rev().filter_map(|line| line.strip_prefix("data: {"));
    let usage = events
        .filter_map(|event| serde_json::from_str::<Value>(&format!("{{{event}")).ok())
        .find_map(|event| event.get("usage").filter(|usage| usage.is_object()).cloned())?;
    let cached = usage.pointer("/prompt_tokens_details/cached_tokens");
    Some((
        usage["prompt_tokens"].as_u64()?,
        cached.and_then(Value::as_u64).unwrap_or(0),
    ))
}
