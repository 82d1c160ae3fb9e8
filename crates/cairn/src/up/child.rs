//! One role as a child process: started, awaited until ready, restarted when it dies, stopped.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};

/// Longest wait for a child's ready line; an index node may have to read a large snapshot first.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Lines of a dead child's log that are shown.
const LOG_TAIL_LINES: usize = 15;

/// What is needed to start a child, again and again.
#[derive(Clone, Debug)]
pub struct ChildSpec {
    /// Name for people and of its files, such as `index-1`.
    pub name: String,
    /// Subcommand: index, agent, router or engine.
    pub role: &'static str,
    /// Its configuration file.
    pub config: PathBuf,
    /// Where its standard error goes.
    pub log: PathBuf,
}

/// A running child.
pub struct Running {
    /// How it was started.
    pub spec: ChildSpec,
    /// The line that it printed when ready.
    pub ready: Value,
    process: Child,
    // The child ends when this pipe closes, so that it never outlives its parent.
    stdin: Option<ChildStdin>,
}

impl Running {
    /// Starts a child and waits for its ready line.
    pub async fn start(spec: ChildSpec) -> anyhow::Result<Self> {
        let binary = std::env::current_exe().context("finding this program's own file")?;
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&spec.log)
            .with_context(|| format!("opening the log file {}", spec.log.display()))?;
        let mut process = Command::new(binary)
            .arg(spec.role)
            .arg("--config")
            .arg(&spec.config)
            .args(["--json", "--end-with-stdin"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .kill_on_drop(true)
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {}", spec.name))?;
        let stdin = process.stdin.take();
        let stdout = process.stdout.take().context("the child's standard output is piped")?;
        let mut lines = BufReader::new(stdout).lines();
        let line = match tokio::time::timeout(READY_TIMEOUT, lines.next_line()).await {
            Ok(Ok(Some(line))) => line,
            Ok(Ok(None)) => bail!("{} ended before it was ready:\n{}", spec.name, tail(&spec.log)),
            Ok(Err(error)) => return Err(error).with_context(|| format!("reading from {}", spec.name)),
            Err(_) => bail!(
                "{} was not ready within {READY_TIMEOUT:?}:\n{}",
                spec.name,
                tail(&spec.log)
            ),
        };
        let ready = serde_json::from_str(&line)
            .with_context(|| format!("{} printed `{line}` instead of its ready line", spec.name))?;
        Ok(Self {
            spec,
            ready,
            process,
            stdin,
        })
    }

    /// Process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.id()
    }

    /// Resolves when the child has ended.
    pub async fn ended(&mut self) -> String {
        match self.process.wait().await {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        }
    }

    /// Asks it to end and waits; kills it after `grace`. Says whether it ended by itself.
    pub async fn stop(mut self, grace: Duration) -> bool {
        drop(self.stdin.take());
        if tokio::time::timeout(grace, self.process.wait()).await.is_ok() {
            return true;
        }
        // It may end between the time-out and the kill.
        let _ = self.process.kill().await;
        false
    }
}

/// The last lines of a log file, indented.
pub fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(LOG_TAIL_LINES);
    let shown: Vec<String> = lines[from..].iter().map(|l| format!("    {l}")).collect();
    format!("{}\n  (whole log: {})", shown.join("\n"), log.display())
}
