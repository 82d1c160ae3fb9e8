//! Other routers, in their cache-aware modes unless told otherwise, installed from PyPI into a folder that the caller names.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::process::{Child, Command};

/// How a peer is started.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Name in the figures.
    pub name: &'static str,
    /// Package and version on PyPI.
    pub package: &'static str,
    program: &'static str,
    subcommand: &'static [&'static str],
}

/// The peers and the versions that were measured.
pub const PEERS: [Peer; 3] = [
    Peer {
        name: "sglang-router",
        package: "sglang-router==0.3.2",
        program: "sglang-router",
        subcommand: &["launch"],
    },
    Peer {
        name: "smg",
        package: "smg==1.13.0",
        program: "smg",
        subcommand: &["launch"],
    },
    Peer {
        name: "vllm-router",
        package: "vllm-router==0.1.17",
        program: "vllm-router",
        subcommand: &[],
    },
];

/// Longest wait for a peer to answer.
const UP_TIMEOUT: Duration = Duration::from_secs(40);

/// A peer's process; killed when dropped.
pub struct RunningPeer {
    /// Where it answers.
    pub url: String,
    /// Its process id.
    pub pid: u32,
    _child: Child,
}

impl Peer {
    /// Starts it in front of `engines`, choosing by `policy`; `folder` is a Python environment that has its package.
    pub async fn start(&self, folder: &Path, policy: &str, engines: &[String]) -> anyhow::Result<RunningPeer> {
        let program = folder.join("bin").join(self.program);
        if !program.exists() {
            let (folder, package) = (folder.display(), self.package);
            bail!(
                "{} is missing: python3 -m venv {folder} && {folder}/bin/pip install {package}",
                program.display()
            );
        }
        let (port, metrics) = (super::free_port()?, super::free_port()?);
        let mut command = Command::new(&program);
        command
            .args(self.subcommand)
            .args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--policy", policy, "--log-level", "error"]);
        command.args([
            "--prometheus-host",
            "127.0.0.1",
            "--prometheus-port",
            &metrics.to_string(),
        ]);
        command.arg("--worker-urls").args(engines);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let child = command
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let url = format!("http://127.0.0.1:{port}");
        RunningPeer::answering(self.name, url, child, UP_TIMEOUT).await
    }
}

impl RunningPeer {
    /// Waits until `child` answers at `url`.
    pub async fn answering(name: &str, url: String, child: Child, within: Duration) -> anyhow::Result<Self> {
        let pid = child.id().with_context(|| format!("{name} ended at once"))?;
        super::wait_for_answer(&url, within)
            .await
            .with_context(|| format!("waiting for {name}"))?;
        Ok(Self {
            url,
            pid,
            _child: child,
        })
    }
}
