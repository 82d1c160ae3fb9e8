//! A closed-loop client: a fixed number of connections, each sending its next request when the last one is answered.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use http::{Request, Uri};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::prompts::{Prompts, Sharing};

/// Longest wait for one answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// One kind of request, sent over some connections.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Bytes of prompt text.
    pub bytes: usize,
    /// Answered by events.
    pub stream: bool,
    /// Connections at once.
    pub connections: usize,
    /// What was seen before.
    pub sharing: Sharing,
}

/// What came of a run.
#[derive(Default, Debug)]
pub struct Outcome {
    /// To the end of the answer, or to the first byte of a stream; in µs.
    pub latencies_us: Vec<f64>,
    /// Answers that weren't a whole 200.
    pub errors: u64,
    /// Body chunks received.
    pub chunks: u64,
    /// From first to last request.
    pub wall: Duration,
}

impl Outcome {
    /// Adds another round of the same shape.
    pub fn merge(&mut self, other: Outcome) {
        self.latencies_us.extend(other.latencies_us);
        self.errors += other.errors;
        self.chunks += other.chunks;
        self.wall += other.wall;
    }

    /// Answered requests.
    pub fn requests(&self) -> u64 {
        self.latencies_us.len() as u64
    }

    /// A percentile in µs.
    pub fn percentile(&self, p: f64) -> f64 {
        let mut sorted = self.latencies_us.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => f64::NAN,
            n => sorted[((n as f64 * p) as usize).min(n - 1)],
        }
    }
}

/// Sends `requests` requests of `shape` to `url`; `seed` makes user messages that no other run sends.
pub async fn run(url: &str, shape: Shape, requests: usize, seed: u64) -> anyhow::Result<Outcome> {
    let address = url
        .strip_prefix("http://")
        .context("the target is an http URL")?
        .to_owned();
    let each = requests.div_ceil(shape.connections);
    let begun = Instant::now();
    let clients = (0..shape.connections).map(|c| {
        let address = address.clone();
        tokio::spawn(async move {
            client(
                &address,
                shape,
                each,
                seed.wrapping_mul(1_000_003).wrapping_add(c as u64),
            )
            .await
        })
    });
    let mut total = Outcome::default();
    for client in clients.collect::<Vec<_>>() {
        total.merge(client.await.context("a client ended early")??);
    }
    total.wall = begun.elapsed();
    Ok(total)
}

async fn client(address: &str, shape: Shape, requests: usize, seed: u64) -> anyhow::Result<Outcome> {
    let mut prompts = Prompts::new(seed, shape.bytes, shape.sharing, shape.stream);
    let mut outcome = Outcome::default();
    let mut connection = connect(address).await?;
    for _ in 0..requests {
        let body = prompts.next_body();
        let sent = Instant::now();
        match tokio::time::timeout(ANSWER_TIMEOUT, ask(&mut connection, address, body, shape.stream)).await {
            Ok(Ok(answer)) => {
                outcome
                    .latencies_us
                    .push(answer.measured.duration_since(sent).as_secs_f64() * 1e6);
                outcome.chunks += answer.chunks;
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, "a request failed");
                outcome.errors += 1;
                connection = connect(address).await?;
            }
            Err(_) => bail!("{address} did not answer within {ANSWER_TIMEOUT:?}"),
        }
    }
    Ok(outcome)
}

async fn connect(address: &str) -> anyhow::Result<SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(address)
        .await
        .with_context(|| format!("connecting to {address}"))?;
    stream.set_nodelay(true)?;
    let (sender, connection) = handshake(TokioIo::new(stream))
        .await
        .with_context(|| format!("greeting {address}"))?;
    tokio::spawn(connection);
    Ok(sender)
}

struct Answer {
    measured: Instant,
    chunks: u64,
}

async fn ask(
    connection: &mut SendRequest<Full<Bytes>>,
    address: &str,
    body: Vec<u8>,
    stream: bool,
) -> anyhow::Result<Answer> {
    connection.ready().await?;
    let request = Request::post(Uri::from_static("/v1/chat/completions"))
        .header("host", address)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))?;
    let response = connection.send_request(request).await?;
    let status = response.status();
    let mut body = response.into_body();
    let (mut first, mut chunks, mut tail) = (None, 0, Vec::new());
    while let Some(frame) = body.frame().await {
        if let Some(data) = frame?.data_ref() {
            first.get_or_insert_with(Instant::now);
            chunks += 1;
            tail.clear();
            tail.extend_from_slice(&data[data.len().saturating_sub(16)..]);
        }
    }
    if status != 200 || (stream && !tail.ends_with(b"[DONE]\n\n")) {
        bail!("{address} answered {status}");
    }
    Ok(Answer {
        measured: if stream {
            first.unwrap_or_else(Instant::now)
        } else {
            Instant::now()
        },
        chunks,
    })
}
