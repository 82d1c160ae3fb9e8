//! Which headers cross the router, and in which direction.

use http::header::{self, HeaderMap, HeaderName};

/// Prefix of headers between Cairn's own parts; clients' are dropped.
const INTERNAL_PREFIX: &str = "x-cairn-";
/// Sends a request to one data-parallel rank; ours alone to set.
pub(crate) const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// Id of a request, taken from the client or made here.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Headers that belong to one connection.
static HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Headers of a request that are ours to write for each engine.
static OURS: [HeaderName; 5] = [
    header::HOST,
    header::CONTENT_LENGTH,
    header::EXPECT,
    // Answers are looked at as they pass, so they come uncompressed.
    header::ACCEPT_ENCODING,
    DATA_PARALLEL_RANK,
];
/// Headers that are added to those of the client: trace, rank, host and length.
const ADDED: usize = 4;

/// What of a client's headers goes to an engine, with room for what is added: a clone has none, and would grow twice.
pub(crate) fn sent_on(headers: &HeaderMap) -> HeaderMap {
    let named = named_by_connection(headers);
    let goes_on = |name: &HeaderName| !stays(name) && !OURS.contains(name) && !named.contains(name);
    let mut sent = HeaderMap::with_capacity(headers.len() + ADDED);
    for (name, value) in headers.iter().filter(|(name, _)| goes_on(name)) {
        sent.append(name.clone(), value.clone());
    }
    sent
}

/// Takes out of an engine's headers what belongs to its connection.
pub(crate) fn strip_response(headers: &mut HeaderMap) {
    for name in named_by_connection(headers) {
        headers.remove(name);
    }
    // Most answers have none of them, which is seen for less than looking for each takes.
    if headers.keys().any(stays) {
        let hops: Vec<HeaderName> = headers.keys().filter(|name| stays(name)).cloned().collect();
        for name in hops {
            headers.remove(name);
        }
    }
}

/// Headers that belong to a connection because it says so.
fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let named = headers.get(header::CONNECTION).and_then(|value| value.to_str().ok());
    named
        .into_iter()
        .flat_map(|named| named.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect()
}

/// Whether a header ends here, whichever way it came.
fn stays(name: &HeaderName) -> bool {
    HOP_BY_HOP.contains(name) || name.as_str().starts_with(INTERNAL_PREFIX)
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
        let sent = sent_on(&headers);
        let mut left: Vec<_> = sent.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["authorization", "x-anything"]);
    }
}
