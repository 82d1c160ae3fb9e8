//! Index nodes over real sockets and disks: replication, crashes, members, feed, soft state.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

mod agent;
mod child;
mod faults;
mod feed;
mod harness;
mod ingest;
mod members;
mod process;
mod security;
mod soft;
#[path = "../../../../tests/watch.rs"]
mod watch;
