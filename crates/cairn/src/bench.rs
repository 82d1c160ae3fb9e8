//! `cairn bench`: figures about Cairn itself, as ratios and CPU, each beside its peer in the same run.

pub mod cluster;
pub mod decide;
pub mod live;
pub mod router;

use clap::Subcommand;

/// What can be measured.
#[derive(Subcommand)]
pub enum BenchCommand {
    /// A router's added latency, CPU and throughput in front of instant mock engines, beside a direct connection.
    Router(router::RouterBenchArgs),
    /// A decision from known tokens to a reservation, while the feed changes the view.
    Decide(decide::DecideBenchArgs),
    /// One trace through real routers and engines beside its replay: hit rates should agree.
    Live(live::LiveBenchArgs),
    /// The bare relay that `router --peers` measures beside the routers.
    #[command(hide = true)]
    TcpRelay(router::relay::RelayArgs),
    /// The replicated path: three durable nodes, sources that push, a follower that sees.
    Cluster(cluster::ClusterBenchArgs),
}

/// Runs one benchmark.
pub fn run(command: BenchCommand) -> anyhow::Result<()> {
    match command {
        BenchCommand::Router(args) => router::run(args),
        BenchCommand::Decide(args) => decide::run(&args),
        BenchCommand::Live(args) => live::run(&args),
        BenchCommand::TcpRelay(args) => router::relay::run(&args),
        BenchCommand::Cluster(args) => cluster::run(&args),
    }
}
