//! Wire: generated gRPC types and the one translation between them and the domain.

#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    //! Generated from `proto/cairn/v1/cairn.proto`.
    tonic::include_proto!("cairn.v1");
}
