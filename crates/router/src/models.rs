//! `GET /v1/models`: every name that requests may use.

use http::{Response, StatusCode};
use serde_json::json;

use crate::reply::{self, ReplyBody};
use crate::state::Router;

/// The list in OpenAI's shape, with vLLM's `root`, `parent` and `max_model_len`.
pub(crate) fn list(router: &Router) -> Response<ReplyBody> {
    let fleet = router.fleet.load();
    let cards: Vec<_> = fleet
        .names()
        .into_iter()
        .map(|(name, to)| {
            let pool = &fleet.pools[to.pool];
            let base = pool.models.first().unwrap_or(&pool.name);
            json!({
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "cairn",
                "root": to.adapter.as_ref().unwrap_or(base),
                "parent": to.adapter.as_ref().map(|_| base),
                "max_model_len": pool.max_model_len,
            })
        })
        .collect();
    reply::json(StatusCode::OK, json!({"object": "list", "data": cards}).to_string())
}
