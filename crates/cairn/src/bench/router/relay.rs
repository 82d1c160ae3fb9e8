//! A bare TCP relay as the floor: what the machine's kernel takes for a request and a chunk where nothing is read or decided.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

use super::peers::RunningPeer;

/// Longest wait for the relay to answer.
const UP_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes read at once: whole requests of the bench.
const BUFFER_BYTES: usize = 64 << 10;

/// Arguments of the relay's own process.
#[derive(Args, Debug)]
pub struct RelayArgs {
    /// Port on loopback.
    #[arg(long)]
    port: u16,
    /// Where connections go.
    #[arg(long)]
    to: SocketAddr,
}

/// Relays until the process is killed.
pub fn run(args: &RelayArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?;
    runtime.block_on(async {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port))
            .await
            .with_context(|| format!("listening on port {}", args.port))?;
        let to = args.to;
        loop {
            let (client, _) = listener.accept().await.context("accepting a connection")?;
            tokio::spawn(async move {
                if let Err(error) = relay(client, to).await {
                    tracing::debug!(%error, "a relayed connection ended");
                }
            });
        }
    })
}

async fn relay(mut client: TcpStream, to: SocketAddr) -> std::io::Result<()> {
    client.set_nodelay(true)?;
    let mut engine = TcpStream::connect(to).await?;
    engine.set_nodelay(true)?;
    tokio::io::copy_bidirectional_with_sizes(&mut client, &mut engine, BUFFER_BYTES, BUFFER_BYTES).await?;
    Ok(())
}

/// Starts a relay to the first engine as a process of its own.
pub async fn start(engines: &[String]) -> anyhow::Result<RunningPeer> {
    let to = engines[0]
        .strip_prefix("http://")
        .context("the engine is an http URL")?;
    let port = super::free_port()?;
    let binary = std::env::current_exe().context("finding this program's own file")?;
    let child = Command::new(binary)
        .args(["bench", "tcp-relay", "--port", &port.to_string(), "--to", to])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .context("starting the relay")?;
    RunningPeer::answering("tcp-relay", format!("http://127.0.0.1:{port}"), child, UP_TIMEOUT).await
}
