//! Holds the arrows between the rooms: shells know edges and cores, edges know cores, cores know only smaller cores.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeMap;

use cargo_metadata::{DependencyKind, MetadataCommand};

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

#[test]
fn rooms_know_only_the_rooms_below_them() {
    let metadata = MetadataCommand::new().no_deps().exec().unwrap();
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.into_iter().collect();
    let mut wrong = Vec::new();
    for package in &metadata.packages {
        let Some(may_know) = allowed.get(package.name.as_str()) else {
            wrong.push(format!("{} is not in the list of rooms", package.name));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|d| d.kind == DependencyKind::Normal) {
            let room = dependency.name.as_str();
            if room.starts_with("cairn") && !may_know.contains(&"*") && !may_know.contains(&room) {
                wrong.push(format!("{} must not know {room}", package.name));
            }
            if CORES.contains(&package.name.as_str()) && NOT_IN_CORES.contains(&room) {
                wrong.push(format!("{} is a core and must not know {room}", package.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn openraft_and_sled_stay_in_their_room() {
    let metadata = MetadataCommand::new().no_deps().exec().unwrap();
    let known_by = |name: &str| -> Vec<String> {
        let knows = |p: &&cargo_metadata::Package| {
            p.dependencies
                .iter()
                .any(|d| d.name == name && d.kind == DependencyKind::Normal)
        };
        metadata
            .packages
            .iter()
            .filter(knows)
            .map(|p| p.name.to_string())
            .collect()
    };
    assert_eq!(known_by("sled"), ["cairn-raft-store"]);
    let raft = known_by("openraft");
    assert!(
        raft.iter().all(|p| p == "cairn-raft-store" || p == "cairn-index-node"),
        "{raft:?}"
    );
}
