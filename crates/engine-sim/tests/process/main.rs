//! The engine as a process sees it from outside: HTTP, events and transfers over real sockets.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

mod client;
mod events;
mod faults;
mod http;
mod transfers;
#[path = "../../../../tests/watch.rs"]
mod watch;
mod wire;
