//! `cairn bench`: figures about Cairn itself, as ratios and CPU, each beside its peer in the same run.

pub mod router;

use clap::Subcommand;

/// What can be measured.
#[derive(Subcommand)]
pub enum BenchCommand {
    /// A router's added latency, CPU and throughput in front of instant mock engines, beside a direct connection.
    Router(router::RouterBenchArgs),
}

/// Runs one benchmark.
pub fn run(command: BenchCommand) -> anyhow::Result<()> {
    match command {
        BenchCommand::Router(args) => router::run(args),
    }
}
