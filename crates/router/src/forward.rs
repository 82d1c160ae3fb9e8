//! Sends a request to the chosen engine and gets its answer's first byte; what happens after that is the relay's.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Body;

use crate::engines::Engine;
use crate::headers::{DATA_PARALLEL_RANK, strip_response};
use crate::upstream::{Answer, Upstream, UpstreamFault, chain};

/// Type of a stream of events.
const EVENTS: &str = "text/event-stream";

/// One leg of a request as it goes to one engine.
pub(crate) struct Leg<'a> {
    /// Where to.
    pub engine: &'a Engine,
    /// Which rank, where the engine has several.
    pub rank: Option<u32>,
    /// The engine's path.
    pub path: Uri,
    /// Headers to send.
    pub headers: HeaderMap,
    /// The body to send.
    pub body: Bytes,
}

/// An answer that has begun.
pub(crate) struct Begun {
    /// Its head, without headers of the connection.
    pub head: http::response::Parts,
    /// Its first bytes; none where it has no body.
    pub first: Option<Bytes>,
    /// The rest.
    pub rest: Answer,
    /// Its whole length, where the engine told it.
    pub length: Option<u64>,
}

impl Begun {
    /// Whether it is a stream of events.
    pub(crate) fn is_events(&self) -> bool {
        self.head
            .headers
            .get(header::CONTENT_TYPE)
            .and_then(|v| v.to_str().ok())
            .and_then(|kind| kind.trim_start().get(..EVENTS.len()))
            .is_some_and(|kind| kind.eq_ignore_ascii_case(EVENTS))
    }

    /// Whether the engine says that it has too much to do.
    pub(crate) fn is_back_pressure(&self) -> bool {
        matches!(
            self.head.status,
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS
        )
    }

    /// Seconds that the engine asks to be left alone for.
    pub(crate) fn retry_after(&self) -> Option<u64> {
        self.head
            .headers
            .get(header::RETRY_AFTER)?
            .to_str()
            .ok()?
            .trim()
            .parse()
            .ok()
    }
}

/// Sends one leg and waits for the first byte of its answer; dropping the future cancels the request at the engine.
pub(crate) async fn begin(upstream: &Upstream, leg: Leg<'_>) -> Result<Begun, UpstreamFault> {
    let engine = leg.engine;
    let response = upstream.send(&engine.origin, build(leg)).await?;
    let (mut head, mut rest) = Response::into_parts(response);
    let length = rest.size_hint().exact();
    strip_response(&mut head.headers);
    let first = loop {
        match rest.frame().await {
            None => break None,
            Some(Err(error)) => return Err(UpstreamFault::Cut(chain(&error))),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data()
                    && !data.is_empty()
                {
                    break Some(data);
                }
            }
        }
    };
    Ok(Begun {
        head,
        first,
        rest,
        length,
    })
}

fn build(leg: Leg<'_>) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(leg.body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = leg.path;
    *request.headers_mut() = leg.headers;
    if let Some(rank) = leg.rank {
        request
            .headers_mut()
            .insert(DATA_PARALLEL_RANK, HeaderValue::from(rank));
    }
    request
}
