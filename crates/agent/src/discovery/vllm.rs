//! vLLM: event sockets from `/kv_event_sources`, or from the configuration for versions that lack it.

use serde_json::Value;

use super::{DiscoveryError, EngineFacts, EventSource, configured};
use crate::config::EngineConfig;
use crate::engine_http::EngineHttp;
use crate::page::MAX_RANKS;
use crate::zmtp::Endpoint;

pub(super) async fn complete(
    http: &EngineHttp,
    config: &EngineConfig,
    ranks_seen: u32,
    facts: &mut EngineFacts,
) -> Result<(), DiscoveryError> {
    let ranks = config.ranks.unwrap_or(ranks_seen);
    if let Some(events) = configured(http, config, ranks)? {
        facts.events = events;
        return Ok(());
    }
    match http.json("/kv_event_sources").await {
        Ok(sources) => {
            facts.events = read_sources(http, &sources, ranks)?;
            if facts.events.iter().all(Option::is_none) {
                facts.events_note = Some(
                    "the engine publishes no KV events; start it with --kv-events-config \
                     '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\
                     \"replay_endpoint\":\"tcp://*:5558\"}'"
                        .to_owned(),
                );
            }
            Ok(())
        }
        Err(error) if error.is_absent() => {
            facts.events = vec![None; ranks as usize];
            facts.events_note = Some(
                "this vLLM has no /kv_event_sources (older than 0.31, or events are off); name its sockets in the \
                 configuration: events = { endpoint = \"tcp://HOST:5557\", replay_endpoint = \"tcp://HOST:5558\" }"
                    .to_owned(),
            );
            Ok(())
        }
        Err(source) => Err(DiscoveryError::Http {
            engine: http.base().to_owned(),
            source,
        }),
    }
}

fn read_sources(http: &EngineHttp, sources: &Value, ranks: u32) -> Result<Vec<Option<EventSource>>, DiscoveryError> {
    let Some(sources) = sources.as_object() else {
        return Err(DiscoveryError::Unusable {
            engine: http.base().to_owned(),
            fault:
                "GET /kv_event_sources is not a JSON object of ranks; name the sockets in the configuration (events)"
                    .to_owned(),
        });
    };
    let parsed = |text: &str| {
        Endpoint::parse(text)
            .map(|endpoint| endpoint.reached_by(http.host()))
            .map_err(|source| DiscoveryError::Endpoint {
                engine: http.base().to_owned(),
                source,
            })
    };
    let mut events = vec![None; ranks as usize];
    for (rank, source) in sources {
        let Some(rank) = rank.parse::<u32>().ok().filter(|r| *r < MAX_RANKS) else {
            continue;
        };
        let text = |field: &str| source.get(field).and_then(Value::as_str).filter(|t| !t.is_empty());
        let Some(endpoint) = text("endpoint") else { continue };
        let found = EventSource {
            endpoint: parsed(endpoint)?,
            replay: text("replay_endpoint").map(parsed).transpose()?,
            topic: text("topic").unwrap_or_default().to_owned(),
            bind: false,
        };
        if events.len() <= rank as usize {
            events.resize(rank as usize + 1, None);
        }
        events[rank as usize] = Some(found);
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_gets_its_own_sockets_at_the_engines_host() {
        let http = EngineHttp::new("http://10.0.0.7:8000", None, None).unwrap();
        let sources = serde_json::json!({
            "0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": "kv"},
            "1": {"endpoint": "tcp://127.0.0.1:40001", "replay_endpoint": null, "topic": ""},
            "x": {"endpoint": "tcp://*:1"},
        });
        let events = read_sources(&http, &sources, 1).unwrap();
        assert_eq!(events.len(), 2);
        let first = events[0].as_ref().unwrap();
        assert_eq!(first.endpoint.to_string(), "tcp://10.0.0.7:5557");
        assert_eq!(first.replay.as_ref().unwrap().to_string(), "tcp://10.0.0.7:5657");
        assert_eq!(
            events[1].as_ref().unwrap().endpoint.to_string(),
            "tcp://127.0.0.1:40001"
        );
        assert!(read_sources(&http, &serde_json::json!([1]), 1).is_err());
        assert!(read_sources(&http, &serde_json::json!({"0": {"endpoint": "carrier-pigeon"}}), 1).is_err());
    }
}
