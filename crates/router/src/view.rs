//! The router's own copy of the index, rebuilt from the feed of any index node.
//!
//! A view never goes back. It leaves a node that fails, falls silent or lost its quorum for another one, and asks there
//! for what came after its own applied index. With no node left it keeps what it has, and says so.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cairn_index::{IndexState, LogIndex, Registry, codec};
use cairn_proto::limits::MESSAGE_BYTES_MAX;
use cairn_proto::security::{AuthChannel, Credentials};
use cairn_proto::v1;
use cairn_proto::v1::feed_client::FeedClient;
use cairn_routing::ViewState;
use parking_lot::RwLock;
use tokio::sync::Notify;

use crate::metrics::{Metrics, Reason};

/// A node sends at least every 250 ms; four times that without a frame is a dead stream.
const SILENCE: Duration = Duration::from_millis(1_000);
/// A node whose last quorum contact is older than this is left for a fresher one.
const STALE_MS: u64 = 1_000;
/// How long a stale node is kept after all others were tried, before the round begins again.
const STALE_PAUSE: Duration = Duration::from_secs(3);
/// Pauses between rounds over nodes of which none answers.
const BACKOFF_MS: (u64, u64) = (50, 1_000);
/// Time to get a stream from a node.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Largest snapshot taken; 100 million memberships take about 1 GB.
const SNAPSHOT_BYTES_MAX: usize = 8 << 30;

/// What is shared between the follower and requests.
pub(crate) struct View {
    /// The copy.
    pub state: RwLock<IndexState>,
    started: Instant,
    applied: AtomicU64,
    heard_ms: AtomicU64,
    quorum_age_ms: AtomicU64,
    node: parking_lot::Mutex<String>,
    is: AtomicU8,
    /// Woken when the registry changed.
    registry_changed: Arc<Notify>,
}

/// Takes what isn't replicated.
pub(crate) trait SoftSink: Send + Sync {
    /// Frames in the order of their arrival.
    fn take(&self, frames: v1::SoftFrames);
    /// The view became current, or ceased to be.
    fn view_is(&self, state: ViewState);
}

impl View {
    /// An empty view.
    pub(crate) fn new(registry_changed: Arc<Notify>) -> Self {
        Self {
            state: RwLock::new(IndexState::new()),
            started: Instant::now(),
            applied: AtomicU64::new(0),
            heard_ms: AtomicU64::new(0),
            quorum_age_ms: AtomicU64::new(0),
            node: parking_lot::Mutex::new(String::new()),
            is: AtomicU8::new(0),
            registry_changed,
        }
    }

    /// The log index that was applied last.
    pub(crate) fn applied(&self) -> u64 {
        self.applied.load(Ordering::Acquire)
    }

    /// Age in ms of what the view shows: of the last frame and of its node's last quorum contact.
    pub(crate) fn age_ms(&self) -> u64 {
        let heard = self.heard_ms.load(Ordering::Acquire);
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        now.saturating_sub(heard)
            .saturating_add(self.quorum_age_ms.load(Ordering::Acquire))
    }

    /// The node that is followed now, empty for none.
    pub(crate) fn node(&self) -> String {
        self.node.lock().clone()
    }

    /// How well it is kept.
    pub(crate) fn is(&self) -> ViewState {
        match self.is.load(Ordering::Acquire) {
            0 => ViewState::Absent,
            1 => ViewState::Last,
            _ => ViewState::Current,
        }
    }

    /// A copy of the registry.
    pub(crate) fn registry(&self) -> Registry {
        self.state.read().registry().clone()
    }

    fn heard(&self, frame: &v1::FeedFrame) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard_ms.store(now, Ordering::Release);
        self.quorum_age_ms.store(frame.quorum_age_ms, Ordering::Release);
    }

    fn set(&self, is: ViewState, sink: &dyn SoftSink) {
        let code = match is {
            ViewState::Absent => 0,
            ViewState::Last => 1,
            ViewState::Current => 2,
        };
        if self.is.swap(code, Ordering::AcqRel) != code {
            sink.view_is(is);
        }
    }

    /// Applies committed commands that aren't applied yet.
    fn apply(&self, entries: &v1::Entries) -> Result<(), FollowError> {
        for entry in &entries.entries {
            if entry.index <= self.applied() {
                continue;
            }
            let at = LogIndex(entry.index);
            if entry.command.is_empty() {
                self.state.write().skip_to(at);
            } else {
                let command = codec::decode_command(&entry.command).map_err(|e| FollowError::Entry(e.to_string()))?;
                let mut state = self.state.write();
                let before = state.registry().version;
                state.apply(at, &command);
                if state.registry().version != before {
                    self.registry_changed.notify_one();
                }
            }
            self.applied.store(entry.index, Ordering::Release);
        }
        Ok(())
    }

    /// Moves over log entries that hold no command: the stream has delivered everything up to there.
    fn skip_to(&self, at: u64) {
        if at > self.applied() && self.applied() > 0 {
            self.state.write().skip_to(LogIndex(at));
            self.applied.store(at, Ordering::Release);
        }
    }

    /// Replaces the copy by a snapshot, unless that would take it back within the same cluster.
    fn install(&self, index: u64, fresh: IndexState) {
        let mut state = self.state.write();
        let same_cluster = state.registry().seed == fresh.registry().seed;
        if same_cluster && (index < self.applied() || fresh.applied().0 < self.applied()) {
            return;
        }
        // The old copy is freed after the lock is.
        let old = std::mem::replace(&mut *state, fresh);
        self.applied.store(state.applied().0.max(index), Ordering::Release);
        drop(state);
        drop(old);
        self.registry_changed.notify_one();
    }
}

/// Why a node is left.
#[derive(Debug, thiserror::Error)]
enum FollowError {
    #[error("no answer: {0}")]
    Unreachable(String),
    #[error("the stream broke: {0}")]
    Broken(String),
    #[error("the stream ended")]
    Closed,
    #[error("nothing came for {} ms", SILENCE.as_millis())]
    Silent,
    #[error("its last quorum contact is {0} ms old")]
    Stale(u64),
    #[error("a command can't be read: {0}")]
    Entry(String),
    #[error("a snapshot can't be used: {0}")]
    Snapshot(String),
}

impl FollowError {
    fn label(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "unreachable",
            Self::Broken(_) => "broken",
            Self::Closed => "closed",
            Self::Silent => "silent",
            Self::Stale(_) => "stale",
            Self::Entry(_) | Self::Snapshot(_) => "unreadable",
        }
    }
}

/// Follows one node after another for as long as the router lives.
pub(crate) struct Follower {
    /// What is kept up to date.
    pub view: Arc<View>,
    /// Index nodes.
    pub nodes: Vec<String>,
    /// Credentials towards them.
    pub credentials: Credentials,
    /// This router's name.
    pub name: String,
    /// The cluster that is followed; empty for any.
    pub cluster: String,
    /// Takes soft frames.
    pub sink: Arc<dyn SoftSink>,
    /// Metrics.
    pub metrics: Metrics,
}

impl Follower {
    /// Never ends.
    pub(crate) async fn run(self) {
        let mut at = usize::try_from(rand::random::<u32>()).unwrap_or(0) % self.nodes.len().max(1);
        let mut misses: u32 = 0;
        let mut stale_round: Option<Instant> = None;
        loop {
            let before = self.view.applied();
            let may_leave_stale = stale_round.is_none_or(|since| since.elapsed() > STALE_PAUSE);
            let error = self.follow(&self.nodes[at], may_leave_stale).await;
            tracing::info!(node = self.nodes[at], reason = %error, "leaving an index node");
            self.metrics
                .view_switches
                .get_or_create(&Reason { reason: error.label() })
                .inc();
            self.view.node.lock().clear();
            let state = if self.view.applied() == 0 {
                ViewState::Absent
            } else {
                ViewState::Last
            };
            if !matches!(error, FollowError::Stale(_)) || self.nodes.len() == 1 {
                self.view.set(state, &*self.sink);
            }
            at = (at + 1) % self.nodes.len();
            let progressed = self.view.applied() > before;
            misses = if progressed { 0 } else { misses + 1 };
            if matches!(error, FollowError::Stale(_)) && misses as usize >= self.nodes.len() {
                stale_round = Some(Instant::now());
            }
            // The first node after a loss is asked at once; rounds without success slow down.
            let round = misses as usize / self.nodes.len();
            if round > 0 {
                let pause = (BACKOFF_MS.0 << round.min(5)).min(BACKOFF_MS.1);
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
        }
    }

    /// Follows one node until there is a reason to leave it.
    async fn follow(&self, node: &str, may_leave_stale: bool) -> FollowError {
        let channel = match self.credentials.client_channel(node) {
            Ok(channel) => channel,
            Err(error) => return FollowError::Unreachable(error.to_string()),
        };
        let mut client: FeedClient<AuthChannel> = FeedClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let request = {
            let state = self.view.state.read();
            v1::FollowRequest {
                follower: self.name.clone(),
                cluster: self.cluster.clone(),
                applied_index: self.view.applied(),
                digest: if self.view.applied() == 0 { 0 } else { state.digest().0 },
            }
        };
        let asked = tokio::time::timeout(CONNECT_TIMEOUT, client.follow(request)).await;
        let mut stream = match asked {
            Err(_) => return FollowError::Unreachable(format!("nothing within {} s", CONNECT_TIMEOUT.as_secs())),
            Ok(Err(status)) => return FollowError::Unreachable(status.message().to_string()),
            Ok(Ok(response)) => response.into_inner(),
        };
        let entered = Instant::now();
        let mut snapshot: Vec<u8> = Vec::new();
        loop {
            let frame = match tokio::time::timeout(SILENCE, stream.message()).await {
                Err(_) => return FollowError::Silent,
                Ok(Err(status)) => return FollowError::Broken(status.message().to_string()),
                Ok(Ok(None)) => return FollowError::Closed,
                Ok(Ok(Some(frame))) => frame,
            };
            self.view.heard(&frame);
            if let Err(error) = self.frame(node, &frame.frame, &mut snapshot).await {
                return error;
            }
            if let Some(v1::feed_frame::Frame::Soft(soft)) = frame.frame {
                self.sink.take(soft);
            }
            if snapshot.is_empty() {
                self.view.skip_to(frame.applied_index);
            }
            if frame.quorum_age_ms <= STALE_MS {
                // Behind a snapshot that is still on its way the old view goes on.
                if snapshot.is_empty() && self.view.applied() > 0 {
                    self.view.set(ViewState::Current, &*self.sink);
                }
            } else if self.nodes.len() > 1 && (may_leave_stale || entered.elapsed() > STALE_PAUSE) {
                return FollowError::Stale(frame.quorum_age_ms);
            } else {
                self.view.set(
                    if self.view.applied() == 0 {
                        ViewState::Absent
                    } else {
                        ViewState::Last
                    },
                    &*self.sink,
                );
            }
            self.metrics
                .view_applied_index
                .set(i64::try_from(self.view.applied()).unwrap_or(i64::MAX));
        }
    }

    async fn frame(
        &self,
        node: &str,
        frame: &Option<v1::feed_frame::Frame>,
        snapshot: &mut Vec<u8>,
    ) -> Result<(), FollowError> {
        use v1::feed_frame::Frame;
        match frame {
            Some(Frame::Entries(entries)) => self.view.apply(entries)?,
            Some(Frame::Snapshot(chunk)) => {
                if snapshot.len() + chunk.data.len() > SNAPSHOT_BYTES_MAX {
                    return Err(FollowError::Snapshot(format!("more than {SNAPSHOT_BYTES_MAX} bytes")));
                }
                snapshot.extend_from_slice(&chunk.data);
                if chunk.last {
                    let bytes = std::mem::take(snapshot);
                    self.install(chunk.snapshot_index, chunk.digest, bytes).await?;
                }
            }
            Some(Frame::Idle(_) | Frame::Soft(_)) | None => {}
        }
        let mut following = self.view.node.lock();
        if following.as_str() != node {
            node.clone_into(&mut following);
        }
        Ok(())
    }

    async fn install(&self, index: u64, digest: u64, bytes: Vec<u8>) -> Result<(), FollowError> {
        let decoded = tokio::task::spawn_blocking(move || {
            let state = codec::decode_snapshot(std::io::BufReader::new(bytes.as_slice())).map_err(|e| e.to_string())?;
            let found = state.digest().0;
            if digest != 0 && found != digest {
                return Err(format!("its digest is {found:016x}, announced was {digest:016x}"));
            }
            Ok(state)
        });
        let state = decoded
            .await
            .map_err(|e| FollowError::Snapshot(e.to_string()))?
            .map_err(FollowError::Snapshot)?;
        self.view.install(index, state);
        Ok(())
    }
}
