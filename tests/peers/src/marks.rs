//! The project's marks against the best peer on each figure, and whether this run holds them.

use serde_json::{Value, json};

use crate::rows::{Row, best_peer};
use crate::workload::Workload;

/// How one mark came out.
pub struct Mark {
    what: String,
    reached: f64,
    wanted: f64,
    unit: &'static str,
    /// The figure must be at least `wanted`, rather than at most.
    at_least: bool,
    against: String,
}

impl Mark {
    /// Whether the mark was reached.
    pub fn holds(&self) -> bool {
        if self.at_least {
            self.reached >= self.wanted
        } else {
            self.reached <= self.wanted
        }
    }

    /// One line.
    pub fn line(&self) -> String {
        let (verdict, relation) = (
            if self.holds() { "holds" } else { "MISSED" },
            if self.at_least { ">=" } else { "<=" },
        );
        format!(
            "{verdict:7} {}: {:.2} {unit} (mark {relation} {} {unit}), against {}",
            self.what,
            self.reached,
            self.wanted,
            self.against,
            unit = self.unit
        )
    }

    /// For the JSON report.
    pub fn to_json(&self) -> Value {
        json!({
            "what": self.what, "reached": self.reached, "mark": self.wanted, "unit": self.unit,
            "at_least": self.at_least, "against": self.against, "holds": self.holds(),
        })
    }
}

/// Limits of one workload: speed-up of ingest at least, and at most these shares of the best peer's figure.
struct Limits {
    ingest: f64,
    p50: f64,
    p99: Option<f64>,
    bytes: f64,
}

/// The marks of all workloads that were measured.
pub fn judge(measured: &[(Workload, Vec<Row>)]) -> Vec<Mark> {
    let mut marks = Vec::new();
    for (workload, rows) in measured {
        let caches = &workload.caches;
        let name = workload.label();
        let key = (workload.name, caches.workers);
        if caches.holes == 0.0 {
            let limits = match key {
                ("conversation-16", 64) => Some(Limits {
                    ingest: 4.0,
                    p50: 0.5,
                    p99: Some(0.5),
                    bytes: 0.25,
                }),
                ("conversation-16", 1_000) => Some(Limits {
                    ingest: 4.0,
                    p50: 0.5,
                    p99: None,
                    bytes: 0.2,
                }),
                ("sharegpt-16", 64) => Some(Limits {
                    ingest: 3.0,
                    p50: 0.8,
                    p99: None,
                    bytes: 0.3,
                }),
                _ => None,
            };
            if let Some(limits) = limits {
                plain(&name, rows, &limits, &mut marks);
            }
            if key == ("conversation-16", 64) {
                mirrored(&name, rows, &mut marks);
            }
        }
        if key == ("conversation-16", 64) && caches.holes == 1.0 {
            marks.extend(speed_up(&name, rows, "cairn", 4.0, true));
        }
        if key == ("conversation-16", 64) && caches.holes > 0.0 && caches.holes < 1.0 {
            marks.extend(cost_of_holes(&name, rows, measured));
        }
        for row in rows.iter().filter(|r| crate::rows::OURS.contains(&r.index)) {
            marks.extend(row.figure("wrong").map(|wrong| Mark {
                what: format!("{name}: {} wrong answers", row.index),
                reached: wrong,
                wanted: 0.0,
                unit: "wrong",
                at_least: false,
                against: "the oracle".into(),
            }));
        }
    }
    marks
}

/// The marks of what Cairn does alone; a part that wasn't measured has none.
pub fn judge_alone(scale: &Value, churn: &Value, huge: &Value) -> Vec<Mark> {
    let us = |ns: &Value| Some(ns.as_f64()? / 1e3);
    let long = us(&scale["match_128k_p50_ns"]);
    let miss = us(&scale["miss"]["index_ns"]);
    let [beside, lone] = ["reads_per_s_beside_writer", "reads_per_s_alone"].map(|reads| scale[reads].as_f64());
    let reads = beside.zip(lone).map(|(beside, lone)| beside / lone);
    let (rss, gib) = (churn["rss_ratio"].as_f64(), huge["gib_steady"].as_f64());
    let figures = [
        (
            "128,000 tokens over 1,000 workers, match p50",
            long,
            5.0,
            "us",
            false,
            "the clock",
        ),
        ("a miss", miss, 0.15, "us", false, "the clock"),
        ("reads beside a writer", reads, 0.8, "x", true, "the same readers alone"),
        ("memory after churn", rss, 1.3, "x", false, "its own at first"),
        ("100 million memberships", gib, 1.2, "GiB", false, "the kernel's count"),
    ];
    let mark =
        |(what, reached, wanted, unit, at_least, against): (&str, Option<f64>, f64, &'static str, bool, &str)| {
            Some(Mark {
                what: what.to_owned(),
                reached: reached?,
                wanted,
                unit,
                at_least,
                against: against.to_owned(),
            })
        };
    figures.into_iter().filter_map(mark).collect()
}

fn plain(name: &str, rows: &[Row], limits: &Limits, marks: &mut Vec<Mark>) {
    marks.extend(speed_up(name, rows, "cairn", limits.ingest, false));
    marks.extend(share(name, rows, "cairn", "match_p50_ns", limits.p50));
    if let Some(p99) = limits.p99 {
        marks.extend(share(name, rows, "cairn", "match_p99_ns", p99));
    }
    marks.extend(share(name, rows, "cairn", "bytes_per_membership", limits.bytes));
}

fn mirrored(name: &str, rows: &[Row], marks: &mut Vec<Mark>) {
    marks.extend(speed_up(name, rows, "cairn+mirror", 1.4, false));
    marks.extend(share(name, rows, "cairn+mirror", "bytes_per_membership", 0.9));
}

fn find<'a>(rows: &'a [Row], index: &str) -> Option<&'a Row> {
    rows.iter().find(|r| r.index == index)
}

fn speed_up(name: &str, rows: &[Row], ours: &str, wanted: f64, exact: bool) -> Option<Mark> {
    let figure = "ingest_cpu_ns_per_block";
    let (best, whose) = best_peer(rows, figure, exact)?;
    Some(Mark {
        what: format!("{name}: {ours} ingest speed"),
        reached: best / find(rows, ours)?.figure(figure)?,
        wanted,
        unit: "x",
        at_least: true,
        against: format!("{whose}{}", if exact { ", the best exact one" } else { "" }),
    })
}

fn share(name: &str, rows: &[Row], ours: &str, figure: &str, wanted: f64) -> Option<Mark> {
    let (best, whose) = best_peer(rows, figure, false)?;
    Some(Mark {
        what: format!("{name}: {ours} {figure}"),
        reached: find(rows, ours)?.figure(figure)? / best,
        wanted,
        unit: "x",
        at_least: false,
        against: whose.into(),
    })
}

fn cost_of_holes(name: &str, rows: &[Row], measured: &[(Workload, Vec<Row>)]) -> Option<Mark> {
    let figure = "ingest_cpu_ns_per_block";
    let (_, whole) = measured
        .iter()
        .find(|(w, _)| w.name == "conversation-16" && w.caches.workers == 64 && w.caches.holes == 0.0)?;
    Some(Mark {
        what: format!("{name}: cairn ingest with holes"),
        reached: find(rows, "cairn")?.figure(figure)? / find(whole, "cairn")?.figure(figure)?,
        wanted: 1.5,
        unit: "x",
        at_least: false,
        against: "its own without".into(),
    })
}
