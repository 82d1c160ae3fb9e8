//! Holds the arrows between the rooms: shells know edges and cores, edges know cores, cores know only smaller cores. And holds
//! libraries to one set of features, whatever is built.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Which rooms each room may know. A room that isn't named here fails the test, so that the house is drawn before it grows.
const ARROWS: [(&str, &[&str]); 16] = [
    ("cairn-blocks", &[]),
    ("cairn-index", &["cairn-blocks"]),
    ("cairn-ingest", &["cairn-blocks", "cairn-index"]),
    ("cairn-routing", &["cairn-blocks", "cairn-index"]),
    (
        "cairn-replay",
        &["cairn-blocks", "cairn-index", "cairn-ingest", "cairn-routing"],
    ),
    (
        "cairn-sim",
        &[
            "cairn-blocks",
            "cairn-index",
            "cairn-ingest",
            "cairn-routing",
            "cairn-replay",
        ],
    ),
    ("cairn-proto", &["cairn-blocks", "cairn-index"]),
    ("cairn-telemetry", &[]),
    ("cairn-tokens", &[]),
    ("cairn-raft-store", &["cairn-blocks", "cairn-index"]),
    (
        "cairn-index-node",
        &[
            "cairn-blocks",
            "cairn-index",
            "cairn-proto",
            "cairn-raft-store",
            "cairn-telemetry",
        ],
    ),
    (
        "cairn-agent",
        &[
            "cairn-blocks",
            "cairn-index",
            "cairn-ingest",
            "cairn-proto",
            "cairn-telemetry",
        ],
    ),
    (
        "cairn-router",
        &[
            "cairn-blocks",
            "cairn-index",
            "cairn-routing",
            "cairn-tokens",
            "cairn-proto",
            "cairn-telemetry",
        ],
    ),
    (
        "cairn-engine-sim",
        &[
            "cairn-blocks",
            "cairn-replay",
            "cairn-tokens",
            "cairn-proto",
            "cairn-telemetry",
        ],
    ),
    ("cairn", &["*"]),
    ("xtask", &[]),
];

/// What cores must not know: they are sans-IO.
const CORES: [&str; 6] = [
    "cairn-blocks",
    "cairn-index",
    "cairn-ingest",
    "cairn-routing",
    "cairn-replay",
    "cairn-sim",
];
const NOT_IN_CORES: [&str; 12] = [
    "tokio",
    "tonic",
    "hyper",
    "axum",
    "tracing",
    "tracing-subscriber",
    "prometheus-client",
    "opentelemetry",
    "sled",
    "openraft",
    "zeromq",
    "chrono",
];

/// What cargo says when it is called so.
fn cargo(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO")).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Each room with the libraries that it depends on, tests' own apart.
fn rooms() -> BTreeMap<String, Vec<String>> {
    let metadata: Value = serde_json::from_str(&cargo(&["metadata", "--no-deps", "--format-version", "1"])).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages
        .map(|package| {
            let dependencies = package["dependencies"].as_array().unwrap().iter();
            let normal = dependencies.filter(|dependency| dependency["kind"].is_null());
            (text(&package["name"]), normal.map(|d| text(&d["name"])).collect())
        })
        .collect()
}

#[test]
fn rooms_know_only_the_rooms_below_them() {
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.into_iter().collect();
    let mut wrong = Vec::new();
    for (name, dependencies) in rooms() {
        let Some(may_know) = allowed.get(name.as_str()) else {
            wrong.push(format!("{name} is not in the list of rooms"));
            continue;
        };
        for room in dependencies.iter().map(String::as_str) {
            if room.starts_with("cairn") && !may_know.contains(&"*") && !may_know.contains(&room) {
                wrong.push(format!("{name} must not know {room}"));
            }
            if CORES.contains(&name.as_str()) && NOT_IN_CORES.contains(&room) {
                wrong.push(format!("{name} is a core and must not know {room}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn openraft_and_sled_stay_in_their_room() {
    let rooms = rooms();
    let known_by = |library: &str| -> Vec<&str> {
        let knows = rooms
            .iter()
            .filter(|(_, known)| known.iter().any(|name| name == library));
        knows.map(|(room, _)| room.as_str()).collect()
    };
    assert_eq!(known_by("sled"), ["cairn-raft-store"]);
    let raft = known_by("openraft");
    assert!(
        raft.iter()
            .all(|p| ["cairn-raft-store", "cairn-index-node"].contains(p)),
        "{raft:?}"
    );
}

/// Where tests ask more of a library than the program does, cargo compiles it twice, and every room above it.
#[test]
fn tests_and_program_share_one_build_of_every_library() {
    let built = |edges: &str| -> BTreeSet<String> {
        let tree = cargo(&[
            "tree",
            "--workspace",
            "--locked",
            "--edges",
            edges,
            "--prefix",
            "none",
            "--format",
            "{p} {f}",
        ]);
        tree.lines()
            .map(|line| line.trim_end_matches(" (*)").to_owned())
            .collect()
    };
    let program = built("normal,build");
    let tests = built("normal,build,dev");
    // A library that only tests use isn't built twice; one without features of its own has one build.
    let name = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    let used: BTreeSet<String> = program.iter().map(|line| name(line)).collect();
    let twice: Vec<&String> = tests
        .difference(&program)
        .filter(|line| used.contains(&name(line)))
        .collect();
    assert!(
        twice.is_empty(),
        "name these features in the workspace's table of dependencies: {twice:#?}"
    );
}
