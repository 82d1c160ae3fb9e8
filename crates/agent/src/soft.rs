//! Publishes load reports: the latest of each source, to one index node, never through the log.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cairn_proto::{limits, v1};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use crate::clock::Backoff;
use crate::nodes::IndexNodes;

/// Messages between this task and the transport; a late report is replaced, not queued.
const QUEUE_MESSAGES: usize = 2;
const RECONNECT_FIRST: Duration = Duration::from_millis(50);
const RECONNECT_LAST: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Latest {
    reports: Mutex<BTreeMap<String, (Instant, v1::LoadReport)>>,
    changed: Notify,
}

/// Where load reports go; cheap to clone.
#[derive(Clone)]
pub struct SoftPublisher {
    latest: Arc<Latest>,
    _task: Arc<AbortOnDropHandle<()>>,
}

impl SoftPublisher {
    /// Starts to publish to the node in use.
    #[must_use]
    pub fn start(nodes: Arc<IndexNodes>) -> Self {
        let latest = Arc::new(Latest::default());
        let task = AbortOnDropHandle::new(tokio::spawn(run(nodes, latest.clone())));
        Self {
            latest,
            _task: Arc::new(task),
        }
    }

    /// Replaces what was to be said of a source.
    pub fn report(&self, report: v1::LoadReport) {
        self.latest
            .reports
            .lock()
            .insert(report.source.clone(), (Instant::now(), report));
        self.latest.changed.notify_one();
    }
}

async fn run(nodes: Arc<IndexNodes>, latest: Arc<Latest>) {
    let mut backoff = Backoff::new(RECONNECT_FIRST, RECONNECT_LAST);
    loop {
        let chosen = nodes.current();
        let (sender, feed) = mpsc::channel(QUEUE_MESSAGES);
        let mut client = chosen.soft();
        let call = client.publish(ReceiverStream::new(feed));
        tokio::pin!(call);
        let began = Instant::now();
        let status = loop {
            tokio::select! {
                ended = &mut call => break ended.err().unwrap_or_else(|| Status::unavailable("ended")),
                () = latest.changed.notified() => {
                    let Ok(permit) = sender.try_reserve() else { continue };
                    let message = latest.take();
                    if !message.frames.is_empty() {
                        permit.send(message);
                    }
                }
            }
        };
        tracing::debug!(node = %chosen.address, code = ?status.code(), "publishing load ended");
        if began.elapsed() > RECONNECT_LAST {
            backoff.reset();
        }
        nodes.failed(&chosen, &status);
        tokio::time::sleep(backoff.delay()).await;
    }
}

impl Latest {
    fn take(&self) -> v1::SoftFrames {
        let mut reports = self.reports.lock();
        let mut frames = Vec::with_capacity(reports.len().min(limits::SOFT_FRAMES_MAX));
        while frames.len() < limits::SOFT_FRAMES_MAX {
            let Some((_, (read, mut report))) = reports.pop_first() else {
                break;
            };
            report.age_ms = report
                .age_ms
                .saturating_add(u32::try_from(read.elapsed().as_millis()).unwrap_or(u32::MAX));
            frames.push(v1::SoftFrame {
                frame: Some(v1::soft_frame::Frame::Load(report)),
            });
        }
        v1::SoftFrames { frames, relayed: false }
    }
}
