//! A request split over two engines: one computes the prompt, the other pulls its KV blocks and answers.
//!
//! vLLM's flow, after which SGLang's is below: the prefill leg asks for one token with `do_remote_decode`; the object in its answer goes to the decode
//! leg. Both legs live in one future, so the client's leaving, or either side's failure, ends both at once.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cairn_index::WorkerId;
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use serde_json::value::RawValue;
use tracing::Instrument;

use crate::body::edit;
use crate::decide::Reservation;
use crate::error::ApiError;
use crate::fleet::{Fleet, Worker};
use crate::forward::{Begun, begin};
use crate::metrics::Reason;
use crate::state::Router;
use crate::upstream::{UpstreamFault, chain};
use crate::walk::{Answered, Outcome, Try, leg, plan_of};

/// What the prefill leg is sent with.
const PREFILL_PARAMS: &str = concat!(
    r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"#,
    r#""remote_block_ids":null,"remote_host":null,"remote_port":null}"#
);
/// Largest accepted answer of a prefill leg: block ids of a long prompt and one token.
const PREFILL_BYTES_MAX: usize = 8 << 20;
/// Longest wait for a prefill, queue included; beyond it the pair is given up.
const PREFILL_TIMEOUT: Duration = Duration::from_secs(600);

#[derive(Deserialize)]
struct PrefillAnswer<'a> {
    #[serde(borrow, default)]
    kv_transfer_params: Option<&'a RawValue>,
}

/// Runs both legs up to the answer's first byte.
pub(crate) async fn run(
    router: &Arc<Router>,
    fleet: &Fleet,
    pair: (WorkerId, WorkerId),
    trying: &Try<'_>,
    reservation: &mut Reservation,
) -> Result<Outcome, ApiError> {
    let (Some((_, prefill)), Some((_, decode))) = (fleet.worker(pair.0), fleet.worker(pair.1)) else {
        return Err(ApiError::unavailable(
            "no_engine",
            "the engine has just gone; ask again",
        ));
    };
    let note = |reason| {
        router.metrics.splits.get_or_create(&Reason { reason }).inc();
    };
    if let Some(bootstrap) = &prefill.spec.bootstrap {
        let outcome = bootstrapped(router, (prefill, decode), trying, reservation, bootstrap).await?;
        note(if matches!(outcome, Outcome::Begun(_)) {
            "done"
        } else {
            "bootstrap_failed"
        });
        return Ok(outcome);
    }
    let params = match prefill_leg(router, prefill, trying).await? {
        Prefilled::Params(params) => params,
        Prefilled::Answer(begun) => {
            note("prefill_refused");
            return Ok(Outcome::Begun(Answered {
                by: prefill.id,
                begun,
                strip_usage: false,
            }));
        }
        Prefilled::Failed(fault) => {
            note("prefill_failed");
            return Ok(Outcome::Failed {
                blamed: prefill.id,
                fault,
            });
        }
    };
    reservation.prefill_done();
    match decode_leg(router, decode, trying, params).await? {
        Outcome::Begun(Answered { begun, .. }) if begun.head.status.is_server_error() && !begun.is_back_pressure() => {
            note("decode_failed");
            reservation.transfer_failed();
            let fault = UpstreamFault::Cut(format!("the decode leg answered {}", begun.head.status.as_u16()));
            Ok(Outcome::Failed {
                blamed: decode.id,
                fault,
            })
        }
        Outcome::Begun(answered) => {
            note("done");
            Ok(Outcome::Begun(answered))
        }
        Outcome::Failed { blamed, fault } => {
            note("decode_failed");
            reservation.transfer_failed();
            Ok(Outcome::Failed { blamed, fault })
        }
    }
}

/// SGLang's flow: both legs get the same request at once and meet in a room that the prefill engine's bootstrap server
/// keeps.
async fn bootstrapped(
    router: &Arc<Router>,
    (prefill, decode): (&Worker, &Worker),
    trying: &Try<'_>,
    reservation: &mut Reservation,
    bootstrap: &str,
) -> Result<Outcome, ApiError> {
    let (host, port) = bootstrap.rsplit_once(':').unwrap_or((bootstrap, "8998"));
    let mut plan = plan_of(trying.parsed);
    plan.extra = vec![
        ("bootstrap_host", serde_json::Value::from(host).to_string()),
        ("bootstrap_port", port.parse::<u16>().unwrap_or(8998).to_string()),
        // 63 bits: the engine reads it as a signed number.
        ("bootstrap_room", (rand::random::<u64>() >> 1).to_string()),
    ];
    let edited = edit(trying.parsed.body.bytes(), &trying.parsed.members, &plan)?;
    let prefill_span = tracing::info_span!("prefill", worker = prefill.name());
    let decode_span = tracing::info_span!("decode", worker = decode.name());
    let prefill_leg = leg(prefill, trying, &prefill_span, edited.body.clone());
    let decode_leg = leg(decode, trying, &decode_span, edited.body);
    let prefilling = begin(&router.upstream, prefill_leg).instrument(prefill_span);
    let decoding = begin(&router.upstream, decode_leg).instrument(decode_span);
    tokio::pin!(prefilling, decoding);
    let mut prefilled = false;
    loop {
        tokio::select! {
            // Returning from either side drops, and so cancels, the other one.
            answer = &mut prefilling, if !prefilled => match answer {
                Err(fault) => return Ok(Outcome::Failed { blamed: prefill.id, fault }),
                Ok(begun) if begun.head.status.is_success() => {
                    prefilled = true;
                    reservation.prefill_done();
                    tokio::spawn(tokio::time::timeout(PREFILL_TIMEOUT, rest(begun)));
                }
                Ok(begun) if begun.head.status.is_client_error() || begun.is_back_pressure() => {
                    return Ok(Outcome::Begun(Answered { by: prefill.id, begun, strip_usage: false }));
                }
                Ok(begun) => {
                    let fault = UpstreamFault::Cut(format!("the prefill leg answered {}", begun.head.status.as_u16()));
                    return Ok(Outcome::Failed { blamed: prefill.id, fault });
                }
            },
            answer = &mut decoding => return Ok(match answer {
                Ok(begun) => Outcome::Begun(Answered { by: decode.id, begun, strip_usage: edited.strip_usage }),
                Err(fault) => {
                    reservation.transfer_failed();
                    Outcome::Failed { blamed: decode.id, fault }
                }
            }),
        }
    }
}

enum Prefilled {
    /// The object for the decode leg.
    Params(String),
    /// The engine refused the request; its answer goes to the client.
    Answer(Begun),
    /// It failed.
    Failed(UpstreamFault),
}

async fn prefill_leg(router: &Router, worker: &Worker, trying: &Try<'_>) -> Result<Prefilled, ApiError> {
    let span = tracing::info_span!("prefill", worker = worker.name());
    let mut plan = plan_of(trying.parsed);
    plan.ask_usage = false;
    plan.prefill_leg = true;
    plan.kv_transfer_params = Some(PREFILL_PARAMS.to_string());
    let edited = edit(trying.parsed.body.bytes(), &trying.parsed.members, &plan)?;
    let leg = leg(worker, trying, &span, edited.body);
    let work = async {
        let begun = match begin(&router.upstream, leg).await {
            Ok(begun) => begun,
            Err(fault) => return Prefilled::Failed(fault),
        };
        let status = begun.head.status;
        if status.is_client_error() || begun.is_back_pressure() {
            return Prefilled::Answer(begun);
        }
        let bytes = match rest(begun).await {
            Ok(bytes) => bytes,
            Err(fault) => return Prefilled::Failed(fault),
        };
        if !status.is_success() {
            return Prefilled::Failed(UpstreamFault::Cut(format!(
                "the prefill leg answered {}",
                status.as_u16()
            )));
        }
        match serde_json::from_slice::<PrefillAnswer<'_>>(&bytes) {
            Ok(PrefillAnswer {
                kv_transfer_params: Some(params),
            }) if params.get().starts_with('{') => Prefilled::Params(params.get().to_string()),
            Ok(_) | Err(_) => Prefilled::Failed(UpstreamFault::Cut(
                "the prefill leg's answer has no kv_transfer_params; is its KV connector configured?".into(),
            )),
        }
    };
    let done = tokio::time::timeout(PREFILL_TIMEOUT, work.instrument(span)).await;
    Ok(done.unwrap_or_else(|_| {
        Prefilled::Failed(UpstreamFault::Cut(format!(
            "no prefill within {} s",
            PREFILL_TIMEOUT.as_secs()
        )))
    }))
}

/// The rest of a short answer.
async fn rest(begun: Begun) -> Result<Bytes, UpstreamFault> {
    let mut all = bytes::BytesMut::from(&begun.first.unwrap_or_default()[..]);
    let rest = Limited::new(begun.rest, PREFILL_BYTES_MAX)
        .collect()
        .await
        .map_err(|error| UpstreamFault::Cut(chain(&*error)))?;
    all.extend_from_slice(&rest.to_bytes());
    Ok(all.freeze())
}

async fn decode_leg(router: &Router, worker: &Worker, trying: &Try<'_>, params: String) -> Result<Outcome, ApiError> {
    let span = tracing::info_span!("decode", worker = worker.name());
    let mut plan = plan_of(trying.parsed);
    plan.kv_transfer_params = Some(params);
    let edited = edit(trying.parsed.body.bytes(), &trying.parsed.members, &plan)?;
    let leg = leg(worker, trying, &span, edited.body);
    // From the prefill's end to the first byte: the transfer of the blocks and one step.
    let transfer = tracing::info_span!(parent: &span, "transfer", worker = worker.name());
    match begin(&router.upstream, leg).instrument(transfer).instrument(span).await {
        Ok(begun) => Ok(Outcome::Begun(Answered {
            by: worker.id,
            begun,
            strip_usage: edited.strip_usage,
        })),
        Err(fault) => Ok(Outcome::Failed {
            blamed: worker.id,
            fault,
        }),
    }
}
