//! W3C trace context: read from requests, written to what they cause, whether or not traces are exported.

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Header that carries the context.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Identity of one span in one trace, see <https://www.w3.org/TR/trace-context/>.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceContext {
    /// 16 bytes, not all zero.
    pub trace_id: u128,
    /// 8 bytes, not all zero.
    pub span_id: u64,
    /// Whether the caller records it.
    pub sampled: bool,
}

impl TraceContext {
    /// A new trace.
    #[must_use]
    pub fn generate(sampled: bool) -> Self {
        Self {
            // Of so many numbers none is 0 in practice, and drawing from all of them is cheaper than from all but that.
            trace_id: rand::random::<u128>().max(1),
            span_id: rand::random::<u64>().max(1),
            sampled,
        }
    }

    /// Parses a `traceparent` value; `None` where it isn't one.
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        let bytes = value.as_bytes();
        let lower_hex = |part: &str| part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if bytes.len() < 55 || !value.is_ascii() {
            return None;
        }
        let (version, trace, span, flags) = (&value[0..2], &value[3..35], &value[36..52], &value[53..55]);
        let dashes = bytes[2] == b'-' && bytes[35] == b'-' && bytes[52] == b'-';
        let tail_ok = bytes.len() == 55 || (version != "00" && bytes[55] == b'-');
        if !dashes || !tail_ok || version == "ff" || ![version, trace, span, flags].into_iter().all(lower_hex) {
            return None;
        }
        let trace_id = u128::from_str_radix(trace, 16).ok().filter(|id| *id != 0)?;
        let span_id = u64::from_str_radix(span, 16).ok().filter(|id| *id != 0)?;
        let flags = u8::from_str_radix(flags, 16).ok()?;
        Some(Self {
            trace_id,
            span_id,
            sampled: flags & 1 == 1,
        })
    }

    /// As a `traceparent` value.
    #[must_use]
    pub fn to_header(self) -> String {
        self.header().into_iter().map(char::from).collect()
    }

    /// The same in bytes, by hand: every request writes one, and formatting takes ten times as long.
    fn header(self) -> [u8; 55] {
        let mut text = *b"00-00000000000000000000000000000000-0000000000000000-00";
        let parts: [(&[u8], usize); 3] = [
            (&self.trace_id.to_be_bytes(), 3),
            (&self.span_id.to_be_bytes(), 36),
            (&[u8::from(self.sampled)], 53),
        ];
        for (bytes, at) in parts {
            hex::encode_to_slice(bytes, &mut text[at..at + 2 * bytes.len()]).expect("two digits for each byte");
        }
        text
    }

    /// The trace id as 32 hex digits.
    #[must_use]
    pub fn trace_id_hex(self) -> String {
        format!("{:032x}", self.trace_id)
    }

    fn to_span_context(self) -> SpanContext {
        SpanContext::new(
            TraceId::from_bytes(self.trace_id.to_be_bytes()),
            SpanId::from_bytes(self.span_id.to_be_bytes()),
            if self.sampled {
                TraceFlags::SAMPLED
            } else {
                TraceFlags::default()
            },
            true,
            TraceState::default(),
        )
    }
}

/// Reads the caller's context; `None` where there is none or it is malformed.
#[must_use]
pub fn extract(headers: &HeaderMap) -> Option<TraceContext> {
    headers.get(TRACEPARENT)?.to_str().ok().and_then(TraceContext::parse)
}

/// Writes `context` for the callee.
pub fn inject(headers: &mut HeaderMap, context: TraceContext) {
    if let Ok(value) = HeaderValue::from_bytes(&context.header()) {
        headers.insert(TRACEPARENT, value);
    }
}

/// Makes `span` a child of `parent`; does nothing where traces aren't exported. Call it before the span is entered.
pub fn set_parent(span: &Span, parent: TraceContext) {
    if span.is_disabled() {
        return;
    }
    // Without an exporting layer there is no parent to set, and `outgoing` falls back to the caller's context.
    let _ = span.set_parent(Context::new().with_remote_span_context(parent.to_span_context()));
}

/// Links `span` to another trace.
pub fn add_link(span: &Span, to: TraceContext) {
    span.add_link(to.to_span_context());
}

/// The context to hand on from inside `span`: its own where traces are exported, else `fallback`.
#[must_use]
pub fn outgoing(span: &Span, fallback: TraceContext) -> TraceContext {
    of_span(span).unwrap_or(fallback)
}

/// The exported identity of `span`, where traces are exported.
#[must_use]
pub fn of_span(span: &Span) -> Option<TraceContext> {
    if span.is_disabled() {
        return None;
    }
    let context = span.context();
    let span_context = context.span().span_context().clone();
    span_context.is_valid().then(|| TraceContext {
        trace_id: u128::from_be_bytes(span_context.trace_id().to_bytes()),
        span_id: u64::from_be_bytes(span_context.span_id().to_bytes()),
        sampled: span_context.is_sampled(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_survives_the_header() {
        let context = TraceContext::generate(true);
        assert_eq!(TraceContext::parse(&context.to_header()), Some(context));
    }

    #[test]
    fn malformed_headers_are_no_context() {
        for bad in [
            "",
            "00-0-0-0",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-extra",
            "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01",
        ] {
            assert_eq!(TraceContext::parse(bad), None, "{bad}");
        }
        let future = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00-what";
        assert!(TraceContext::parse(future).is_some_and(|c| !c.sampled));
    }
}
