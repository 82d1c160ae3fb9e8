//! The `cairn` binary: one subcommand per role, `up` for everything at once, and the operators' tools.

mod bench;
mod calibrate;
mod inspect;
mod output;
mod replay;
mod role;
mod signals;
mod up;

use clap::{Parser, Subcommand};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// KV-cache-aware control plane for LLM inference.
#[derive(Parser)]
#[command(name = "cairn", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Bring up a whole cluster on this machine: index nodes, agents, routers and, unless given, simulated engines.
    Up(up::UpArgs),
    /// Run one index node.
    Index(role::RoleArgs),
    /// Run the agent of one host.
    Agent(role::RoleArgs),
    /// Run one router.
    Router(role::RoleArgs),
    /// Run one simulated, vLLM-compatible engine.
    Engine(role::RoleArgs),
    /// Show members, workers and what the index claims about them.
    Status(inspect::status::StatusArgs),
    /// Say which worker a request would go to (or a past one went to), with every candidate's terms.
    Explain(inspect::explain::ExplainArgs),
    /// Stop sending new requests to an engine; its running ones finish.
    Drain(inspect::drain::DrainArgs),
    /// List, add, remove or replace index nodes.
    Members(inspect::members::MembersArgs),
    /// Set the default routing policy of a pool.
    Policy(inspect::policy::PolicyArgs),
    /// Run a trace through a simulated fleet under any policies, with the code that decides in routers.
    Replay(Box<replay::ReplayArgs>),
    /// Measure a live engine, and fit the replay's engine model to it.
    Calibrate(calibrate::CalibrateArgs),
    /// Measure Cairn itself.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
}

fn main() -> std::process::ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error);
            std::process::ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Up(args) => up::run(args),
        Command::Index(args) => role::run::<role::IndexRole>(args),
        Command::Agent(args) => role::run::<role::AgentRole>(args),
        Command::Router(args) => role::run::<role::RouterRole>(args),
        Command::Engine(args) => role::run::<role::EngineRole>(args),
        Command::Status(args) => inspect::status::run(args),
        Command::Explain(args) => inspect::explain::run(args),
        Command::Drain(args) => inspect::drain::run(args),
        Command::Members(args) => inspect::members::run(args),
        Command::Policy(args) => inspect::policy::run(args),
        Command::Replay(args) => replay::run(*args),
        Command::Calibrate(args) => calibrate::run(args),
        Command::Bench(command) => bench::run(command),
    }
}
