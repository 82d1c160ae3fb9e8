//! The operators' commands: they ask a running cluster over its own RPC and print what it says.

pub mod ask_http;
pub mod drain;
pub mod explain;
pub mod members;
pub mod policy;
pub mod status;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use cairn_proto::security::{AuthChannel, Security};
use cairn_proto::v1::admin_client::AdminClient;
use clap::Args;

/// Longest wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// How to reach the index.
#[derive(Args, Clone, Debug)]
pub struct IndexAccess {
    /// Address of any index node; repeat to name more that may answer instead.
    #[arg(
        long,
        global = true,
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:8100",
        env = "CAIRN_INDEX",
        value_delimiter = ','
    )]
    index: Vec<String>,
    /// File with the cluster token.
    #[arg(long, global = true, value_name = "FILE", env = "CAIRN_CLUSTER_TOKEN_FILE")]
    cluster_token: Option<PathBuf>,
    /// File with the CA certificate that the index nodes' certificates are signed by (PEM).
    #[arg(long, global = true, value_name = "FILE", env = "CAIRN_TLS_CA_FILE")]
    tls_ca: Option<PathBuf>,
}

impl IndexAccess {
    /// Asks the nodes one after another until one answers.
    pub async fn ask<T, F>(&self, call: impl Fn(AdminClient<AuthChannel>) -> F) -> anyhow::Result<T>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        let security = Security {
            cluster_token_file: self.cluster_token.clone(),
            tls_ca_file: self.tls_ca.clone(),
            ..Security::default()
        };
        let credentials = security.load().context("reading the cluster token and certificates")?;
        let mut last = anyhow::anyhow!("no index node was named; use --index HOST:PORT");
        for address in &self.index {
            let channel = credentials
                .client_channel(address)
                .with_context(|| format!("index node {address}"))?;
            match tokio::time::timeout(ANSWER_TIMEOUT, call(AdminClient::new(channel))).await {
                Ok(Ok(reply)) => return Ok(reply.into_inner()),
                // A status with a cause was made here, of a connection that failed; a node's own words have none.
                Ok(Err(status)) if std::error::Error::source(&status).is_some() => {
                    last = self.unreachable(address, &status);
                }
                Ok(Err(status)) if status.code() == tonic::Code::Unavailable => {
                    last = anyhow::anyhow!(
                        "index node {address} can't answer now ({}); name another with --index",
                        status.message()
                    );
                }
                Ok(Err(status)) => anyhow::bail!("index node {address} refused: {}", status.message()),
                Err(_) => last = anyhow::anyhow!("index node {address} did not answer within {ANSWER_TIMEOUT:?}"),
            }
        }
        Err(last)
    }

    /// What a connection that failed may mean.
    fn unreachable(&self, address: &str, status: &tonic::Status) -> anyhow::Error {
        let mut cause: &dyn std::error::Error = status;
        while let Some(deeper) = cause.source() {
            cause = deeper;
        }
        let check = if self.tls_ca.is_some() {
            "is a node with TLS there, whose certificate that CA signed for this name?"
        } else {
            "is a node there (its `listen`, not the port of its metrics or of a router)? One with TLS needs --tls-ca FILE."
        };
        anyhow::anyhow!("index node {address} can't be reached ({cause}): {check} Name another with --index")
    }
}

/// Runs one operator's command.
pub fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?;
    runtime.block_on(work)
}
