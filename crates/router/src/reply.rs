//! Answers' bodies: a few bytes of our own, or an engine's stream piped frame by frame.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Body, Frame, SizeHint};

use crate::error::ApiError;
use crate::relay::{Relay, RelayCut};

/// What goes back to a client.
pub(crate) enum ReplyBody {
    /// Our own bytes.
    Own(Full<Bytes>),
    /// An engine's.
    Relay(Box<Relay>),
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = RelayCut;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, RelayCut>>> {
        match self.get_mut() {
            Self::Own(full) => Pin::new(full)
                .poll_frame(cx)
                .map_err(|never: Infallible| match never {}),
            Self::Relay(relay) => Pin::new(relay.as_mut()).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(full) => full.is_end_stream(),
            Self::Relay(relay) => relay.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(full) => full.size_hint(),
            Self::Relay(relay) => relay.size_hint(),
        }
    }
}

/// A response of our own.
pub(crate) fn own(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::Own(Full::new(body.into())));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// A JSON response of our own.
pub(crate) fn json(status: StatusCode, body: impl Into<Bytes>) -> Response<ReplyBody> {
    own(status, "application/json", body)
}

/// An error.
pub(crate) fn error(error: &ApiError) -> Response<ReplyBody> {
    let mut response = json(error.status, error.json());
    if let Some(seconds) = error.retry_after {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}
