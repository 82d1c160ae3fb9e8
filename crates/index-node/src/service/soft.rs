//! Soft state comes in.

use cairn_proto::{check_soft, v1};
use tonic::{Request, Response, Status, Streaming};

use super::Service;
use crate::metrics::{Metrics, Reason};

#[tonic::async_trait]
impl v1::soft_server::Soft for Service {
    async fn publish(&self, request: Request<Streaming<v1::SoftFrames>>) -> Result<Response<v1::PublishReply>, Status> {
        let mut stream = request.into_inner();
        let node = &self.node;
        loop {
            let frames = tokio::select! {
                () = node.stopping.cancelled() => return Err(Status::unavailable("this node is stopping")),
                message = stream.message() => message?,
            };
            let Some(frames) = frames else {
                return Ok(Response::new(v1::PublishReply {}));
            };
            if let Err(error) = check_soft(&frames) {
                Metrics::count(&node.metrics.refused, "soft_invalid");
                return Err(error.into());
            }
            let relayed = frames.relayed;
            let taken = node.soft.publish(frames);
            let count = |reason, n: usize| {
                node.metrics
                    .soft_frames
                    .get_or_create(&Reason { reason })
                    .inc_by(n as u64);
            };
            count(if relayed { "relayed" } else { "own" }, taken.fresh);
            count("old", taken.old);
            count("full", taken.full);
        }
    }
}
