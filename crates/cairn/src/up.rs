//! `cairn up`: a whole cluster on this machine, each role a process of its own.

pub mod child;
mod plan;
mod report;
mod supervise;

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context;
use clap::Args;

/// Where requests are answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EngineSource {
    /// This many simulated engines.
    Simulated(u32),
    /// Engines that run already, by base URL.
    Urls(Vec<String>),
}

/// Arguments of `cairn up`.
#[derive(Args, Clone, Debug)]
pub struct UpArgs {
    /// Simulated engines to start, as `sim:N`.
    #[arg(long, value_name = "sim:N", default_value = "sim:4", value_parser = parse_simulated, conflicts_with = "engine")]
    engines: u32,
    /// Base URL of an engine of yours (vLLM or SGLang), such as http://gpu-3:8000; repeat for more.
    #[arg(long, value_name = "URL")]
    engine: Vec<String>,
    /// Directory with the model's tokenizer.json, where Cairn can't find it by itself.
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Index nodes (Raft voters): 1, 3 or 5.
    #[arg(long, default_value_t = 3, value_parser = parse_index_nodes)]
    index_nodes: u32,
    /// Routers.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    routers: u32,
    /// First router's port; further routers take the next ones, the other roles ports from P+20 on. 0 picks free ones.
    #[arg(long, value_name = "P", default_value_t = 8080)]
    port: u16,
    /// Where state and logs live; without it a temporary directory, removed at the end unless something failed.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    #[arg(long, default_value = "kv", help = policy_help())]
    policy: String,
    /// Send traces to this OTLP/gRPC endpoint, such as http://127.0.0.1:4317 (Jaeger).
    #[arg(long, value_name = "URL", default_value = "")]
    otlp: String,
    /// How fast the simulated engines run: 1 like a GPU, 10 ten times faster, 0 without any delay.
    #[arg(long, default_value_t = 1.0)]
    sim_speed: f64,
    /// Print one JSON line when ready, instead of text for people.
    #[arg(long)]
    json: bool,
}

impl UpArgs {
    fn engine_source(&self) -> EngineSource {
        if self.engine.is_empty() {
            EngineSource::Simulated(self.engines)
        } else {
            EngineSource::Urls(self.engine.clone())
        }
    }
}

fn policy_help() -> String {
    format!(
        "Default routing policy: {}",
        cairn_routing::PolicyConfig::NAMES.join(", ")
    )
}

fn parse_simulated(text: &str) -> Result<u32, String> {
    let count = text
        .strip_prefix("sim:")
        .and_then(|n| u32::from_str(n).ok())
        .filter(|n| (1..=64).contains(n));
    count.ok_or_else(|| format!("`{text}` is not sim:N with N from 1 to 64; for engines of your own use --engine URL"))
}

fn parse_index_nodes(text: &str) -> Result<u32, String> {
    match text {
        "1" => Ok(1),
        "3" => Ok(3),
        "5" => Ok(5),
        _ => Err("use 1 (no fault tolerance), 3 or 5: a majority must survive".into()),
    }
}

/// Brings the cluster up, waits until it is asked to end, and takes it down.
pub fn run(args: UpArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?;
    runtime.block_on(async {
        let plan = plan::Plan::new(&args)?;
        let json = args.json;
        supervise::run(plan, json).await
    })
}
