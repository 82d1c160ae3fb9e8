//! Rows of figures: medians over rounds, as JSON and as a table.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::workload::Workload;

/// Indexes that aren't peers: ours, and the baselines.
pub const OURS: [&str; 3] = ["cairn", "cairn+mirror", "cairn+mirror/1% lost"];
const BASELINES: [&str; 3] = ["harness", "map-of-sets", "sharded-map"];

/// Figures of one index on one workload.
pub struct Row {
    /// Name of the index.
    pub index: &'static str,
    figures: Map<String, Value>,
}

impl Row {
    /// The median of each figure over the rounds that were taken.
    pub fn from_rounds(index: &'static str, rounds: &[Value]) -> Self {
        let mut figures = Map::new();
        for name in rounds.iter().filter_map(Value::as_object).flat_map(Map::keys) {
            if figures.contains_key(name) {
                continue;
            }
            let mut values: Vec<f64> = rounds.iter().filter_map(|r| r[name].as_f64()).collect();
            values.sort_by(f64::total_cmp);
            let Some(median) = values.get(values.len() / 2) else {
                figures.insert(name.clone(), Value::Null);
                continue;
            };
            let whole = matches!(
                name.as_str(),
                "wrong" | "matches" | "refused" | "rss_bytes" | "match_p50_ns" | "match_p99_ns"
            );
            let median = if whole {
                json!(*median as u64)
            } else {
                json!((median * 100.0).round() / 100.0)
            };
            figures.insert(name.clone(), median);
        }
        let ingests = rounds
            .iter()
            .filter(|r| !r["ingest_cpu_ns_per_block"].is_null())
            .count();
        figures.insert("rounds".into(), json!(ingests));
        Self { index, figures }
    }

    /// One figure, if it was measured.
    pub fn figure(&self, name: &str) -> Option<f64> {
        self.figures.get(name)?.as_f64()
    }

    /// Every answer was right, and there were some.
    pub fn is_exact(&self) -> bool {
        self.figure("wrong") == Some(0.0) && self.figure("matches").is_some_and(|n| n > 0.0)
    }

    fn is_peer(&self) -> bool {
        !OURS.contains(&self.index) && !BASELINES.contains(&self.index)
    }

    /// As the JSON report has it.
    pub fn to_json(&self, workload: &Workload) -> Value {
        let caches = &workload.caches;
        let mut row = Map::new();
        row.insert("index".into(), json!(self.index));
        row.insert("workload".into(), json!(workload.name));
        row.insert("workers".into(), json!(caches.workers));
        row.insert("capacity".into(), json!(caches.capacity));
        row.insert("holes".into(), json!(caches.holes));
        row.extend(self.figures.clone());
        Value::Object(row)
    }
}

/// The least figure among the peers, and whose it is; only exact ones' where asked.
pub fn best_peer<'a>(rows: &'a [Row], figure: &str, exact: bool) -> Option<(f64, &'a str)> {
    let peers = rows.iter().filter(|r| r.is_peer() && (!exact || r.is_exact()));
    let figures = peers.filter_map(|r| Some((r.figure(figure)?, r.index)));
    figures.min_by(|a, b| a.0.total_cmp(&b.0))
}

const COLUMNS: [(&str, &str); 10] = [
    ("ingest_cpu_ns_per_block", "ingest ns"),
    ("match_p50_ns", "p50 ns"),
    ("match_p99_ns", "p99 ns"),
    ("match_cold_p50_ns", "cold p50"),
    ("match_cpu_ns", "CPU ns"),
    ("bytes_per_membership", "B/member"),
    ("rss_bytes", "RSS MB"),
    ("wrong", "wrong"),
    ("matches", "matches"),
    ("refused", "refused"),
];

/// A workload's rows, with Cairn's ratios to the best peer on each figure.
pub fn table(label: &str, rows: &[Row]) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "\n{label}");
    let _ = write!(out, "  {:22}", "index");
    for (_, head) in COLUMNS {
        let _ = write!(out, "{head:>11}");
    }
    out.push('\n');
    for row in rows {
        let _ = write!(out, "  {:22}", row.index);
        for (name, _) in COLUMNS {
            let scale = if name == "rss_bytes" { 1e-6 } else { 1.0 };
            match row.figure(name) {
                Some(figure) if matches!(name, "wrong" | "matches" | "refused") => {
                    let _ = write!(out, "{figure:>11.0}");
                }
                Some(figure) => {
                    let _ = write!(out, "{:>11.1}", figure * scale);
                }
                None => {
                    let _ = write!(out, "{:>11}", "-");
                }
            }
        }
        out.push('\n');
    }
    for ours in OURS {
        let Some(row) = rows.iter().find(|r| r.index == ours) else {
            continue;
        };
        let ratios = COLUMNS[..6].iter().filter_map(|(name, head)| {
            let (best, whose) = best_peer(rows, name, false)?;
            Some(format!("{head} {:.2} x {whose}", row.figure(name)? / best))
        });
        let _ = writeln!(
            out,
            "  {ours} to the best peer: {}",
            ratios.collect::<Vec<_>>().join(", ")
        );
    }
    out
}
