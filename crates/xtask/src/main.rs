//! Cairn's menu: `cargo xtask verify` never writes to the tree, `cargo xtask fix` does.

mod links;
mod step;
mod verify;

use std::path::{Path, PathBuf};

use clap::{Parser, Subcommand};

/// Developer tasks.
#[derive(Parser)]
#[command(name = "cargo xtask", about = "Cairn's developer tasks")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Set up what the tests need and run every check: format, lints, tests, simulation, docs, links, clients, real engines.
    Verify(verify::VerifyArgs),
    /// Format the code and apply the lints' own suggestions.
    Fix,
    /// The long runs: full simulation, crash rounds, fault tests under load.
    Soak,
    /// Check the links of README and docs.
    Links,
}

fn main() -> anyhow::Result<()> {
    let root = root();
    match Cli::parse().task {
        Task::Verify(args) => verify::run(&root, &args),
        Task::Fix => verify::fix(&root),
        Task::Soak => verify::soak(&root),
        Task::Links => links::check(&root),
    }
}

/// The workspace's folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .map(Path::to_path_buf)
        .unwrap_or_else(|| PathBuf::from("."))
}
