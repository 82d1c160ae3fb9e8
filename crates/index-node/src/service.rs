//! The gRPC services of an index node.

mod admin;
mod feed;
mod forward;
mod ingest;
mod members;
mod push;
mod raft;
mod soft;

use std::pin::Pin;
use std::sync::Arc;

use cairn_proto::limits::MESSAGE_BYTES_MAX;
use cairn_proto::security::Credentials;
use cairn_proto::v1;
use tokio_stream::Stream;
use tonic::Status;
use tonic::transport::server::Router;

use crate::node::Node;
use crate::peers::RAFT_BYTES_MAX;

/// A stream of answers.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The implementation of every service.
#[derive(Clone)]
struct Service {
    node: Arc<Node>,
}

/// All services with the token interceptor, on a server builder.
pub(crate) fn router(mut server: tonic::transport::Server, node: Arc<Node>, credentials: &Credentials) -> Router {
    use tonic::service::interceptor::InterceptedService;
    let service = Service { node };
    let auth = || credentials.server_auth();
    let ingest = v1::ingest_server::IngestServer::new(service.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let feed = v1::feed_server::FeedServer::new(service.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let soft = v1::soft_server::SoftServer::new(service.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let raft = v1::raft_server::RaftServer::new(service.clone()).max_decoding_message_size(RAFT_BYTES_MAX);
    let admin = v1::admin_server::AdminServer::new(service);
    server
        .add_service(InterceptedService::new(ingest, auth()))
        .add_service(InterceptedService::new(feed, auth()))
        .add_service(InterceptedService::new(soft, auth()))
        .add_service(InterceptedService::new(raft, auth()))
        .add_service(InterceptedService::new(admin, auth()))
}
