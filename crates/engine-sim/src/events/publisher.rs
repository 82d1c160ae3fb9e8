//! Publishes one rank's batches: numbered from 0 in each lifetime, kept for replay, sent to subscribers.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use cairn_replay::engine_model::CacheEvent;
use futures::StreamExt;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use zeromq::{PubSocket, RouterSocket, Socket, SocketEvent, SocketSend, ZmqMessage};

use super::encode::Encoder;
use super::replay::{self, ReplayBuffer};
use crate::config::EventsConfig;

/// Batches that wait for the socket; vLLM's `max_queue_size`. Past it a batch is dropped and counted.
const QUEUE_MAX: usize = 100_000;
/// How often a lifetime tries to bind the port of the lifetime before it, whose socket may still be closing.
const BIND_TRIES: u32 = 100;
const BIND_PAUSE: Duration = Duration::from_millis(20);
/// Pause between attempts to reach a subscriber that binds.
const CONNECT_PAUSE: Duration = Duration::from_millis(100);

/// What a rank's publisher needs besides the configuration.
pub(crate) struct PublisherSetup {
    /// Endpoint of this rank; with the port of an earlier lifetime where there was one.
    pub(crate) endpoint: String,
    /// Replay endpoint of this rank, where it has one.
    pub(crate) replay_endpoint: Option<String>,
    /// Shape of the payload.
    pub(crate) encoder: Encoder,
    /// Batches to lose; shared with the control endpoints.
    pub(crate) losses: Arc<Losses>,
}

/// Switches that make events get lost.
#[derive(Default)]
pub(crate) struct Losses {
    /// Batches still to drop; negative until told otherwise.
    pub(crate) drop_live: AtomicI64,
    /// Whether dropped batches are missing from replay too (1) or only live (0).
    pub(crate) drop_from_replay: AtomicU64,
    /// Batches dropped so far, for any reason.
    pub(crate) dropped: AtomicU64,
}

impl Losses {
    fn takes_one(&self) -> bool {
        let drop = self.drop_live.load(Ordering::Relaxed);
        if drop > 0 {
            self.drop_live.store(drop - 1, Ordering::Relaxed);
        }
        drop != 0
    }
}

/// One rank's event stream in one lifetime.
pub(crate) struct Publisher {
    encoder: Encoder,
    topic: Bytes,
    seq: u64,
    buffer: ReplayBuffer,
    queue: mpsc::Sender<ZmqMessage>,
    losses: Arc<Losses>,
    endpoint: String,
    replay_endpoint: Option<String>,
    /// Ends the live socket alone.
    live: CancellationToken,
    /// Ends everything; dropped with the publisher.
    all: CancellationToken,
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.all.cancel();
    }
}

impl Publisher {
    /// Opens the sockets. Errors name the endpoint.
    pub(crate) async fn open(config: &EventsConfig, setup: PublisherSetup) -> Result<Self, String> {
        let all = CancellationToken::new();
        let live = all.child_token();
        let (queue, batches) = mpsc::channel(QUEUE_MAX);
        let endpoint = open_live(config.bind, &setup.endpoint, batches, live.clone()).await?;
        let buffer = ReplayBuffer::new(config.buffer_steps);
        let topic = Bytes::from(config.topic.clone());
        let mut replay_endpoint = None;
        if let Some(wanted) = &setup.replay_endpoint {
            let mut socket = RouterSocket::new();
            replay_endpoint = Some(bind(&mut socket, wanted).await?);
            let answers = config.wire.replay_has_topic().then(|| topic.clone());
            let (buffer, all) = (buffer.clone(), all.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = replay::serve(socket, buffer, answers) => {}
                    () = all.cancelled() => {}
                }
            });
        }
        let (encoder, losses) = (setup.encoder, setup.losses);
        Ok(Self {
            encoder,
            topic,
            seq: 0,
            buffer,
            queue,
            losses,
            endpoint,
            replay_endpoint,
            live,
            all,
        })
    }

    /// Where subscribers find the stream.
    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Where replay is answered.
    pub(crate) fn replay_endpoint(&self) -> Option<&str> {
        self.replay_endpoint.as_deref()
    }

    /// The next batch's number.
    pub(crate) fn next_seq(&self) -> u64 {
        self.seq
    }

    /// The replay buffer, to lose it.
    pub(crate) fn buffer(&self) -> &ReplayBuffer {
        &self.buffer
    }

    /// Closes the live socket; replay still answers.
    pub(crate) fn kill_live(&self) {
        self.live.cancel();
    }

    /// Opens the live socket again on its old endpoint.
    pub(crate) async fn reopen_live(&mut self, bind: bool) -> Result<(), String> {
        self.live.cancel();
        self.live = self.all.child_token();
        let (queue, batches) = mpsc::channel(QUEUE_MAX);
        open_live(bind, &self.endpoint, batches, self.live.clone()).await?;
        self.queue = queue;
        Ok(())
    }

    /// Numbers, keeps and sends one batch.
    pub(crate) fn publish(&mut self, events: &[CacheEvent]) {
        let unix_s = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0.0, |d| d.as_secs_f64());
        let payload = Bytes::from(self.encoder.batch(unix_s, events));
        let seq = self.seq;
        self.seq += 1;
        let lost = self.losses.takes_one();
        if !lost || self.losses.drop_from_replay.load(Ordering::Relaxed) == 0 {
            self.buffer.push(seq, payload.clone());
        }
        if lost {
            self.losses.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let frames = vec![self.topic.clone(), Bytes::copy_from_slice(&seq.to_be_bytes()), payload];
        let Ok(message) = ZmqMessage::try_from(frames) else {
            return;
        };
        if self.queue.try_send(message).is_err() {
            self.losses.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Opens the live socket and the task that feeds it; returns the endpoint with its real port.
async fn open_live(
    bind_it: bool,
    endpoint: &str,
    batches: mpsc::Receiver<ZmqMessage>,
    until: CancellationToken,
) -> Result<String, String> {
    let mut socket = PubSocket::new();
    if bind_it {
        let resolved = bind(&mut socket, endpoint).await?;
        tokio::spawn(async move {
            tokio::select! {
                () = feed(&mut socket, batches) => {}
                () = until.cancelled() => {}
            }
            socket.close().await;
        });
        return Ok(resolved);
    }
    let target = endpoint.to_owned();
    tokio::spawn(async move {
        tokio::select! {
            () = feed_connecting(target, batches) => {}
            () = until.cancelled() => {}
        }
    });
    Ok(endpoint.to_owned())
}

async fn feed(socket: &mut PubSocket, mut batches: mpsc::Receiver<ZmqMessage>) {
    while let Some(message) = batches.recv().await {
        if let Err(error) = socket.send(message).await {
            tracing::debug!(%error, "an event batch was not sent");
        }
    }
}

/// Connects to a subscriber that binds, for ever; batches of a time without connection are lost, as PUB loses them.
async fn feed_connecting(endpoint: String, mut batches: mpsc::Receiver<ZmqMessage>) {
    loop {
        let mut socket = PubSocket::new();
        let mut monitor = socket.monitor();
        {
            let connect = connect(&mut socket, &endpoint);
            tokio::pin!(connect);
            loop {
                tokio::select! {
                    () = &mut connect => break,
                    batch = batches.recv() => if batch.is_none() { return },
                }
            }
        }
        loop {
            tokio::select! {
                event = monitor.next() => match event {
                    Some(SocketEvent::Disconnected(_)) | None => break,
                    Some(_) => {}
                },
                batch = batches.recv() => match batch {
                    Some(message) => if let Err(error) = socket.send(message).await {
                        tracing::debug!(%error, "an event batch was not sent");
                    },
                    None => return,
                },
            }
        }
    }
}

async fn connect(socket: &mut PubSocket, endpoint: &str) {
    while let Err(error) = socket.connect(endpoint).await {
        tracing::debug!(%error, endpoint, "the subscriber is not there yet");
        tokio::time::sleep(CONNECT_PAUSE).await;
    }
}

async fn bind<S: Socket>(socket: &mut S, endpoint: &str) -> Result<String, String> {
    let endpoint = endpoint.replace("tcp://*:", "tcp://0.0.0.0:");
    let fixed = !endpoint.ends_with(":0");
    let mut tries = 0;
    loop {
        match socket.bind(&endpoint).await {
            Ok(resolved) => return Ok(resolved.to_string()),
            Err(_) if fixed && tries < BIND_TRIES => {
                tries += 1;
                tokio::time::sleep(BIND_PAUSE).await;
            }
            Err(error) => return Err(format!("can't bind {endpoint}: {error}")),
        }
    }
}
