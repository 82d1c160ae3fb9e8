//! Snapshots of the state for followers of the feed: made once, shared by all who ask at about the same time.
//!
//! They lie in nameless files, so that a large state isn't held in memory twice.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cairn_proto::limits::SNAPSHOT_CHUNK_BYTES;
use cairn_raft_store::{Consensus, StateFile};

/// A snapshot this young is handed out again, so that a hundred routers that reconnect at once cost one.
const SHARED_FOR: Duration = Duration::from_secs(2);

/// The whole state at one place in the log.
pub(crate) struct FeedSnapshot {
    pub(crate) state: StateFile,
    made: Instant,
}

impl FeedSnapshot {
    /// The bytes from `offset` on, as many as go into one frame.
    pub(crate) async fn chunk(self: &Arc<Self>, offset: u64) -> Result<Bytes, String> {
        let snapshot = self.clone();
        let left = usize::try_from(self.state.bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
        let read = move || {
            let mut bytes = vec![0; left.min(SNAPSHOT_CHUNK_BYTES)];
            snapshot.state.file.read_exact_at(&mut bytes, offset)?;
            Ok::<_, std::io::Error>(Bytes::from(bytes))
        };
        let read = tokio::task::spawn_blocking(read).await;
        read.map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())
    }
}

/// Makes and keeps the latest snapshot.
#[derive(Default)]
pub(crate) struct FeedSnapshots {
    latest: tokio::sync::Mutex<Option<Arc<FeedSnapshot>>>,
}

impl FeedSnapshots {
    /// A snapshot from which `reaches` says that the feed can go on.
    pub(crate) async fn get(
        &self,
        consensus: &Consensus,
        reaches: impl Fn(u64) -> bool,
    ) -> Result<Arc<FeedSnapshot>, String> {
        let mut latest = self.latest.lock().await;
        if let Some(snapshot) = &*latest
            && snapshot.made.elapsed() < SHARED_FOR
            && reaches(snapshot.state.index)
        {
            return Ok(snapshot.clone());
        }
        let consensus = consensus.clone();
        let made = tokio::task::spawn_blocking(move || consensus.export()).await;
        let state = made.map_err(|error| error.to_string())?;
        let snapshot = Arc::new(FeedSnapshot {
            state: state.map_err(|error| error.to_string())?,
            made: Instant::now(),
        });
        *latest = Some(snapshot.clone());
        Ok(snapshot)
    }

    /// Frees a snapshot that nobody will ask for again.
    pub(crate) async fn expire(&self) {
        let mut latest = self.latest.lock().await;
        if latest
            .as_ref()
            .is_some_and(|snapshot| snapshot.made.elapsed() >= SHARED_FOR)
        {
            *latest = None;
        }
    }
}
