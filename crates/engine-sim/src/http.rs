//! Answers: JSON, errors in vLLM's shape, text, and bodies that are streamed.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use serde_json::{Value, json};

use crate::api::stream::EventStream;

/// What every endpoint returns.
pub(crate) type Reply = Response<Body>;

/// A body that is there, or that comes token by token.
pub(crate) enum Body {
    /// All of it.
    Full(Full<Bytes>),
    /// Server-sent events.
    Stream(Box<EventStream>),
}

/// The stream was cut: the connection ends without the body's end.
#[derive(Debug, thiserror::Error)]
#[error("the stream was cut")]
pub(crate) struct Cut;

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        match &mut *self {
            Body::Full(full) => Pin::new(full)
                .poll_frame(cx)
                .map_err(|never: Infallible| match never {}),
            Body::Stream(stream) => stream
                .poll_chunk(cx)
                .map(|chunk| chunk.map(|bytes| bytes.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Body::Full(full) => full.is_end_stream(),
            Body::Stream(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Full(full) => full.size_hint(),
            Body::Stream(_) => SizeHint::default(),
        }
    }
}

/// An answer of `content_type`.
pub(crate) fn reply(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut response = Response::new(Body::Full(Full::new(body.into())));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

/// A JSON answer.
pub(crate) fn json_reply(status: StatusCode, value: &Value) -> Reply {
    reply(
        status,
        "application/json",
        serde_json::to_vec(value).unwrap_or_default(),
    )
}

/// 200 without a body.
pub(crate) fn ok() -> Reply {
    reply(StatusCode::OK, "text/plain; charset=utf-8", Bytes::new())
}

/// A refusal, as vLLM words its errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    pub(crate) param: Option<&'static str>,
}

impl ApiError {
    /// 400.
    pub(crate) fn bad(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param: None,
        }
    }

    /// 400 naming a field.
    pub(crate) fn field(param: &'static str, message: impl std::fmt::Display) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: format!("{param}: {message}"),
            param: Some(param),
        }
    }

    /// Another status.
    pub(crate) fn status(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
        }
    }

    /// The error object.
    pub(crate) fn to_json(&self) -> Value {
        let kind = match self.status {
            StatusCode::BAD_REQUEST => "BadRequestError",
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::UNAUTHORIZED => "AuthenticationError",
            StatusCode::PAYLOAD_TOO_LARGE => "RequestEntityTooLargeError",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
            _ => "InternalServerError",
        };
        json!({"error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.status.as_u16(),
        }})
    }

    /// As an answer.
    pub(crate) fn into_reply(self) -> Reply {
        json_reply(self.status, &self.to_json())
    }
}
