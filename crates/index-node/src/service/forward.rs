//! Passing calls on to the leader.

use cairn_proto::v1;
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;
use tonic::{Response, Status, Streaming};

use super::{Answers, Service};
use crate::leadership::Leadership;
use crate::peers::forwarded;

impl Service {
    /// Passes a push stream on. It ends with UNAVAILABLE when leadership changes: the agent sends again from its last
    /// acknowledgement, and contiguous sequence numbers make that safe.
    pub(super) async fn forward_push(
        &self,
        address: &str,
        requests: Streaming<v1::PushRequest>,
    ) -> Result<Response<Answers<v1::PushReply>>, Status> {
        let node = self.node.clone();
        let begun_with = node.leader_now();
        let mut client = node.peers.ingest(address)?;
        // A broken upstream ends the request stream; the leader then ends its answers.
        let upstream = requests.map_while(Result::ok);
        let answers = client.push(forwarded(upstream)).await?.into_inner();
        let leadership = node.leadership.clone();
        let changed = wait_for_change(leadership, begun_with, node.stopping.clone());
        let stream = async_stream(answers, changed);
        Ok(Response::new(Box::pin(stream)))
    }
}

/// Completes with the reason to end a stream that depends on the leader of `begun_with`.
pub(super) async fn wait_for_change(
    mut leadership: tokio::sync::watch::Receiver<Leadership>,
    begun_with: Leadership,
    stopping: CancellationToken,
) -> Status {
    let changed = leadership
        .wait_for(|now| now.leader != begun_with.leader || now.leads != begun_with.leads || now.stopped.is_some());
    tokio::select! {
        () = stopping.cancelled() => Status::unavailable("this node is stopping; go on with another one"),
        now = changed => match now {
            Ok(now) => now.unavailable("leadership changed; send again from the last acknowledgement"),
            Err(_) => Status::unavailable("this node has stopped"),
        },
    }
}

/// The leader's answers until it ends or `changed` completes.
fn async_stream(
    mut answers: Streaming<v1::PushReply>,
    changed: impl Future<Output = Status> + Send + 'static,
) -> impl tokio_stream::Stream<Item = Result<v1::PushReply, Status>> + Send {
    let (sender, receiver) = tokio::sync::mpsc::channel(16);
    tokio::spawn(async move {
        tokio::pin!(changed);
        loop {
            let next = tokio::select! {
                status = &mut changed => Err(status),
                message = answers.message() => match message {
                    Ok(Some(reply)) => Ok(reply),
                    Ok(None) => return,
                    Err(status) => Err(status),
                },
                () = sender.closed() => return,
            };
            let last = next.is_err();
            if sender.send(next).await.is_err() || last {
                return;
            }
        }
    });
    tokio_stream::wrappers::ReceiverStream::new(receiver)
}
