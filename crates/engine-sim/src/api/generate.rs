//! `/v1/chat/completions` and `/v1/completions`: submit to a rank, then answer whole or as a stream.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cairn_blocks::Token;
use cairn_replay::engine_model::{Answer, Finish, FinishReason, Output, Request, SubmitError};
use cairn_telemetry::propagation;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tracing::Span;

use super::fields::{self, Fields};
use super::request::{CHOICES_MAX, Kind, Transfer, Wanted};
use super::stream::EventStream;
use super::{Call, Failure, LoadGuard, prompts};
use crate::answer::Limits;
use crate::engine::{Engine, Hang, unix_seconds};
use crate::http::{ApiError, Body, Reply, json_reply};
use crate::rank::{CancelOnDrop, Command, Rank, Submission};

/// Header that pins a request to one rank.
const RANK_HEADER: &str = "x-data-parallel-rank";

/// A request that is inside a rank.
pub(crate) struct Running {
    pub(crate) engine: Arc<Engine>,
    pub(crate) wanted: Wanted,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) prompts: Vec<Arc<[Token]>>,
    pub(crate) choices: Vec<Choice>,
    pub(crate) outputs: mpsc::UnboundedReceiver<(u32, Output)>,
    pub(crate) open: usize,
    pub(crate) span: Span,
    _load: LoadGuard,
}

/// One answer.
pub(crate) struct Choice {
    /// Which prompt it answers.
    pub(crate) prompt: usize,
    pub(crate) tokens: Vec<Token>,
    pub(crate) finish: Option<Finish>,
    pub(crate) engine_request: u64,
    guard: CancelOnDrop,
}

impl Choice {
    /// Notes an output; returns its token.
    pub(crate) fn note(&mut self, output: Output) -> Option<Token> {
        if let Some(token) = output.token {
            self.tokens.push(token);
        }
        if let Some(finish) = output.finish {
            self.guard.finished();
            self.finish = Some(finish);
        }
        output.token
    }
}

/// Chat.
pub(crate) async fn chat(engine: &Arc<Engine>, call: &Call) -> Result<Reply, Failure> {
    let body = fields::object(&call.body)?;
    let wanted = Wanted::read(engine, Kind::Chat, &body)?;
    let prompt = prompts::chat(engine, &Value::Object(body))?;
    respond(start(engine, call, wanted, vec![prompt]).await?).await
}

/// Text completion.
pub(crate) async fn text(engine: &Arc<Engine>, call: &Call) -> Result<Reply, Failure> {
    let body = fields::object(&call.body)?;
    let wanted = Wanted::read(engine, Kind::Text, &body)?;
    let prompts = prompts::text(engine, &Fields(&body))?;
    respond(start(engine, call, wanted, prompts).await?).await
}

async fn respond(running: Running) -> Result<Reply, Failure> {
    if running.wanted.stream {
        let mut response = http::Response::new(Body::Stream(Box::new(EventStream::new(running))));
        let headers = response.headers_mut();
        headers.insert(
            http::header::CONTENT_TYPE,
            http::HeaderValue::from_static("text/event-stream; charset=utf-8"),
        );
        headers.insert(http::header::CACHE_CONTROL, http::HeaderValue::from_static("no-cache"));
        return Ok(response);
    }
    whole(running).await
}

/// Submits every prompt `n` times to one rank.
async fn start(
    engine: &Arc<Engine>,
    call: &Call,
    wanted: Wanted,
    prompts: Vec<Vec<Token>>,
) -> Result<Running, Failure> {
    if prompts.len() * wanted.n as usize > CHOICES_MAX {
        return Err(ApiError::field("n", format!("more than {CHOICES_MAX} answers in one request")).into());
    }
    let life = engine.life();
    let rank = choose_rank(&life.ranks, &call.headers)?;
    let span = span(&call.headers, &wanted);
    let prefix = if wanted.kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
    let unique = wanted
        .request_id
        .clone()
        .unwrap_or_else(|| uuid::Uuid::new_v4().simple().to_string());
    let (sender, outputs) = mpsc::unbounded_channel();
    let mut running = Running {
        engine: engine.clone(),
        id: format!("{prefix}-{unique}"),
        created: unix_seconds() as u64,
        prompts: prompts.into_iter().map(Arc::from).collect(),
        choices: Vec::new(),
        outputs,
        open: 0,
        span,
        wanted,
        _load: LoadGuard::new(engine),
    };
    for (at, prompt) in running.prompts.clone().into_iter().enumerate() {
        let most = answer_limit(engine, &running.wanted, prompt.len())?;
        for sample in 0..running.wanted.n {
            let limits = Limits {
                most,
                least: running.wanted.min_tokens,
                ignore_end: running.wanted.ignore_eos,
                fresh_start: running.wanted.kind == Kind::Chat,
            };
            let choice = submit(engine, rank, &running, at, sample, limits, &sender).await?;
            running.choices.push(choice);
            running.open += 1;
        }
    }
    Ok(running)
}

async fn submit(
    engine: &Engine,
    rank: &Rank,
    running: &Running,
    at: usize,
    sample: u32,
    limits: Limits,
    outputs: &mpsc::UnboundedSender<(u32, Output)>,
) -> Result<Choice, Failure> {
    let prompt = &running.prompts[at];
    let wanted = &running.wanted;
    let (answer, cut) = engine.answers.answer(prompt, sample, limits);
    let mut request = Request::new(engine.ids.next(), prompt.to_vec(), Answer::Tokens(answer));
    request.ends_by = if cut { FinishReason::Length } else { FinishReason::Stop };
    request.adapter.clone_from(&wanted.adapter);
    request.salt.clone_from(&wanted.salt);
    let mut remote = None;
    match &wanted.transfer {
        Transfer::None => {}
        Transfer::Prefill => request.hold = true,
        Transfer::Decode { remote: from, tokens } => {
            let offered = tokens.unwrap_or(u32::MAX).min(prompt.len() as u32);
            request.remote_tokens = offered;
            remote = Some(from.clone());
        }
    }
    let id = request.id;
    let guard = rank.guard(id);
    let (taken, reply) = oneshot::channel();
    let choice = running.choices.len() as u32;
    let submission = Submission {
        request,
        choice,
        outputs: outputs.clone(),
        remote,
        taken,
    };
    rank.send(Command::Submit(Box::new(submission))).await?;
    match reply.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Err(refused(&error).into()),
        Err(_) => return Err(Failure::Died),
    }
    Ok(Choice {
        prompt: at,
        tokens: Vec::new(),
        finish: None,
        engine_request: id.0,
        guard,
    })
}

pub(super) fn refused(error: &SubmitError) -> ApiError {
    let status = match error {
        SubmitError::TooLong { .. } | SubmitError::EmptyPrompt => StatusCode::BAD_REQUEST,
        SubmitError::DuplicateId(_) => StatusCode::INTERNAL_SERVER_ERROR,
        SubmitError::QueueFull(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    ApiError::status(status, error.to_string())
}

/// How many tokens an answer may have; refuses prompts that leave none.
fn answer_limit(engine: &Engine, wanted: &Wanted, prompt: usize) -> Result<u32, ApiError> {
    let longest = engine.config.max_model_len;
    let room = (longest as usize).saturating_sub(prompt);
    if prompt == 0 {
        return Err(ApiError::field("prompt", "has no tokens; give at least one"));
    }
    let asked = wanted.max_tokens.unwrap_or(0) as usize;
    if room == 0 || asked > room {
        return Err(ApiError::bad(format!(
            "the model's context length is {longest} tokens, but the prompt has {prompt} and {} are asked for; \
             shorten the prompt or lower max_tokens",
            asked.max(1)
        )));
    }
    Ok(if wanted.max_tokens.is_some() { asked } else { room } as u32)
}

/// The rank that the header pins, else the one with the fewest requests.
pub(super) fn choose_rank<'a>(ranks: &'a [Rank], headers: &HeaderMap) -> Result<&'a Rank, ApiError> {
    if let Some(value) = headers.get(RANK_HEADER) {
        let rank = value
            .to_str()
            .ok()
            .and_then(|value| value.parse::<usize>().ok())
            .and_then(|at| ranks.get(at));
        return rank.ok_or_else(|| {
            ApiError::bad(format!(
                "{RANK_HEADER} has to be a rank from 0 to {}",
                ranks.len().saturating_sub(1)
            ))
        });
    }
    let least = ranks.iter().min_by_key(|rank| rank.inside.load(Ordering::Relaxed));
    least.ok_or_else(|| ApiError::status(StatusCode::INTERNAL_SERVER_ERROR, "the engine has no ranks"))
}

fn span(headers: &HeaderMap, wanted: &Wanted) -> Span {
    let span = tracing::info_span!(
        "engine.request",
        stream = wanted.stream,
        prompt_tokens = tracing::field::Empty,
        cached_tokens = tracing::field::Empty,
        completion_tokens = tracing::field::Empty,
        queue_ms = tracing::field::Empty,
        first_token_ms = tracing::field::Empty,
        transfer = match wanted.transfer {
            Transfer::None => "none",
            Transfer::Prefill => "prefill",
            Transfer::Decode { .. } => "decode",
        },
    );
    if let Some(parent) = propagation::extract(headers) {
        propagation::set_parent(&span, parent);
    }
    span
}

/// Waits for every answer.
async fn whole(mut running: Running) -> Result<Reply, Failure> {
    while running.open > 0 {
        let Some((choice, output)) = running.outputs.recv().await else {
            return Err(Failure::Died);
        };
        if running.engine.faults.hang() == Hang::All {
            std::future::pending::<()>().await;
        }
        let choice = &mut running.choices[choice as usize];
        let last = output.finish.is_some();
        choice.note(output);
        running.open -= usize::from(last);
        if choice
            .finish
            .as_ref()
            .is_some_and(|finish| finish.reason == FinishReason::TransferFailed)
        {
            return Err(transfer_failed().into());
        }
    }
    running.record();
    let mut body = json!({
        "id": running.id,
        "object": if running.wanted.kind == Kind::Chat { "chat.completion" } else { "text_completion" },
        "created": running.created,
        "model": running.wanted.model,
    });
    let choices: Result<Vec<Value>, ApiError> = (0..running.choices.len())
        .map(|index| whole_choice(&running, index))
        .collect();
    body["choices"] = Value::Array(choices?);
    body["usage"] = running.usage();
    if running.wanted.kind == Kind::Chat && running.wanted.return_token_ids {
        body["prompt_token_ids"] = json!(&*running.prompts[0]);
    }
    body["kv_transfer_params"] = running.transfer_params().unwrap_or(Value::Null);
    Ok(json_reply(StatusCode::OK, &body))
}

pub(crate) fn transfer_failed() -> ApiError {
    ApiError::status(
        StatusCode::INTERNAL_SERVER_ERROR,
        "the KV blocks of the prefill engine could not be transferred; send the request again",
    )
}

fn whole_choice(running: &Running, index: usize) -> Result<Value, ApiError> {
    let choice = &running.choices[index];
    let text = |tokens: &[Token]| {
        let decoded = running.engine.tokens.decode(tokens, true);
        decoded.map_err(|error| ApiError::status(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
    };
    let mut answer = text(&choice.tokens)?;
    let reason = finish_reason(choice.finish.as_ref());
    let prompt = &running.prompts[choice.prompt];
    if running.wanted.echo {
        answer.insert_str(0, &text(prompt)?);
    }
    let mut value = match running.wanted.kind {
        Kind::Chat => json!({
            "index": index,
            "message": {"role": "assistant", "content": answer, "refusal": null, "tool_calls": []},
            "logprobs": null,
            "finish_reason": reason,
            "stop_reason": null,
        }),
        Kind::Text => json!({
            "index": index, "text": answer, "logprobs": null, "finish_reason": reason, "stop_reason": null,
        }),
    };
    if running.wanted.return_token_ids {
        value["token_ids"] = json!(choice.tokens);
        if running.wanted.kind == Kind::Text {
            value["prompt_token_ids"] = json!(&**prompt);
        }
    }
    Ok(value)
}

pub(crate) fn finish_reason(finish: Option<&Finish>) -> Option<&'static str> {
    finish.map(|finish| match finish.reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::TransferFailed => "error",
    })
}

impl Running {
    /// The usage so far; each prompt counts once, however many answers it has.
    pub(crate) fn usage(&self) -> Value {
        let prompt: usize = self.prompts.iter().map(|prompt| prompt.len()).sum();
        let completion: usize = self.choices.iter().map(|choice| choice.tokens.len()).sum();
        let mut usage = json!({
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        });
        usage["prompt_tokens_details"] = if self.engine.config.answers.prompt_tokens_details {
            json!({"cached_tokens": self.cached()})
        } else {
            Value::Null
        };
        usage
    }

    /// Cached tokens of each prompt's first answer.
    fn cached(&self) -> u64 {
        let mut first: HashMap<usize, u64> = HashMap::new();
        for choice in &self.choices {
            if let Some(finish) = &choice.finish {
                first
                    .entry(choice.prompt)
                    .or_insert_with(|| u64::from(finish.cached.total()));
            }
        }
        first.values().sum()
    }

    /// What a decode engine needs to pull the blocks of a prefill leg.
    pub(crate) fn transfer_params(&self) -> Option<Value> {
        let side = self
            .engine
            .side_channel
            .filter(|_| self.wanted.transfer == Transfer::Prefill)?;
        let choice = self.choices.first()?;
        let finish = choice.finish.as_ref()?;
        let expiry = self.engine.config.transfer.hold_s;
        Some(json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": [finish.held],
            "remote_engine_id": self.engine.life().engine_id,
            "remote_request_id": format!("{}-{:x}", self.id, choice.engine_request),
            "remote_host": side.ip().to_string(),
            "remote_port": side.port(),
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": finish.prompt_tokens,
            "remote_blocks_expiry_time": expiry,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": finish.cached.total(),
        }))
    }

    /// Writes what is known at the end into the span.
    pub(crate) fn record(&self) {
        let tokens: usize = self.choices.iter().map(|choice| choice.tokens.len()).sum();
        let prompt: usize = self.prompts.iter().map(|prompt| prompt.len()).sum();
        self.span.record("prompt_tokens", prompt);
        self.span.record("completion_tokens", tokens);
        self.span.record("cached_tokens", self.cached());
        if let Some(finish) = self.choices.first().and_then(|choice| choice.finish.as_ref()) {
            self.span
                .record("queue_ms", finish.scheduled.since(finish.arrived).as_seconds() * 1e3);
            if let Some(first) = finish.first_token {
                self.span
                    .record("first_token_ms", first.since(finish.arrived).as_seconds() * 1e3);
            }
        }
    }
}
