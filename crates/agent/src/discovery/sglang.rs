//! SGLang: everything from `/server_info` (older: `/get_server_info`), whose event configuration is for rank 0.

use serde_json::Value;

use super::{DiscoveryError, EngineFacts, by_rank, configured};
use crate::config::EngineConfig;
use crate::engine_http::EngineHttp;
use crate::page::MAX_RANKS;

/// Where SGLang publishes unless told otherwise.
const DEFAULT_ENDPOINT: &str = "tcp://*:5557";

pub(super) async fn complete(
    http: &EngineHttp,
    config: &EngineConfig,
    ranks_seen: u32,
    facts: &mut EngineFacts,
) -> Result<(), DiscoveryError> {
    let asked = |source| DiscoveryError::Http {
        engine: http.base().to_owned(),
        source,
    };
    let info = match http.json("/server_info").await {
        Ok(info) => info,
        Err(error) if error.is_absent() => http.json("/get_server_info").await.map_err(asked)?,
        Err(error) => return Err(asked(error)),
    };
    let number = |field: &str| find(&info, field).and_then(Value::as_u64);
    let text = |field: &str| find(&info, field).and_then(Value::as_str).filter(|t| !t.is_empty());
    let page_size = number("page_size")
        .and_then(|n| u32::try_from(n).ok())
        .filter(|n| *n > 0)
        .unwrap_or(1);
    facts.block_size = page_size;
    facts.capacity_blocks = number("max_total_num_tokens").unwrap_or(0) / u64::from(page_size);
    facts.max_num_seqs = number("max_running_requests")
        .and_then(|n| n.try_into().ok())
        .unwrap_or(0);
    facts.max_batched_tokens = number("chunked_prefill_size")
        .and_then(|n| n.try_into().ok())
        .unwrap_or(0);
    if facts.model_root.is_none() {
        facts.model_root = text("model_path").map(str::to_owned);
    }
    if facts.max_model_len.is_none() {
        facts.max_model_len = number("context_length").and_then(|n| n.try_into().ok());
    }
    match text("disaggregation_mode") {
        Some("prefill") => {
            facts.says_prefill = Some(true);
            let port = number("disaggregation_bootstrap_port").unwrap_or(8998);
            facts.bootstrap = Some(format!("{}:{port}", http.host()));
        }
        Some("decode") => facts.says_prefill = Some(false),
        _ => {}
    }
    let dp = number("dp_size").and_then(|n| u32::try_from(n).ok()).unwrap_or(1);
    let ranks = config.ranks.unwrap_or_else(|| dp.max(ranks_seen)).clamp(1, MAX_RANKS);
    if let Some(events) = configured(http, config, ranks)? {
        facts.events = events;
        return Ok(());
    }
    facts.events = discovered(http, &info, ranks)?;
    if facts.events.iter().all(Option::is_none) {
        facts.events_note = Some(
            "the engine publishes no KV events; start it with --kv-events-config \
             '{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\"}'"
                .to_owned(),
        );
    }
    Ok(())
}

/// A field of the answer itself, of `server_args`, or of the first scheduler's state.
fn find<'a>(info: &'a Value, field: &str) -> Option<&'a Value> {
    let nested = || info.get("server_args").and_then(|args| args.get(field));
    let internal = || {
        info.get("internal_states")
            .and_then(|s| s.get(0))
            .and_then(|s| s.get(field))
    };
    info.get(field)
        .filter(|v| !v.is_null())
        .or_else(nested)
        .or_else(internal)
}

fn discovered(http: &EngineHttp, info: &Value, ranks: u32) -> Result<Vec<Option<super::EventSource>>, DiscoveryError> {
    let config = match find(info, "kv_events_config") {
        None | Some(Value::Null) => return Ok(vec![None; ranks as usize]),
        // The flag's value is JSON in a string.
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|error| DiscoveryError::Unusable {
            engine: http.base().to_owned(),
            fault: format!(
                "its kv_events_config is not JSON ({error}); name the sockets in the configuration (events)"
            ),
        })?,
        Some(other) => other.clone(),
    };
    let text = |field: &str| config.get(field).and_then(Value::as_str);
    if text("publisher").is_some_and(|publisher| publisher != "zmq") {
        return Ok(vec![None; ranks as usize]);
    }
    let endpoint = text("endpoint").unwrap_or(DEFAULT_ENDPOINT);
    by_rank(
        http,
        ranks,
        endpoint,
        text("replay_endpoint"),
        text("topic").unwrap_or_default(),
        false,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_event_configuration_is_read_from_a_string_and_spread_over_ranks() {
        let http = EngineHttp::new("http://127.0.0.1:30000/", None, None).unwrap();
        let info = serde_json::json!({
            "kv_events_config": "{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:6000\",\"replay_endpoint\":\"tcp://*:7000\",\"topic\":\"kv-events\"}",
            "dp_size": 2,
        });
        let events = discovered(&http, &info, 2).unwrap();
        assert_eq!(events[1].as_ref().unwrap().endpoint.to_string(), "tcp://127.0.0.1:6001");
        assert_eq!(
            events[1].as_ref().unwrap().replay.as_ref().unwrap().to_string(),
            "tcp://127.0.0.1:7001"
        );
        let nested = serde_json::json!({"server_args": {"kv_events_config": null}});
        assert_eq!(discovered(&http, &nested, 2).unwrap(), vec![None, None]);
        let off = serde_json::json!({"kv_events_config": "{\"publisher\":\"null\"}"});
        assert_eq!(discovered(&http, &off, 1).unwrap(), vec![None]);
        let bad = serde_json::json!({"kv_events_config": "{"});
        assert!(discovered(&http, &bad, 1).is_err());
    }
}
