//! What a request asks for: parse -> tokenize -> chain.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, header};
use tracing::Instrument;

use crate::ask_engine;
use crate::body::{Chat, Endpoint, Fields, Member, PromptInput, ScannedBody};
use crate::decide::{Asked, looks_at_text, policy_name};
use crate::error::ApiError;
use crate::fleet::{Fleet, Pool};
use crate::metrics::Reason;
use crate::state::Router;
use crate::tokenize::{Budget, Degraded, Job, Tokens, too_long};

/// SageMaker's header that steers affinity: 1 to 64 printable ASCII characters.
static AFFINITY_HEADER: HeaderName = HeaderName::from_static("x-amzn-sagemaker-prefix-aware-id");
const AFFINITY_BYTES_MAX: usize = 64;
/// Chooses a request's policy, where that is allowed.
static POLICY_HEADER: HeaderName = HeaderName::from_static("x-cairn-policy");

/// What came with a request besides its body.
pub(crate) struct Arrival {
    /// When.
    pub at: Instant,
    /// Its endpoint; `None` where the body's shape tells.
    pub endpoint: Option<Endpoint>,
    /// Its headers.
    pub headers: HeaderMap,
    /// From where.
    pub peer: SocketAddr,
    /// Whether its token ids are asked for.
    pub wants_ids: bool,
}

/// A parsed request; borrows from its body.
pub(crate) struct Parsed<'a> {
    /// Which operation.
    pub endpoint: Endpoint,
    /// The body.
    pub body: &'a ScannedBody,
    /// Its members.
    pub members: Vec<Member<'a>>,
    /// What a decision needs of it.
    pub fields: Fields<'a>,
    /// The salt of its keys.
    pub salt: String,
    /// Whether that replaces the body's own.
    pub replaces_salt: bool,
}

/// Scans a body; one that can't be read because it is compressed is refused as that.
pub(crate) fn scan(headers: &HeaderMap, bytes: &Bytes) -> Result<ScannedBody, ApiError> {
    ScannedBody::new(bytes.clone()).map_err(|error| {
        let encoding = headers
            .get(header::CONTENT_ENCODING)
            .and_then(|value| value.to_str().ok());
        let named = encoding.is_some_and(|name| !name.trim().eq_ignore_ascii_case("identity"));
        if named || bytes.starts_with(&GZIP_MAGIC) {
            return ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "invalid_request_error",
                "compressed_body",
                "the body is compressed (`content-encoding`), and only plain JSON is read here; send it uncompressed",
            );
        }
        error.into()
    })
}

/// First bytes of a gzip stream (RFC 1952, section 2.3.1).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Reads what a decision needs.
pub(crate) fn parse<'a>(router: &Router, arrival: &Arrival, scanned: &'a ScannedBody) -> Result<Parsed<'a>, ApiError> {
    let members = scanned.members();
    let endpoint = match arrival.endpoint {
        Some(endpoint) => endpoint,
        None => Endpoint::by_shape(&members).ok_or_else(|| {
            ApiError::invalid(
                "unknown_shape",
                "the body has none of `messages`, `prompt` and `input`; send one of them",
            )
        })?,
    };
    let fields = Fields::read(scanned, &members, endpoint)?;
    let (salt, replaces_salt) = router.tenants.salt(&arrival.headers, fields.cache_salt.as_deref())?;
    Ok(Parsed {
        endpoint,
        body: scanned,
        members,
        fields,
        salt,
        replaces_salt,
    })
}

/// Characters of an unknown model's name that the error repeats.
const MODEL_NAME_SHOWN: usize = 128;

/// The pool of a model name.
pub(crate) fn pool_of<'a>(fleet: &'a Fleet, model: Option<&str>) -> Result<(&'a Arc<Pool>, Option<&'a str>), ApiError> {
    let Some(name) = model else {
        return fleet
            .only_pool()
            .map(|pool| (pool, None))
            .ok_or_else(|| ApiError::invalid("model_missing", "name a model; GET /v1/models lists them").at("model"));
    };
    fleet.model(name).ok_or_else(|| {
        if fleet.has_unknown() || fleet.pools.is_empty() {
            return ApiError::unavailable("starting", "engines haven't said yet what they serve; ask again");
        }
        let named: String = name
            .chars()
            .filter(|c| !c.is_control())
            .take(MODEL_NAME_SHOWN)
            .collect();
        let message = match fleet.names().len() {
            1 => format!("no engine serves the model `{named}`; use the one name that GET /v1/models lists"),
            names => {
                format!("no engine serves the model `{named}`; use one of the {names} names that GET /v1/models lists")
            }
        };
        ApiError::new(
            http::StatusCode::NOT_FOUND,
            "invalid_request_error",
            "model_not_found",
            message,
        )
        .at("model")
    })
}

/// Tokenizes and chains.
pub(crate) async fn ask<'a>(
    router: &Router,
    fleet: &Fleet,
    pool: &'a Pool,
    adapter: Option<&'a str>,
    parsed: &mut Parsed<'_>,
    arrival: &Arrival,
) -> Result<Asked<'a>, ApiError> {
    let policy = request_policy(router, &arrival.headers)?;
    let by_text = match &policy {
        Some(policy) => looks_at_text(policy),
        None => looks_at_text(policy_name(router, pool)),
    };
    let (tokens, text) = tokenize(router, pool, parsed, by_text).await?;
    if let Some(max) = pool.max_model_len
        && !parsed.fields.truncates
        && let Some(longest) = tokens.prompts.iter().map(Vec::len).max()
        && longest >= max as usize
    {
        return Err(too_long(max, &longest.to_string()));
    }
    if let Some(degraded) = tokens.degraded {
        router
            .metrics
            .tokenize_degraded
            .get_or_create(&Reason {
                reason: degraded.as_str(),
            })
            .inc();
    }
    let ids = arrival.wants_ids.then(|| tokens.prompts.clone());
    let mut asked = Asked::chain(fleet, pool, adapter.unwrap_or_default(), &parsed.salt, tokens);
    if let Some(text) = text {
        asked.prefix = text.into_bytes();
    }
    asked.affinity = affinity(&arrival.headers, &parsed.fields)?;
    asked.ids = ids;
    asked.max_tokens = parsed.fields.max_tokens;
    asked.policy = policy;
    asked.may_split = router.config.split && parsed.endpoint != Endpoint::Embeddings && asked.more.is_empty();
    Ok(asked)
}

async fn tokenize(
    router: &Router,
    pool: &Pool,
    parsed: &mut Parsed<'_>,
    by_text: bool,
) -> Result<(Tokens, Option<String>), ApiError> {
    let span = tracing::info_span!(
        "tokenize",
        tokens = tracing::field::Empty,
        degraded = tracing::field::Empty
    );
    let started = Instant::now();
    let job = match (parsed.endpoint, parsed.fields.chat.take()) {
        (Endpoint::Chat, Some(Chat::Plain(turns))) => Job::Plain(turns),
        (Endpoint::Chat, Some(Chat::Whole(chat))) => Job::Chat(chat),
        (Endpoint::Completions, _) => match PromptInput::parse(parsed.fields.prompt.unwrap_or("null"))? {
            PromptInput::Texts(texts) => Job::Texts {
                texts,
                add_special: parsed.fields.add_special_tokens.unwrap_or(true),
            },
            PromptInput::Tokens(prompts) => {
                let prompts = prompts
                    .into_iter()
                    .map(|ids| truncated(ids, parsed.fields.truncate))
                    .collect();
                return Ok((
                    Tokens {
                        prompts,
                        ..Tokens::default()
                    },
                    None,
                ));
            }
        },
        (Endpoint::Embeddings | Endpoint::Chat, _) => return Ok((Tokens::default(), None)),
    };
    let job = Arc::new(job);
    let text = by_text.then(|| job.text());
    let budget = Budget {
        base: std::time::Duration::from_millis(router.config.tokenize_budget_ms),
        per_kib: std::time::Duration::from_micros(router.config.tokenize_budget_us_per_kib),
    };
    let max = pool.max_model_len.filter(|_| !parsed.fields.truncates);
    let slot = router.tokens_of(&pool.name);
    let mut tokens = slot.encode(&job, budget, max).instrument(span.clone()).await?;
    if matches!(tokens.degraded, Some(Degraded::NoTokenizer | Degraded::Mismatch)) {
        let asked = ask_engine::encode(router, pool, &job, slot.allowed(&job, budget)).instrument(span.clone());
        let asked = Box::pin(asked).await;
        tokens = asked.unwrap_or(tokens);
    }
    if parsed.endpoint == Endpoint::Completions && tokens.degraded.is_none() {
        for prompt in &mut tokens.prompts {
            *prompt = truncated(std::mem::take(prompt), parsed.fields.truncate);
        }
    }
    router.metrics.tokenize_seconds.observe(started.elapsed().as_secs_f64());
    span.record("tokens", tokens.total());
    if let Some(degraded) = tokens.degraded {
        span.record("degraded", degraded.as_str());
    }
    Ok((tokens, text))
}

/// What is left of a prompt that the client lets the engine shorten.
fn truncated(mut ids: Vec<u32>, how: Option<cairn_tokens::Truncate>) -> Vec<u32> {
    if let Some(how) = how {
        if how.from_left {
            ids.drain(..ids.len().saturating_sub(how.keep));
        } else {
            ids.truncate(how.keep);
        }
    }
    ids
}

/// The policy that a request names, where that is allowed.
fn request_policy(router: &Router, headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers
        .get(&POLICY_HEADER)
        .filter(|_| router.config.allow_policy_header)
    else {
        return Ok(None);
    };
    let name = value.to_str().unwrap_or_default();
    match cairn_routing::PolicyConfig::by_name(name) {
        Ok(policy) => Ok(Some(policy.name().to_string())),
        Err(error) => Err(ApiError::invalid("unknown_policy", error.to_string())),
    }
}

fn affinity(headers: &HeaderMap, fields: &Fields<'_>) -> Result<Vec<u8>, ApiError> {
    if let Some(value) = headers.get(&AFFINITY_HEADER) {
        let bytes = value.as_bytes();
        if bytes.is_empty() || bytes.len() > AFFINITY_BYTES_MAX || !bytes.iter().all(|b| (0x20..0x7f).contains(b)) {
            return Err(ApiError::invalid(
                "invalid_affinity",
                "X-Amzn-SageMaker-Prefix-Aware-Id must be 1 to 64 printable ASCII characters",
            ));
        }
        return Ok(bytes.to_vec());
    }
    Ok(fields.prompt_cache_key.clone().unwrap_or_default().into_bytes())
}
