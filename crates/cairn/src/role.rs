//! Runs one role in this process: configuration in, signals handled, a ready line out.

mod roles;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use cairn_telemetry::TelemetryConfig;
use clap::Args;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::output;
use crate::signals::Ends;

pub use roles::{AgentRole, EngineRole, IndexRole, RouterRole};

/// Arguments that every role takes.
#[derive(Args, Debug)]
pub struct RoleArgs {
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE", required_unless_present = "print_config")]
    config: Option<PathBuf>,
    /// Print a commented default configuration and end.
    #[arg(long)]
    print_config: bool,
    /// File with the cluster token; overrides `security.cluster_token_file`.
    #[arg(long, value_name = "FILE", env = "CAIRN_CLUSTER_TOKEN_FILE")]
    cluster_token: Option<PathBuf>,
    /// Print one JSON line when ready.
    #[arg(long)]
    json: bool,
    /// End when standard input ends; how `cairn up` keeps its children from outliving it.
    #[arg(long, hide = true)]
    end_with_stdin: bool,
}

/// A role that this binary can run.
pub trait Role {
    /// Name of the subcommand.
    const NAME: &'static str;
    /// Worker threads of the runtime; 0 for one per core.
    const THREADS: usize;
    /// Its configuration.
    type Config: DeserializeOwned;
    /// Its running form.
    type Running: RunningRole;

    /// A commented default configuration.
    fn commented_default() -> String;
    /// The telemetry section.
    fn telemetry(config: &Self::Config) -> &TelemetryConfig;
    /// Tells this process from others of its role.
    fn instance(config: &Self::Config) -> String;
    /// Overrides the cluster token's file.
    fn set_token(config: &mut Self::Config, file: PathBuf);
    /// Starts the role.
    fn start(config: Self::Config) -> impl Future<Output = anyhow::Result<Self::Running>>;
}

/// A started role.
pub trait RunningRole {
    /// What the ready line says besides the role.
    fn ready(&self) -> Value;
    /// Resolves only on a fatal error.
    fn failed(&mut self) -> impl Future<Output = anyhow::Error>;
    /// Ends within `grace`.
    fn stop(self, grace: Duration) -> impl Future<Output = ()>;
}

/// How long a role may take to end after the first signal; a second one ends it at once.
const STOP_GRACE: Duration = Duration::from_secs(30);

/// Runs a role until a signal.
pub fn run<R: Role>(args: RoleArgs) -> anyhow::Result<()> {
    if args.print_config {
        output::line(R::commented_default().trim_end());
        return Ok(());
    }
    let Some(path) = &args.config else {
        bail!("give --config FILE; --print-config shows what belongs in it")
    };
    let mut config: R::Config = read_config::<R>(path)?;
    if let Some(file) = &args.cluster_token {
        R::set_token(&mut config, file.clone());
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    if R::THREADS > 0 {
        runtime.worker_threads(R::THREADS);
    }
    let runtime = runtime.enable_all().build().context("starting the runtime")?;
    let outcome = runtime.block_on(serve::<R>(config, &args));
    runtime.shutdown_timeout(Duration::from_millis(500));
    outcome
}

fn read_config<R: Role>(path: &PathBuf) -> anyhow::Result<R::Config> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("reading the configuration {}", path.display()))?;
    toml::from_str(&text).with_context(|| {
        format!(
            "the configuration {} is not valid; `cairn {} --print-config` shows every field",
            path.display(),
            R::NAME
        )
    })
}

async fn serve<R: Role>(config: R::Config, args: &RoleArgs) -> anyhow::Result<()> {
    let mut ends = Ends::listen(args.end_with_stdin).context("listening for signals")?;
    let telemetry = cairn_telemetry::init(
        &format!("cairn-{}", R::NAME),
        &R::instance(&config),
        R::telemetry(&config),
    )?;
    let mut running = tokio::select! {
        started = R::start(config) => started?,
        signal = ends.next() => bail!("{signal} came before the {} was ready", R::NAME),
    };
    announce::<R>(running.ready(), args.json);
    let outcome = tokio::select! {
        signal = ends.next() => {
            tracing::info!(signal, "ending");
            Ok(())
        }
        error = running.failed() => Err(error),
    };
    tokio::select! {
        () = running.stop(STOP_GRACE) => {}
        signal = ends.next() => tracing::warn!(signal, "asked to end again: ending at once"),
    }
    telemetry.flush();
    outcome
}

fn announce<R: Role>(ready: Value, json: bool) {
    if json {
        let mut line = serde_json::json!({"ready": true, "role": R::NAME});
        if let (Some(line), Value::Object(more)) = (line.as_object_mut(), ready) {
            line.extend(more);
        }
        output::line(line.to_string());
    } else {
        output::line(format!("cairn {} is ready: {ready}", R::NAME));
    }
}
