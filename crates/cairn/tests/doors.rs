//! Bad input at the doors of the command line, configurations and data directories: an error that names fault and remedy.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::path::Path;

use support::{CAIRN, RoleProcess, ask, eventually, free_port, refusal};

fn says(text: &str, all: &[&str]) {
    for part in all {
        assert!(text.contains(part), "expected {part:?} in: {text}");
    }
    assert!(!text.contains("panicked"), "{text}");
}

fn refused(role: &str, config: &str, all: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    std::fs::write(&path, config).unwrap();
    let mut said = refusal(&[role, "--config", path.to_str().unwrap()]);
    said.push('\n');
    says(&said, all);
}

fn index_config(folder: &Path, cluster: &str, id: u64, port: u16) -> String {
    format!(
        "cluster = \"{cluster}\"\nnode_id = {id}\nlisten = \"127.0.0.1:{port}\"\ndata_dir = \"{}\"\n",
        folder.join("data").display()
    )
}

#[test]
fn unknown_and_mistyped_fields_are_named() {
    refused("index", "clutser = \"x\"\n", &["clutser", "--print-config"]);
    refused("agent", "data_dir = 7\n", &["data_dir", "--print-config"]);
    refused("router", "listen = \"here\"\n", &["listen", "here"]);
    refused("engine", "[cache]\nblock_size = 0\n", &["block_size"]);
    refused("router", "this is not toml", &["--print-config"]);
}

#[test]
fn a_duplicate_node_id_is_refused_naming_both_addresses() {
    let config = "node_id = 1\n[[peers]]\nid = 1\naddress = \"127.0.0.1:7401\"\n[[peers]]\nid = 1\naddress = \"127.0.0.1:7402\"\n";
    refused("index", config, &["id 1", "twice", "7401", "7402"]);
}

#[test]
fn no_role_listens_beyond_loopback_without_token_and_tls() {
    for (role, config) in [
        ("index", "listen = \"0.0.0.0:0\"\n"),
        ("router", "listen = \"0.0.0.0:0\"\n"),
        ("agent", "[ops]\nlisten = \"0.0.0.0:0\"\n"),
        ("engine", "listen = \"0.0.0.0:0\"\n"),
    ] {
        refused(role, config, &["127.0.0.1", "cluster_token_file", "tls_cert_file"]);
    }
}

#[test]
fn a_missing_configuration_is_named() {
    says(
        &refusal(&["index", "--config", "/nonexistent/cairn.toml"]),
        &["/nonexistent/cairn.toml"],
    );
    says(&refusal(&["up", "--engines", "four"]), &["sim:N", "--engine URL"]);
    says(
        &refusal(&["up", "--engine", "not a url", "--port", "0"]),
        &["not a url", "http://host:port"],
    );
    says(&refusal(&["up", "--index-nodes", "2"]), &["majority"]);
    says(
        &refusal(&["status", "--index", "127.0.0.1:1"]),
        &["127.0.0.1:1", "--index"],
    );
    says(
        &refusal(&["explain", "--router", "http://127.0.0.1:1", "--last"]),
        &["127.0.0.1:1"],
    );
}

#[test]
fn every_printed_configuration_is_accepted_by_its_role() {
    for role in ["index", "agent", "router", "engine"] {
        let output = std::process::Command::new(CAIRN)
            .args([role, "--print-config"])
            .output()
            .unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains('#') && text.contains('='), "{role}: {text}");
        let value: toml::Table = toml::from_str(&text).unwrap_or_else(|e| panic!("{role}: {e}"));
        assert!(value.contains_key("telemetry"), "{role}");
        validated(role, &text).unwrap_or_else(|e| panic!("{role}: {e}"));
    }
}

/// Reads a configuration as its role does.
fn validated(role: &str, text: &str) -> Result<(), String> {
    fn read<C: serde::de::DeserializeOwned>(text: &str) -> Result<C, String> {
        toml::from_str(text).map_err(|e| e.to_string())
    }
    match role {
        "index" => read::<cairn_index_node::Config>(text)?
            .validate()
            .map_err(|e| e.to_string()),
        "agent" => read::<cairn_agent::Config>(text)?.validate().map_err(|e| e.to_string()),
        "router" => read::<cairn_router::Config>(text)?
            .validate()
            .map_err(|e| e.to_string()),
        "engine" => read::<cairn_engine_sim::Config>(text)?
            .validate()
            .map_err(|e| e.to_string()),
        other => Err(format!("there is no role {other}")),
    }
}

#[test]
fn a_taken_port_is_named_with_the_remedy() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    says(&refusal(&["up", "--port", &port]), &[&port, "--port"]);
    refused(
        "router",
        &format!("listen = \"127.0.0.1:{port}\"\n"),
        &[&port, "in use"],
    );
}

#[test]
fn the_data_of_another_cluster_or_node_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (port, other) = (free_port(), free_port());
    let node = RoleProcess::start(
        folder.path(),
        "first",
        "index",
        &index_config(folder.path(), "one", 1, port),
    );
    assert!(node.end().success());
    let said = RoleProcess::try_start(
        folder.path(),
        "second",
        "index",
        &index_config(folder.path(), "two", 1, other),
    );
    says(&said.err().unwrap(), &["one", "two"]);
    let said = RoleProcess::try_start(
        folder.path(),
        "third",
        "index",
        &index_config(folder.path(), "one", 9, other),
    );
    says(&said.err().unwrap(), &["9", "1"]);
    let again = RoleProcess::start(
        folder.path(),
        "fourth",
        "index",
        &index_config(folder.path(), "one", 1, port),
    );
    assert!(again.end().success(), "its own cluster still opens it");
}

#[test]
fn a_locked_or_unusable_data_directory_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (port, other) = (free_port(), free_port());
    let node = RoleProcess::start(
        folder.path(),
        "first",
        "index",
        &index_config(folder.path(), "one", 1, port),
    );
    let said = RoleProcess::try_start(
        folder.path(),
        "second",
        "index",
        &index_config(folder.path(), "one", 1, other),
    );
    says(&said.err().unwrap(), &["data"]);
    assert!(node.end().success());
    let file = folder.path().join("a-file");
    std::fs::write(&file, "not a directory").unwrap();
    let config = format!(
        "listen = \"127.0.0.1:{other}\"\ndata_dir = \"{}\"\n",
        file.join("data").display()
    );
    says(
        &RoleProcess::try_start(folder.path(), "third", "index", &config)
            .err()
            .unwrap(),
        &["a-file"],
    );
}

#[test]
fn tokens_are_asked_for_where_a_role_has_one() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "a-cluster-token-of-some-length\n").unwrap();
    let port = free_port();
    let config = format!(
        "{}\n[security]\ncluster_token_file = \"{}\"\n",
        index_config(folder.path(), "one", 1, port),
        token.display()
    );
    let node = RoleProcess::start(folder.path(), "node", "index", &config);
    let address = format!("127.0.0.1:{port}");
    let said = refusal(&["status", "--index", &address]);
    says(&said, &["token"]);
    let status = eventually("the status with the token", std::time::Duration::from_secs(10), || {
        let status = ask(&[
            "status",
            "--json",
            "--index",
            &address,
            "--cluster-token",
            token.to_str().unwrap(),
        ]);
        (status["leader"] == 1).then_some(status)
    });
    assert_eq!(status["cluster"], "one");
    assert!(
        !std::fs::read_to_string(&node.log).unwrap().contains("a-cluster-token"),
        "the token is in no log"
    );
    assert!(node.end().success());
}
