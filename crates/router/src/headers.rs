//! Which headers cross the router, and in which direction.

use http::header::{self, HeaderMap, HeaderName};

/// Prefix of headers between Cairn's own parts; clients' are dropped.
const INTERNAL_PREFIX: &str = "x-cairn-";
/// Sends a request to one data-parallel rank; ours alone to set.
pub(crate) const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// Id of a request, taken from the client or made here.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Headers that belong to one connection.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Takes out of a client's headers what must not reach an engine.
pub(crate) fn strip_request(headers: &mut HeaderMap) {
    strip_hops(headers);
    for name in [
        header::HOST,
        header::CONTENT_LENGTH,
        header::EXPECT,
        // Answers are looked at as they pass, so they come uncompressed.
        header::ACCEPT_ENCODING,
        DATA_PARALLEL_RANK,
    ] {
        headers.remove(name);
    }
    strip_internal(headers);
}

/// Takes out of an engine's headers what belongs to its connection.
pub(crate) fn strip_response(headers: &mut HeaderMap) {
    strip_hops(headers);
    strip_internal(headers);
}

fn strip_hops(headers: &mut HeaderMap) {
    if let Some(named) = headers.get(header::CONNECTION).and_then(|v| v.to_str().ok()) {
        let named: Vec<HeaderName> = named.split(',').filter_map(|name| name.trim().parse().ok()).collect();
        for name in named {
            headers.remove(name);
        }
    }
    // Most requests and answers have none of them, which is seen for less than looking for each takes.
    if headers.keys().any(|name| HOP_BY_HOP.contains(name)) {
        for name in &HOP_BY_HOP {
            headers.remove(name);
        }
    }
}

fn strip_internal(headers: &mut HeaderMap) {
    if headers.keys().any(|name| name.as_str().starts_with(INTERNAL_PREFIX)) {
        let internal: Vec<HeaderName> = headers
            .keys()
            .filter(|name| name.as_str().starts_with(INTERNAL_PREFIX))
            .cloned()
            .collect();
        for name in internal {
            headers.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_and_connection_headers_stay_here() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("host", "a"),
            ("connection", "close, x-own"),
            ("x-own", "1"),
            ("x-cairn-policy", "kv"),
            ("x-data-parallel-rank", "3"),
            ("authorization", "Bearer k"),
            ("x-anything", "1"),
        ] {
            headers.insert(HeaderName::from_static(name), value.parse().unwrap());
        }
        strip_request(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["authorization", "x-anything"]);
    }
}
