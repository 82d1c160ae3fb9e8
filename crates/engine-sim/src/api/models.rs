//! `/v1/models` and the adapters behind it.

use http::StatusCode;
use serde_json::{Value, json};

use super::Call;
use super::fields::{self, Fields};
use crate::config::AdapterConfig;
use crate::engine::Engine;
use crate::http::{ApiError, Reply, json_reply, reply};

/// Longest adapter name in bytes.
const NAME_BYTES_MAX: usize = 256;

/// The base model and its adapters.
pub(crate) fn list(engine: &Engine) -> Reply {
    let config = &engine.config;
    let mut data = vec![entry(engine, &config.model, &config.model_root(), None)];
    for adapter in engine.adapters() {
        data.push(entry(engine, &adapter.name, &adapter.path, Some(&config.model)));
    }
    json_reply(StatusCode::OK, &json!({"object": "list", "data": data}))
}

fn entry(engine: &Engine, id: &str, root: &str, parent: Option<&str>) -> Value {
    json!({
        "id": id,
        "object": "model",
        "created": engine.created,
        "owned_by": if engine.config.events.wire.is_sglang() { "sglang" } else { "vllm" },
        "root": root,
        "parent": parent,
        "max_model_len": parent.is_none().then_some(engine.config.max_model_len),
        "permission": [],
    })
}

/// Loads an adapter.
pub(crate) fn load(engine: &Engine, call: &Call) -> Result<Reply, ApiError> {
    let body = fields::object(&call.body)?;
    let fields = Fields(&body);
    let name = name(&fields)?;
    let path = fields.text("lora_path")?.unwrap_or_default().to_owned();
    let text = format!("Success: LoRA adapter '{name}' added successfully.");
    engine
        .load_adapter(AdapterConfig { name, path })
        .map_err(ApiError::bad)?;
    Ok(reply(StatusCode::OK, "text/plain; charset=utf-8", text))
}

/// Unloads an adapter.
pub(crate) fn unload(engine: &Engine, call: &Call) -> Result<Reply, ApiError> {
    let body = fields::object(&call.body)?;
    let name = name(&Fields(&body))?;
    if !engine.unload_adapter(&name) {
        return Err(ApiError::status(
            StatusCode::NOT_FOUND,
            format!("the adapter `{name}` isn't loaded"),
        ));
    }
    let text = format!("Success: LoRA adapter '{name}' removed successfully.");
    Ok(reply(StatusCode::OK, "text/plain; charset=utf-8", text))
}

fn name(fields: &Fields<'_>) -> Result<String, ApiError> {
    match fields.text("lora_name")? {
        Some(name) if !name.is_empty() && name.len() <= NAME_BYTES_MAX => Ok(name.to_owned()),
        Some(_) | None => Err(ApiError::field("lora_name", "give a name of 1 to 256 bytes")),
    }
}
