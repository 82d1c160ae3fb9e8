//! The cluster under measurement: fresh engines, an index node, an agent and routers, each a process on loopback.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use cairn_replay::Options;
use cairn_replay::engine_model::{ModelConfig, Timing};
use cairn_replay::trace::Trace;
use http::Method;
use serde_json::Value;

use super::LOAD_PERIOD_MS;
use super::prompts::MODEL;
use crate::inspect::ask_http;
use crate::up::child::{ChildSpec, Running, tail};

/// Longest wait until every router can reach every engine and follows its events.
const SERVING_TIMEOUT: Duration = Duration::from_secs(120);
/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longest wait for a process to end by itself.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// What is started.
pub struct Shape {
    engines: u32,
    routers: u32,
    model: ModelConfig,
    timing: Timing,
    policy: String,
}

impl Shape {
    /// The fleet of a replay.
    pub fn new(trace: &Trace, options: &Options, policy: &str) -> Self {
        let longest = trace.rows.iter().map(|row| row.input + row.output).max().unwrap_or(2);
        Self {
            engines: options.engines,
            routers: options.routers,
            model: options.model_config(longest),
            timing: options.default_timing(),
            policy: policy.to_owned(),
        }
    }

    fn engine(&self) -> anyhow::Result<String> {
        let model = &self.model;
        let timing = toml::to_string(&self.timing).context("writing the costs")?;
        Ok(format!(
            "listen = \"127.0.0.1:0\"\nmodel = \"{MODEL}\"\nmax_model_len = {}\n\n[cache]\nblock_size = {}\ngpu_blocks = {}\n\n\
             [scheduler]\nmax_batched_tokens = {}\nmax_num_seqs = {}\n\n[telemetry]\nlog = \"warn\"\n\n[timing.custom]\n{timing}",
            model.max_model_len, model.block_size, model.gpu_blocks, model.max_batched_tokens, model.max_num_seqs,
        ))
    }
}

/// A running cluster; its processes end with it.
pub struct Cluster {
    /// Base URLs of the routers.
    pub routers: Vec<String>,
    children: Vec<Running>,
    folder: tempfile::TempDir,
}

impl Cluster {
    /// Starts everything and waits until it serves.
    pub async fn start(shape: &Shape) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("cairn-bench-live-")
            .tempdir()
            .context("making a temporary directory")?;
        let mut cluster = Self {
            routers: Vec::new(),
            children: Vec::new(),
            folder,
        };
        match cluster.bring_up(shape).await {
            Ok(()) => Ok(cluster),
            Err(error) => {
                cluster.stop().await;
                Err(error)
            }
        }
    }

    async fn bring_up(&mut self, shape: &Shape) -> anyhow::Result<()> {
        let text = shape.engine()?;
        let mut engines = Vec::new();
        for number in 1..=shape.engines {
            engines.push(self.child("engine", &format!("engine-{number}"), &text).await?);
        }
        let port = crate::bench::router::free_port()?;
        let index = format!(
            "cluster = \"bench-live\"\nnode_id = 1\nlisten = \"127.0.0.1:{port}\"\nadvertise = \"127.0.0.1:{port}\"\n\
             data_dir = {}\nops_listen = \"127.0.0.1:0\"\n\n[[peers]]\nid = 1\naddress = \"127.0.0.1:{port}\"\n\n\
             [telemetry]\nlog = \"warn\"\n",
            quoted(&self.folder.path().join("index"))
        );
        self.child("index", "index", &index).await?;
        let mut agent = format!(
            "data_dir = {}\nindex = [\"http://127.0.0.1:{port}\"]\n\n[agent]\nid = \"bench\"\nhost = \"bench\"\n\n[poll]\n\
             load_ms = {LOAD_PERIOD_MS}\n\n[telemetry]\nlog = \"warn\"\n",
            quoted(&self.folder.path().join("agent"))
        );
        for url in &engines {
            let size = shape.model.block_size;
            // Writing to a string does not fail.
            let _ = write!(agent, "\n[[engine]]\nurl = \"{url}\"\nblock_size = {size}\n");
        }
        self.child("agent", "agent", &agent).await?;
        for number in 1..=shape.routers {
            let router = format!(
                "listen = \"127.0.0.1:0\"\nname = \"router-{number}\"\nindex = [\"http://127.0.0.1:{port}\"]\npolicy = \"{}\"\n\n\
                 [telemetry]\nlog = \"warn\"\n",
                shape.policy
            );
            let url = self.child("router", &format!("router-{number}"), &router).await?;
            self.routers.push(url);
        }
        for url in &self.routers {
            self.wait_until_serving(url, &engines).await?;
        }
        Ok(())
    }

    /// Starts one process; gives its URL where it has one.
    async fn child(&mut self, role: &'static str, name: &str, config: &str) -> anyhow::Result<String> {
        let path = self.folder.path().join(format!("{name}.toml"));
        std::fs::write(&path, config).with_context(|| format!("writing {}", path.display()))?;
        let log = self.folder.path().join(format!("{name}.log"));
        let spec = ChildSpec {
            name: name.to_owned(),
            role,
            config: path,
            log,
        };
        let running = Running::start(spec).await?;
        let url = running.ready["http"].as_str().unwrap_or_default().to_owned();
        self.children.push(running);
        Ok(url)
    }

    async fn wait_until_serving(&self, router: &str, engines: &[String]) -> anyhow::Result<()> {
        let deadline = Instant::now() + SERVING_TIMEOUT;
        let url = format!("{router}/cairn/status");
        loop {
            let seen = ask_http::json(Method::GET, &url, None, Bytes::new()).await;
            let lacking = match seen {
                Ok(status) => match engines.iter().find(|engine| !serves(&status, engine)) {
                    None => return Ok(()),
                    Some(engine) => format!("{engine} isn't followed yet"),
                },
                Err(error) => error.to_string(),
            };
            if Instant::now() > deadline {
                let agent = self.folder.path().join("agent.log");
                bail!(
                    "{router} isn't serving all engines after {SERVING_TIMEOUT:?}: {lacking}\n{}",
                    tail(&agent)
                );
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Ends every process, routers first.
    pub async fn stop(mut self) {
        while let Some(child) = self.children.pop() {
            let name = child.spec.name.clone();
            if !child.stop(STOP_GRACE).await {
                crate::output::note(format!("{name} did not end within {STOP_GRACE:?} and was killed"));
            }
        }
    }
}

/// Whether an engine takes requests and its cache is known exactly.
fn serves(status: &Value, engine: &str) -> bool {
    let workers = status["workers"].as_array().map_or(&[][..], Vec::as_slice);
    workers
        .iter()
        .any(|worker| worker["engine_url"] == engine && worker["eligible"] == true && worker["claim"] == "exact")
}

fn quoted(path: &Path) -> String {
    toml::Value::String(path.display().to_string()).to_string()
}
