//! An index node as a process of its own: the test binary starts itself again.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use cairn_index_node::{Config, start};

/// Tells the process which configuration to run.
const VARIABLE: &str = "CAIRN_TEST_NODE_CONFIG";

/// Starts a node; its configuration is written to `path`.
pub fn spawn(config: &Config, path: &Path) -> std::io::Result<Child> {
    let text = toml::to_string(config).map_err(std::io::Error::other)?;
    std::fs::write(path, text)?;
    Command::new(std::env::current_exe()?)
        .args(["--exact", "process::node_process", "--nocapture", "--test-threads=1"])
        .env(VARIABLE, path)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// Not a test of its own: the body of the process, which does nothing unless told which configuration to run.
#[test]
fn node_process() {
    let Ok(path) = std::env::var(VARIABLE) else { return };
    let config: Config = toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut node = match start(config).await {
            Ok(node) => node,
            Err(error) => {
                eprintln!("START REFUSED: {error}");
                std::process::exit(3);
            }
        };
        let ended = node.wait().await.unwrap_err();
        eprintln!("NODE ENDED: {ended}");
        std::process::exit(4);
    });
}
