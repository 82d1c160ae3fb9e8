//! What is measured: Cairn's router with an index that knows who holds the shared starts, or a peer.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use super::holders::Holders;
use super::peers::{Peer, RunningPeer};
use super::relay;
use crate::up::child::{ChildSpec, Running};

/// Longest wait for Cairn's router to answer.
const UP_TIMEOUT: Duration = Duration::from_secs(30);

/// A router under measurement; its processes end when it is dropped.
pub struct Target {
    /// Name in the figures.
    pub name: &'static str,
    /// Where it answers.
    pub url: String,
    /// Its process id.
    pub pid: u32,
    _kept: Kept,
}

enum Kept {
    Cairn {
        _children: Vec<Running>,
        _holders: Holders,
        _folder: tempfile::TempDir,
    },
    Peer {
        _peer: RunningPeer,
    },
}

impl Target {
    /// Cairn's router, policy `kv`, following a real index node in which each shared start lies on one engine.
    pub async fn cairn(engines: &[String]) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("cairn-bench-")
            .tempdir()
            .context("making a temporary directory")?;
        let (index_port, router_port) = (super::free_port()?, super::free_port()?);
        let index = format!(
            "cluster = \"bench\"\nnode_id = 1\nlisten = \"127.0.0.1:{index_port}\"\nadvertise = \"127.0.0.1:{index_port}\"\n\
             data_dir = \"{}\"\nops_listen = \"127.0.0.1:0\"\n\n[[peers]]\nid = 1\naddress = \"127.0.0.1:{index_port}\"\n",
            folder.path().join("index").display()
        );
        let router = format!(
            "listen = \"127.0.0.1:{router_port}\"\nname = \"bench\"\nindex = [\"http://127.0.0.1:{index_port}\"]\n\
             policy = \"kv\"\n\n[telemetry]\nlog = \"warn\"\n"
        );
        let mut children = vec![start(folder.path(), "index", &index).await?];
        let holders = Holders::register(&format!("http://127.0.0.1:{index_port}"), engines).await?;
        children.push(start(folder.path(), "router", &router).await?);
        let pid = children[1].pid().context("the router ended at once")?;
        let url = format!("http://127.0.0.1:{router_port}");
        super::wait_for_answer(&url, UP_TIMEOUT)
            .await
            .context("waiting for the router")?;
        holders.wait_until_seen(&url).await?;
        Ok(Self {
            name: "cairn",
            url,
            pid,
            _kept: Kept::Cairn {
                _children: children,
                _holders: holders,
                _folder: folder,
            },
        })
    }

    /// Another router that chooses by `policy`.
    pub async fn peer(peer: Peer, folder: &Path, policy: &str, engines: &[String]) -> anyhow::Result<Self> {
        Ok(Self::running(peer.name, peer.start(folder, policy, engines).await?))
    }

    /// A bare TCP relay.
    pub async fn relay(engines: &[String]) -> anyhow::Result<Self> {
        Ok(Self::running("tcp-relay", relay::start(engines).await?))
    }

    fn running(name: &'static str, peer: RunningPeer) -> Self {
        Self {
            name,
            url: peer.url.clone(),
            pid: peer.pid,
            _kept: Kept::Peer { _peer: peer },
        }
    }
}

async fn start(folder: &Path, role: &'static str, config: &str) -> anyhow::Result<Running> {
    let path = folder.join(format!("{role}.toml"));
    std::fs::write(&path, config).with_context(|| format!("writing {}", path.display()))?;
    let log = folder.join(format!("{role}.log"));
    Running::start(ChildSpec {
        name: role.to_owned(),
        role,
        config: path,
        log,
    })
    .await
}
