//! What isn't replicated: load reports and other routers' reservations come down the feed; our own go up to one node.

use std::sync::Arc;
use std::time::Duration;

use cairn_blocks::BlockKey;
use cairn_index::WorkerId;
use cairn_proto::limits::MESSAGE_BYTES_MAX;
use cairn_proto::security::Credentials;
use cairn_proto::v1;
use cairn_proto::v1::soft_client::SoftClient;
use cairn_routing::{LoadReport, Micros, RemoteReservation, RouterFrame, RouterName, SpeculativePrefix, ViewState};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::state::Router;
use crate::view::SoftSink;

/// Shortest time between two frames.
const FRAME_INTERVAL: Duration = Duration::from_millis(50);
/// A frame is repeated after this long while anything is reserved, since entries die a second after the last one.
const FRAME_REPEAT: Duration = Duration::from_millis(300);
/// Frames that wait for a slow node; older ones are worth nothing.
const FRAMES_QUEUED_MAX: usize = 4;
/// Reports of what engines reused between two frames; further ones are left out.
pub(crate) const REUSED_MAX: usize = 64;
/// Longest life of a prefix in a frame, as the wire allows it.
const TTL_MS_MAX: u64 = 60_000;

impl SoftSink for Router {
    fn take(&self, frames: v1::SoftFrames) {
        let now = self.now();
        let mut routing = self.routing.lock();
        for frame in frames.frames {
            match frame.frame {
                Some(v1::soft_frame::Frame::Load(load)) => {
                    let fleet = self.fleet.load();
                    let Some(worker) = fleet.by_source(&load.source) else {
                        continue;
                    };
                    if load.asleep {
                        routing.forget_cache(worker);
                    }
                    routing.update_worker(worker, |facts| facts.asleep = load.asleep);
                    let report = LoadReport {
                        running: load.running,
                        waiting: load.waiting,
                        kv_usage: load.kv_usage,
                        age: Micros::from_ms(u64::from(load.age_ms)),
                    };
                    routing.on_load_report(now, worker, &report);
                }
                Some(v1::soft_frame::Frame::Router(frame)) => {
                    routing.on_router_frame(now, &from_wire(frame));
                }
                Some(v1::soft_frame::Frame::Reused(_)) | None => {}
            }
        }
    }

    fn view_is(&self, state: ViewState) {
        tracing::info!(?state, "the view of the index changed its state");
        self.routing.lock().set_view(state);
    }
}

fn from_wire(frame: v1::RouterFrame) -> RouterFrame {
    RouterFrame {
        router: RouterName(frame.router),
        boot: frame.boot,
        n: frame.n,
        workers: frame
            .workers
            .into_iter()
            .map(|w| RemoteReservation {
                worker: WorkerId(w.worker),
                requests: w.requests,
                prefill_tokens: w.prefill_tokens,
                decode_tokens: w.decode_tokens,
            })
            .collect(),
        prefixes: frame
            .prefixes
            .into_iter()
            .map(|p| SpeculativePrefix {
                worker: WorkerId(p.worker),
                keys: p.keys.into_iter().map(BlockKey).collect(),
                stride: p.stride,
                first: p.first,
                ttl: Micros::from_ms(u64::from(p.ttl_ms)),
                ready: p.ready,
            })
            .collect(),
    }
}

fn to_wire(frame: RouterFrame) -> v1::RouterFrame {
    v1::RouterFrame {
        router: frame.router.0,
        boot: frame.boot,
        n: frame.n,
        workers: frame
            .workers
            .into_iter()
            .map(|w| v1::WorkerReservation {
                worker: w.worker.0,
                requests: w.requests,
                prefill_tokens: w.prefill_tokens,
                decode_tokens: w.decode_tokens,
            })
            .collect(),
        prefixes: frame
            .prefixes
            .into_iter()
            .map(|p| v1::SpeculativePrefix {
                worker: p.worker.0,
                keys: p.keys.into_iter().map(|key| key.0).collect(),
                stride: p.stride,
                ttl_ms: u32::try_from((p.ttl.0 / 1_000).min(TTL_MS_MAX)).unwrap_or(u32::MAX),
                first: p.first,
                ready: p.ready,
            })
            .collect(),
    }
}

/// Publishes this router's reservations to one node at a time, for as long as the router lives.
pub(crate) async fn publish(router: Arc<Router>, credentials: Credentials) {
    let nodes = router.config.index.clone();
    let mut at = usize::try_from(rand::random::<u32>()).unwrap_or(0) % nodes.len().max(1);
    loop {
        if let Ok(channel) = credentials.client_channel(&nodes[at]) {
            let mut client = SoftClient::new(channel).max_encoding_message_size(MESSAGE_BYTES_MAX);
            let (frames, queue) = mpsc::channel(FRAMES_QUEUED_MAX);
            let call = client.publish(ReceiverStream::new(queue));
            tokio::select! {
                ended = call => {
                    if let Err(status) = ended {
                        tracing::debug!(node = nodes[at], reason = status.message(), "publishing reservations failed");
                    }
                }
                () = feed(&router, frames) => {}
            }
        }
        at = (at + 1) % nodes.len();
        tokio::time::sleep(FRAME_REPEAT).await;
    }
}

/// Makes frames when something changed, at most one each interval.
async fn feed(router: &Router, frames: mpsc::Sender<v1::SoftFrames>) {
    let mut something = true;
    loop {
        let wait = if something {
            FRAME_REPEAT
        } else {
            Duration::from_secs(3_600)
        };
        let _ = tokio::time::timeout(wait, router.reservations_changed.notified()).await;
        let frame = {
            let now = router.now();
            let mut routing = router.routing.lock();
            // After the last one an empty frame says that all have ended.
            something = routing.reservations() > 0;
            routing.frame(now)
        };
        something |= !frame.prefixes.is_empty();
        let reused = std::mem::take(&mut *router.reused.lock());
        let message = v1::SoftFrames {
            frames: std::iter::once(v1::soft_frame::Frame::Router(to_wire(frame)))
                .chain(reused.into_iter().map(v1::soft_frame::Frame::Reused))
                .map(|frame| v1::SoftFrame { frame: Some(frame) })
                .collect(),
            relayed: false,
        };
        match frames.try_send(message) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                router
                    .metrics
                    .bounded
                    .get_or_create(&crate::metrics::Reason { reason: "soft" })
                    .inc();
            }
            Err(mpsc::error::TrySendError::Closed(_)) => return,
        }
        tokio::time::sleep(FRAME_INTERVAL).await;
    }
}
