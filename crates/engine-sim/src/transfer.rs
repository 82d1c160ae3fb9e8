//! The side channel between engines: a decode engine asks the prefill engine that its request names for the blocks.
//!
//! One request a connection: a line of JSON out, a line of JSON back. Only a living engine knows its own id and the
//! blocks that it still holds, so an id of an earlier lifetime, a second pull and an expired one all fail.

use std::sync::Arc;
use std::time::Duration;

use cairn_replay::engine_model::RequestId;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

use crate::engine::Engine;
use crate::rank::Command;

/// A prefill engine that doesn't answer for this long counts as dead.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(800);
/// Longest line of the side channel in bytes.
const LINE_BYTES_MAX: u64 = 4_096;
/// Connections served at once; further ones wait.
const CONNECTIONS_MAX: usize = 256;

/// Where a decode leg's blocks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteKv {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) engine_id: String,
    pub(crate) request_id: String,
}

#[derive(Serialize, Deserialize)]
struct PullRequest {
    engine_id: String,
    request_id: String,
}

#[derive(Serialize, Deserialize)]
struct PullAnswer {
    ok: bool,
    error: Option<String>,
}

/// Why blocks could not be pulled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PullError {
    #[error("the prefill engine at {address} can't be reached: {source}")]
    Unreachable { address: String, source: std::io::Error },
    #[error("the prefill engine at {address} did not answer in {} ms", ANSWER_TIMEOUT.as_millis())]
    Silent { address: String },
    #[error("the prefill engine at {address} refused: {reason}")]
    Refused { address: String, reason: String },
}

/// Pulls blocks and waits as long as their data would take.
pub(crate) async fn pull(remote: &RemoteKv, span: Duration) -> Result<(), PullError> {
    let address = format!("{}:{}", remote.host, remote.port);
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, ask(remote))
        .await
        .map_err(|_| PullError::Silent {
            address: address.clone(),
        })?
        .map_err(|source| PullError::Unreachable {
            address: address.clone(),
            source,
        })?;
    if !answer.ok {
        let reason = answer.error.unwrap_or_else(|| "no reason given".into());
        return Err(PullError::Refused { address, reason });
    }
    tokio::time::sleep(span).await;
    Ok(())
}

async fn ask(remote: &RemoteKv) -> std::io::Result<PullAnswer> {
    let mut stream = TcpStream::connect((remote.host.as_str(), remote.port)).await?;
    stream.set_nodelay(true)?;
    let request = PullRequest {
        engine_id: remote.engine_id.clone(),
        request_id: remote.request_id.clone(),
    };
    let mut line = serde_json::to_vec(&request)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    let mut answer = String::new();
    BufReader::new(stream)
        .take(LINE_BYTES_MAX)
        .read_line(&mut answer)
        .await?;
    Ok(serde_json::from_str(&answer)?)
}

/// Serves pulls until the engine stops.
pub(crate) async fn serve(engine: Arc<Engine>, listener: TcpListener, until: CancellationToken) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else {
            return;
        };
        let accepted = tokio::select! {
            () = until.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else { continue };
        let engine = engine.clone();
        tokio::spawn(async move {
            let answered = tokio::time::timeout(ANSWER_TIMEOUT, answer(&engine, stream)).await;
            if !matches!(answered, Ok(Ok(()))) {
                tracing::debug!("a pull on the side channel was not answered");
            }
            drop(slot);
        });
    }
}

async fn answer(engine: &Engine, stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    BufReader::new(read).take(LINE_BYTES_MAX).read_line(&mut line).await?;
    let result = match serde_json::from_str::<PullRequest>(&line) {
        Ok(request) => release(engine, &request).await,
        Err(_) => Err("the request is not a pull".to_owned()),
    };
    let answer = PullAnswer {
        ok: result.is_ok(),
        error: result.err(),
    };
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    write.write_all(&line).await
}

async fn release(engine: &Engine, request: &PullRequest) -> Result<(), String> {
    let life = engine.life();
    if request.engine_id != life.engine_id {
        return Err("that engine id belongs to an earlier lifetime".into());
    }
    let id = request
        .request_id
        .rsplit_once('-')
        .and_then(|(_, id)| u64::from_str_radix(id, 16).ok());
    let id = RequestId(id.ok_or("the request id is malformed")?);
    for rank in &life.ranks {
        let (answer, reply) = oneshot::channel();
        if rank.send(Command::Pull { id, answer }).await.is_ok() && matches!(reply.await, Ok(Some(()))) {
            return Ok(());
        }
    }
    Err("no blocks are held under that request id: they were pulled, expired or never there".into())
}
