//! A plain client and waits with a bound.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Longest time any single step of a test may take.
pub const BOUND: Duration = Duration::from_secs(60);

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    pub fn error_code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_string()
    }
}

pub async fn send(at: SocketAddr, request: Request<Full<Bytes>>) -> Answer {
    let response = open(at, request).await;
    let (parts, body) = response.into_parts();
    let body = tokio::time::timeout(BOUND, body.collect())
        .await
        .expect("an answer in time");
    let body = body
        .map(|b| String::from_utf8_lossy(&b.to_bytes()).into_owned())
        .unwrap_or_else(|e| format!("CUT {e}"));
    Answer {
        status: parts.status,
        headers: parts.headers,
        body,
    }
}

/// Sends a request and gives its answer's head; dropping the body closes the connection.
pub async fn open(at: SocketAddr, request: Request<Full<Bytes>>) -> http::Response<hyper::body::Incoming> {
    let stream = TcpStream::connect(at).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    tokio::time::timeout(BOUND, sender.send_request(request))
        .await
        .expect("an answer in time")
        .unwrap()
}

pub fn post(path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::post(path)
        .header("host", "router")
        .header("content-type", "application/json")
        .body(Full::new(body.into()))
        .unwrap()
}

pub fn get(path: &str) -> Request<Full<Bytes>> {
    Request::get(path)
        .header("host", "router")
        .body(Full::default())
        .unwrap()
}

/// Waits until `condition` holds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + BOUND;
    while !condition() {
        assert!(
            tokio::time::Instant::now() < deadline,
            "{what} didn't come about in time"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The value of one metric line that starts with `name` (labels included), 0 where there is none.
pub async fn metric(at: SocketAddr, name: &str) -> f64 {
    let text = send(at, get("/metrics")).await.body;
    text.lines()
        .filter_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok())
        .next()
        .unwrap_or(0.0)
}
