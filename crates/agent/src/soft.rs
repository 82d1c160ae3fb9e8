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
/// An idle engine's report that says nothing new is told at most this often: routers take a report for 3 s, index nodes
/// keep it for 10 s, and every telling wakes them all.
const UNCHANGED_EVERY: Duration = Duration::from_millis(900);
/// Reports of this long go in one message: engines are looked at together, and a report tells its age.
const GATHER: Duration = Duration::from_millis(10);
const RECONNECT_FIRST: Duration = Duration::from_millis(50);
const RECONNECT_LAST: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Latest {
    reports: Mutex<Reports>,
    changed: Notify,
}

#[derive(Default)]
struct Reports {
    /// To be sent, by source, with the time of the look.
    waiting: BTreeMap<String, (Instant, v1::LoadReport)>,
    /// The last ones that were taken to be sent.
    told: BTreeMap<String, (Instant, v1::LoadReport)>,
}

impl Reports {
    /// Keeps a report to be sent, unless it says nothing new of an idle engine.
    fn put(&mut self, now: Instant, report: v1::LoadReport) -> bool {
        let idle = report.running == 0 && report.waiting == 0;
        let unchanged = self.told.get(&report.source).is_some_and(|(at, told)| {
            let as_then = v1::LoadReport {
                n: told.n,
                ..report.clone()
            };
            now.duration_since(*at) < UNCHANGED_EVERY && as_then == *told
        });
        if idle && unchanged {
            return false;
        }
        self.told.insert(report.source.clone(), (now, report.clone()));
        self.waiting.insert(report.source.clone(), (now, report));
        true
    }
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
        if self.latest.reports.lock().put(Instant::now(), report) {
            self.latest.changed.notify_one();
        }
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
                () = latest.gathered() => {
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
    /// Something is to be sent, and what comes with it had its time.
    async fn gathered(&self) {
        self.changed.notified().await;
        tokio::time::sleep(GATHER).await;
    }

    fn take(&self) -> v1::SoftFrames {
        let waiting = &mut self.reports.lock().waiting;
        let mut frames = Vec::with_capacity(waiting.len().min(limits::SOFT_FRAMES_MAX));
        while frames.len() < limits::SOFT_FRAMES_MAX {
            let Some((_, (read, mut report))) = waiting.pop_first() else {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_engine_is_told_of_once_a_second_and_every_change_at_once() {
        let start = Instant::now();
        let report = |n, running, prefix_queries| v1::LoadReport {
            source: "s".into(),
            n,
            running,
            prefix_queries,
            healthy: true,
            ..v1::LoadReport::default()
        };
        let mut reports = Reports::default();
        let mut check = |at_ms, report, told| {
            let now = start + Duration::from_millis(at_ms);
            assert_eq!(reports.put(now, report), told, "{at_ms}");
        };
        check(0, report(1, 0, 5), true);
        check(500, report(2, 0, 5), false);
        check(1_000, report(3, 0, 5), true);
        check(1_500, report(4, 0, 6), true);
        check(2_000, report(5, 1, 6), true);
        check(2_100, report(6, 1, 6), true);
        check(2_200, report(7, 0, 6), true);
        check(2_300, report(8, 0, 6), false);
        let unhealthy = v1::LoadReport {
            healthy: false,
            ..report(9, 0, 6)
        };
        check(2_400, unhealthy, true);
    }
}
