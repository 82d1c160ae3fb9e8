//! What a generation request asks for, apart from its prompt.

use std::sync::Arc;

use http::StatusCode;
use serde_json::{Map, Value};

use super::fields::Fields;
use crate::engine::Engine;
use crate::http::ApiError;
use crate::transfer::RemoteKv;

/// Answers of one request at most, over all its prompts.
pub(crate) const CHOICES_MAX: usize = 1_024;
/// vLLM's `max_tokens` of text completions where none is given.
const TEXT_TOKENS_DEFAULT: u32 = 16;
/// Longest header value or name that is copied from a request.
const TEXT_BYTES_MAX: usize = 4_096;

/// The chat or the text endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Chat,
    Text,
}

/// What the transfer fields ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// Nothing.
    #[default]
    None,
    /// Keep the blocks for a decode engine.
    Prefill,
    /// Pull the blocks from a prefill engine; `tokens` where it said how many.
    Decode { remote: RemoteKv, tokens: Option<u32> },
}

/// A generation request.
pub(crate) struct Wanted {
    pub(crate) kind: Kind,
    /// As the client named it.
    pub(crate) model: String,
    pub(crate) adapter: Option<Arc<str>>,
    pub(crate) salt: Option<Arc<str>>,
    pub(crate) n: u32,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) min_tokens: u32,
    pub(crate) ignore_eos: bool,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) continuous_usage: bool,
    pub(crate) return_token_ids: bool,
    pub(crate) echo: bool,
    pub(crate) transfer: Transfer,
    pub(crate) request_id: Option<String>,
}

impl Wanted {
    pub(crate) fn read(engine: &Engine, kind: Kind, body: &Map<String, Value>) -> Result<Self, ApiError> {
        let fields = Fields(body);
        let (model, adapter) = model(engine, &fields)?;
        let stream = fields.flag("stream")?;
        let options = fields.object("stream_options")?;
        if options.is_some() && !stream {
            return Err(ApiError::field(
                "stream_options",
                "is only allowed together with `stream: true`",
            ));
        }
        let option = |name| options.as_ref().map_or(Ok(false), |options| options.flag(name));
        let (include_usage, continuous_usage) = (option("include_usage")?, option("continuous_usage_stats")?);
        let longest = engine.config.max_model_len;
        let max_tokens = match kind {
            Kind::Chat => match fields.number("max_completion_tokens", 1, u32::MAX)? {
                Some(max) => Some(max),
                None => fields.number("max_tokens", 1, u32::MAX)?,
            },
            Kind::Text => Some(fields.number("max_tokens", 1, u32::MAX)?.unwrap_or(TEXT_TOKENS_DEFAULT)),
        };
        let salt = fields.text("cache_salt")?;
        if salt.is_some_and(|salt| salt.is_empty() || salt.len() > TEXT_BYTES_MAX) {
            return Err(ApiError::field("cache_salt", "give 1 to 4096 bytes, or leave it out"));
        }
        check_sampling(&fields)?;
        Ok(Self {
            kind,
            model,
            adapter,
            salt: salt.map(Arc::from),
            n: fields.number("n", 1, CHOICES_MAX as u32)?.unwrap_or(1),
            max_tokens,
            min_tokens: fields.number("min_tokens", 0, longest)?.unwrap_or(0),
            ignore_eos: fields.flag("ignore_eos")?,
            stream,
            include_usage,
            continuous_usage,
            return_token_ids: fields.flag("return_token_ids")?,
            echo: kind == Kind::Text && fields.flag("echo")?,
            transfer: transfer(engine, &fields)?,
            request_id: fields
                .text("request_id")?
                .filter(|id| id.len() <= TEXT_BYTES_MAX)
                .map(str::to_owned),
        })
    }
}

/// Resolves the model's name to the base model or an adapter.
pub(crate) fn model(engine: &Engine, fields: &Fields<'_>) -> Result<(String, Option<Arc<str>>), ApiError> {
    let base = &engine.config.model;
    match fields.text("model")? {
        None => Ok((base.clone(), None)),
        Some(name) if name == base => Ok((base.clone(), None)),
        Some(name) if engine.has_adapter(name) => Ok((name.to_owned(), Some(name.into()))),
        Some(name) => {
            let shown: String = name.chars().take(128).collect();
            let mut error = ApiError::status(StatusCode::NOT_FOUND, format!("The model `{shown}` does not exist."));
            error.param = Some("model");
            Err(error)
        }
    }
}

/// Sampling fields have no effect here, but wrong ones are refused as an engine does.
fn check_sampling(fields: &Fields<'_>) -> Result<(), ApiError> {
    for (name, low, high) in [
        ("temperature", 0.0, f64::MAX),
        ("top_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
    ] {
        if let Some(value) = fields.get(name)
            && !value.as_f64().is_some_and(|number| (low..=high).contains(&number))
        {
            return Err(ApiError::field(name, format!("give a number from {low} to {high:e}")));
        }
    }
    Ok(())
}

fn transfer(engine: &Engine, fields: &Fields<'_>) -> Result<Transfer, ApiError> {
    let Some(params) = fields.object("kv_transfer_params")? else {
        return Ok(Transfer::None);
    };
    if !engine.config.transfer.enabled {
        return Ok(Transfer::None);
    }
    if params.flag("do_remote_decode")? {
        return Ok(Transfer::Prefill);
    }
    if !params.flag("do_remote_prefill")? {
        return Ok(Transfer::None);
    }
    let text = |name: &'static str| {
        params.text(name)?.map(str::to_owned).ok_or_else(|| {
            ApiError::field(
                "kv_transfer_params",
                format!("{name} is missing; pass on what the prefill engine answered"),
            )
        })
    };
    let port = params.number("remote_port", 1, u32::from(u16::MAX))?;
    let port = port.and_then(|port| u16::try_from(port).ok());
    let port = port.ok_or_else(|| ApiError::field("kv_transfer_params", "remote_port is missing"))?;
    let remote = RemoteKv {
        host: text("remote_host")?,
        port,
        engine_id: text("remote_engine_id")?,
        request_id: text("remote_request_id")?,
    };
    Ok(Transfer::Decode {
        remote,
        tokens: params.number("remote_num_tokens", 0, u32::MAX)?,
    })
}
