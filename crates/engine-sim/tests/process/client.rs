//! A small HTTP client and subscriber, so that nothing of the engine's own code is trusted.

use std::net::SocketAddr;
use std::time::Duration;

use cairn_engine_sim::{Config, Running};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// Nothing here takes longer than this.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// An engine that answers at once, on free ports.
pub fn instant() -> Config {
    let mut config = Config {
        listen: ([127, 0, 0, 1], 0).into(),
        seed: 7,
        ..Config::default()
    };
    config.timing.speed = 0.0;
    config
}

/// One request on a connection of its own; status (0 when the connection was closed) and body, chunks joined.
pub async fn call(address: SocketAddr, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // A connection that is reset has nothing more to say.
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    };
    let answer = tokio::time::timeout(PATIENCE, exchange)
        .await
        .expect("the engine answers in time");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer.as_str(), ""));
    let status = head.split(' ').nth(1).map_or(0, |code| code.parse().unwrap());
    if !head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        return (status, body.to_owned());
    }
    let mut out = String::new();
    let mut rest = body;
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            break;
        }
        out.push_str(&after[..size]);
        rest = &after[size + 2..];
    }
    (status, out)
}

pub async fn post(engine: &Running, path: &str, body: &Value) -> (u16, Value) {
    let (status, body) = call(engine.http, "POST", path, "", &body.to_string()).await;
    (status, serde_json::from_str(&body).unwrap_or(Value::Null))
}

pub async fn get(engine: &Running, path: &str) -> (u16, String) {
    call(engine.http, "GET", path, "", "").await
}

/// A completion of `len` prompt tokens that begin with `seed`; its usage's cached tokens.
pub async fn complete(engine: &Running, seed: u32, len: u32) -> u64 {
    let prompt: Vec<u32> = (0..len).map(|i| (seed * 97 + i) % 250).collect();
    let body = serde_json::json!({"prompt": prompt, "max_tokens": 1});
    let (status, answer) = post(engine, "/v1/completions", &body).await;
    assert_eq!(status, 200, "{answer}");
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

/// A subscriber to everything, connected and heard.
pub async fn subscribe(engine: &Running, rank: usize) -> SubSocket {
    let mut socket = SubSocket::new();
    socket.connect(&engine.events()[rank].live).await.unwrap();
    socket.subscribe("").await.unwrap();
    socket
}

/// The next message's frames.
pub async fn next(socket: &mut SubSocket) -> Vec<Vec<u8>> {
    let message = tokio::time::timeout(PATIENCE, socket.recv())
        .await
        .expect("an event arrives in time")
        .unwrap();
    message.into_vec().into_iter().map(|frame| frame.to_vec()).collect()
}

/// Everything that a replay socket answers, the end marker included.
pub async fn replay(endpoint: &str, from: u64) -> Vec<Vec<Vec<u8>>> {
    let mut socket = DealerSocket::new();
    socket.connect(endpoint).await.unwrap();
    let request = vec![bytes::Bytes::new(), bytes::Bytes::copy_from_slice(&from.to_be_bytes())];
    socket.send(ZmqMessage::try_from(request).unwrap()).await.unwrap();
    let mut answers = Vec::new();
    loop {
        let message = tokio::time::timeout(PATIENCE, socket.recv())
            .await
            .expect("replay answers in time")
            .unwrap();
        let frames: Vec<Vec<u8>> = message.into_vec().into_iter().map(|frame| frame.to_vec()).collect();
        let end = frames.iter().any(|frame| frame == &[0xff; 8]);
        answers.push(frames);
        if end {
            return answers;
        }
    }
}

/// Polls until `check` gives a value; the bound is in time, not in tries.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut check: impl FnMut() -> F) -> T {
    let poll = async {
        loop {
            if let Some(value) = check().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, poll)
        .await
        .unwrap_or_else(|_| panic!("{what} did not happen in time"))
}
