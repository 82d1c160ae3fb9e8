//! Snapshots of the state for followers of the feed: made once, shared by all who ask at about the same time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cairn_index::codec;
use cairn_proto::limits::SNAPSHOT_CHUNK_BYTES;
use cairn_raft_store::Consensus;

/// A snapshot this young is handed out again, so that a hundred routers that reconnect at once cost one.
const SHARED_FOR: Duration = Duration::from_secs(2);

/// The whole state in chunks.
pub(crate) struct FeedSnapshot {
    pub(crate) index: u64,
    pub(crate) digest: u64,
    pub(crate) chunks: Vec<Bytes>,
    made: Instant,
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
            && reaches(snapshot.index)
        {
            return Ok(snapshot.clone());
        }
        let consensus = consensus.clone();
        let made = tokio::task::spawn_blocking(move || make(&consensus)).await;
        let snapshot = Arc::new(
            made.map_err(|error| error.to_string())?
                .map_err(|error| error.to_string())?,
        );
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

fn make(consensus: &Consensus) -> std::io::Result<FeedSnapshot> {
    // A copy under the lock: writes wait for memory only.
    let state = consensus.read(Clone::clone);
    let mut bytes = Vec::new();
    codec::encode_snapshot(&state, &mut bytes)?;
    let whole = Bytes::from(bytes);
    let chunks = (0..whole.len())
        .step_by(SNAPSHOT_CHUNK_BYTES)
        .map(|start| whole.slice(start..whole.len().min(start + SNAPSHOT_CHUNK_BYTES)))
        .collect();
    Ok(FeedSnapshot {
        index: state.applied().0,
        digest: state.digest().0,
        chunks,
        made: Instant::now(),
    })
}
