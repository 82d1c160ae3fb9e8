//! One row for each router: rounds in which the direct connection and every router take turns, so that a slow moment of the
//! machine meets all of them; figures are medians over the rounds.

use std::time::Duration;

use anyhow::bail;
use serde_json::{Value, json};

use super::calibration::Calibration;
use super::load::{self, Outcome, Shape};
use super::target::Target;
use super::{Field, cpu, prompts, round1};
use crate::output;

/// Rounds of each row.
const ROUNDS: usize = 5;

/// What a router did in all rounds.
#[derive(Default)]
struct Taken {
    all: Outcome,
    p50_us: Vec<f64>,
    cpu_us_per_request: Vec<f64>,
    cpu_us_per_chunk: Vec<f64>,
    requests_per_s: Vec<f64>,
}

impl Taken {
    fn add(&mut self, round: Outcome, cpu: Duration) {
        let (cpu_us, requests) = (cpu.as_secs_f64() * 1e6, round.requests() as f64);
        if requests > 0.0 {
            self.p50_us.push(round.percentile(0.5));
            self.cpu_us_per_request.push(cpu_us / requests);
            self.cpu_us_per_chunk.push(cpu_us / round.chunks.max(1) as f64);
            self.requests_per_s.push(requests / round.wall.as_secs_f64());
        }
        self.all.merge(round);
    }
}

/// Measures `shape` through every router of `field`, `requests` each.
pub async fn measure(
    field: &Field,
    shape: Shape,
    requests: usize,
    gap_ms: u64,
    clock: &mut Calibration,
) -> anyhow::Result<Vec<Value>> {
    let seed = shape.bytes as u64 * 64 + shape.connections as u64 * 2 + u64::from(shape.stream);
    let engine = &field.engines.urls[0];
    // Connections, tokenizer caches and the peers' trees are warm before anything counts.
    for target in &field.targets {
        load::run(&target.url, shape, prompts::SYSTEM_MESSAGES * 2, seed ^ 0xdead).await?;
    }
    load::run(engine, shape, 32, seed ^ 0xbeef).await?;
    let each = (requests / ROUNDS).max(1);
    let mut direct = Taken::default();
    let mut routed: Vec<Taken> = field.targets.iter().map(|_| Taken::default()).collect();
    for round in 0..ROUNDS {
        clock.take();
        let seed = seed + 10_000 * round as u64;
        direct.add(load::run(engine, shape, each, seed).await?, Duration::ZERO);
        // No router is always the first after the direct connection.
        for step in 0..field.targets.len() {
            let at = (step + round) % field.targets.len();
            let target = &field.targets[at];
            let before = cpu::of_process(target.pid)?;
            let outcome = load::run(&target.url, shape, each, seed + 5_000).await?;
            routed[at].add(outcome, cpu::of_process(target.pid)?.saturating_sub(before));
        }
    }
    field
        .targets
        .iter()
        .zip(routed)
        .map(|(target, taken)| row(target, shape, gap_ms, &direct, taken))
        .collect()
}

fn row(target: &Target, shape: Shape, gap_ms: u64, direct: &Taken, routed: Taken) -> anyhow::Result<Value> {
    if routed.all.requests() == 0 {
        bail!("{} answered no request of {shape:?}", target.name);
    }
    let (direct_p50, routed_p50) = (median(direct.p50_us.clone()), median(routed.p50_us));
    let added_p50 = round1(routed_p50 - direct_p50);
    let cpu = round1(median(routed.cpu_us_per_request));
    let per_chunk = (shape.stream && gap_ms > 0).then(|| round1(median(routed.cpu_us_per_chunk)));
    output::note(format!(
        "{} {} B stream={} x{} {}: added p50 {added_p50} us, cpu {cpu} us",
        target.name,
        shape.bytes,
        shape.stream,
        shape.connections,
        shape.sharing.name(),
    ));
    Ok(json!({
        "router": target.name, "bytes": shape.bytes, "stream": shape.stream, "connections": shape.connections,
        "prompts": shape.sharing.name(), "chunk_gap_ms": gap_ms,
        "direct_p50_us": round1(direct_p50), "router_p50_us": round1(routed_p50), "added_p50_us": added_p50,
        "added_p99_us": round1(routed.all.percentile(0.99) - direct.all.percentile(0.99)),
        "cpu_us_per_request": cpu, "cpu_us_per_chunk": per_chunk,
        "requests_per_s": round1(median(routed.requests_per_s)),
        "requests": routed.all.requests(), "errors": routed.all.errors + direct.all.errors,
    }))
}

/// The middle value; of an even number, the upper of the two.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
