//! Wire: generated gRPC types and the one translation between them and the domain.
//!
//! Message structs stop here: shells convert at the door with [`TryFrom`] (hostile input: bounded, errors name the field)
//! and answer with [`From`]. [`security`] holds what every port between hosts shares, [`HeldPort`] a port for a process
//! that comes and goes.

mod convert;
mod port;
pub mod security;

pub use convert::{BatchAnswer, RegisterAnswer, WireError, check_push, check_reused, check_soft, limits};
pub use port::HeldPort;

#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    //! Generated from `proto/cairn/v1/cairn.proto`.
    tonic::include_proto!("cairn.v1");
}
