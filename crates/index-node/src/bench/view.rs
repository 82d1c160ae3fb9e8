//! A router's view: follows the feed, applies it, and notes when each batch is in it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use cairn_index::{Command, IndexState, LogIndex, Op, codec};
use cairn_proto::security::Credentials;
use cairn_proto::{limits, v1};
use tokio_util::sync::{CancellationToken, DropGuard};
use v1::feed_frame::Frame;

use super::{Shared, gauge};

/// A view that follows until it is dropped or told to stop.
pub(super) struct Following(#[expect(dead_code, reason = "its drop ends the view")] DropGuard);

impl Following {
    pub(super) fn abort(self) {}
}

/// Starts a view on a thread of its own.
pub(super) fn spawn(address: SocketAddr, shared: Arc<Shared>) -> Following {
    let stopped = CancellationToken::new();
    let ended = stopped.clone();
    tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        runtime.block_on(async {
            tokio::select! {
                () = ended.cancelled() => {}
                () = follow(address, shared) => {}
            }
        });
    });
    Following(stopped.drop_guard())
}

async fn follow(address: SocketAddr, shared: Arc<Shared>) {
    let Ok(channel) = Credentials::default().client_channel(&address.to_string()) else {
        return;
    };
    let mut client = v1::feed_client::FeedClient::new(channel).max_decoding_message_size(limits::MESSAGE_BYTES_MAX);
    let request = v1::FollowRequest {
        follower: "bench".to_owned(),
        ..v1::FollowRequest::default()
    };
    let Ok(stream) = client.follow(request).await else {
        return;
    };
    let mut stream = stream.into_inner();
    let (mut state, mut snapshot) = (IndexState::new(), Vec::new());
    while let Ok(Some(frame)) = stream.message().await {
        match frame.frame {
            Some(Frame::Snapshot(chunk)) => {
                snapshot.extend_from_slice(&chunk.data);
                if chunk.last {
                    let Ok(restored) = codec::decode_snapshot(snapshot.as_slice()) else {
                        return;
                    };
                    state = restored;
                    snapshot = Vec::new();
                }
            }
            Some(Frame::Entries(entries)) => {
                for entry in entries.entries {
                    apply(&mut state, &entry, &shared);
                }
                state.skip_to(LogIndex(frame.applied_index));
            }
            Some(Frame::Soft(_) | Frame::Idle(_)) | None => state.skip_to(LogIndex(frame.applied_index)),
        }
        shared.view_digest.store(state.digest().0, Ordering::Release);
        shared.view_at.store(state.applied().0, Ordering::Release);
        let cpu = u64::try_from(gauge::thread_cpu().as_nanos()).unwrap_or(u64::MAX);
        shared.view_cpu_ns.store(cpu, Ordering::Relaxed);
    }
}

fn apply(state: &mut IndexState, entry: &v1::Entry, shared: &Shared) {
    let Ok(command) = codec::decode_command(&entry.command) else {
        return;
    };
    state.apply(LogIndex(entry.index), &command);
    let Command::Batches(batches) = command else { return };
    let now = Instant::now();
    let bytes = entry.command.len() as u64;
    shared.seen_bytes.fetch_add(bytes, Ordering::Relaxed);
    let mut sent = shared.sent.lock();
    for batch in batches {
        let changes = batch.ops.iter().map(|op| match op {
            Op::Store { keys, skip, .. } => keys.len() as u64 - u64::from(*skip),
            Op::Remove { count, .. } => u64::from(*count),
            Op::Clear { .. } | Op::Confidence(_) => 0,
        });
        shared.seen.fetch_add(changes.sum(), Ordering::Relaxed);
        if let Some(due) = sent.remove(&(batch.source.0, batch.seq.0)) {
            shared.latencies.lock().push(now.saturating_duration_since(due));
        }
    }
}
