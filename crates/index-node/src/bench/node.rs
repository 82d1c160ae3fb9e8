//! One node under test: a process that is started, asked, killed and started again.

use std::net::SocketAddr;
use std::process::Child;
use std::time::{Duration, Instant};

use cairn_proto::security::{AuthChannel, Credentials};
use cairn_proto::{HeldPort, v1};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{BenchError, LOOK_EVERY, PATIENCE, StartNode, failed};
use crate::Config;

/// How long a node that is busy may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// A node; its process ends with it.
pub(super) struct Node {
    config: Config,
    start: StartNode,
    process: Option<Child>,
    raft: v1::raft_client::RaftClient<AuthChannel>,
    admin: v1::admin_client::AdminClient<AuthChannel>,
    ops: SocketAddr,
    /// Its ports, while it is down too.
    _ports: [HeldPort; 2],
}

/// What a node says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stand {
    pub(super) leads: bool,
    pub(super) applied: u64,
    pub(super) digest: u64,
}

impl Node {
    /// Starts it; `ports` are where `config` says that it listens.
    pub(super) fn start(config: Config, start: StartNode, ports: [HeldPort; 2]) -> Result<Self, BenchError> {
        let channel = Credentials::default()
            .client_channel(&ports[0].address().to_string())
            .map_err(failed)?;
        let mut node = Self {
            config,
            start,
            process: None,
            raft: v1::raft_client::RaftClient::new(channel.clone()),
            admin: v1::admin_client::AdminClient::new(channel),
            ops: ports[1].address(),
            _ports: ports,
        };
        node.go_on()?;
        Ok(node)
    }

    /// Starts its process, on the data that it has.
    pub(super) fn go_on(&mut self) -> Result<(), BenchError> {
        self.process = Some((self.start)(&self.config).map_err(failed)?);
        Ok(())
    }

    /// Ends its process at once, as a crash would.
    pub(super) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // It may have ended by itself.
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.config.listen
    }

    /// Number of its process, while it runs.
    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Child::id)
    }

    /// Where it stands; nothing while it doesn't answer.
    pub(super) async fn stand(&self) -> Option<Stand> {
        let request = v1::ProbeRequest {
            cluster: self.config.cluster.clone(),
        };
        let mut client = self.raft.clone();
        let answer = tokio::time::timeout(ANSWER, client.probe(request)).await.ok()?.ok()?;
        let member = answer.into_inner().member?;
        Some(Stand {
            leads: member.role == "leader",
            applied: member.applied_index,
            digest: u64::from_str_radix(&member.digest, 16).ok()?,
        })
    }

    /// Makes a snapshot and waits until it is on disk.
    pub(super) async fn snapshot(&self) -> Result<(), BenchError> {
        let mut client = self.admin.clone();
        let asked = client.snapshot(v1::SnapshotRequest {});
        tokio::time::timeout(PATIENCE, asked)
            .await
            .map_err(failed)?
            .map_err(failed)?;
        Ok(())
    }

    /// Waits until it says that it can serve.
    pub(super) async fn ready(&self) -> Result<(), BenchError> {
        let begun = Instant::now();
        while !self
            .get("/ready")
            .await
            .is_ok_and(|page| page.starts_with("HTTP/1.1 200"))
        {
            if begun.elapsed() > PATIENCE {
                return Err(failed(format!("node {} didn't become ready", self.config.node_id)));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// One of its metrics without labels.
    pub(super) async fn metric(&self, name: &str) -> Result<u64, BenchError> {
        let page = self.get("/metrics").await.map_err(failed)?;
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = value.and_then(|text| text.trim().parse().ok());
        value.ok_or_else(|| failed(format!("node {} says no {name}", self.config.node_id)))
    }

    /// A page of its operators' port, with its head.
    async fn get(&self, path: &str) -> std::io::Result<String> {
        let ask = async {
            let mut stream = TcpStream::connect(self.ops).await?;
            let request = format!("GET {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await?;
            let mut page = String::new();
            stream.read_to_string(&mut page).await?;
            Ok(page)
        };
        tokio::time::timeout(ANSWER, ask).await?
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}
