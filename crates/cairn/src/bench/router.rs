//! `cairn bench router`: what a router adds to a request, beside a direct connection and beside other routers.

mod cpu;
mod holders;
mod load;
mod mock;
mod peers;
mod prompts;
mod target;

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::{Value, json};

use self::load::{Outcome, Shape};
use self::prompts::Sharing;
use self::target::Target;
use crate::output;

/// Mock engines behind each router.
const ENGINES: usize = 4;
/// Direct and routed rounds take turns, so that a slow moment of the machine meets both.
const ROUNDS: u64 = 3;
/// Time between two chunks where the CPU of one chunk is measured.
const CHUNK_GAP: Duration = Duration::from_millis(3);

/// Arguments of `cairn bench router`.
#[derive(Args, Debug)]
pub struct RouterBenchArgs {
    /// Measure other routers beside Cairn's.
    #[arg(long)]
    peers: bool,
    /// Python environment with the peers' packages.
    #[arg(
        long,
        value_name = "DIR",
        env = "CAIRN_PEERS_DIR",
        default_value = "target/peers-venv"
    )]
    peers_dir: PathBuf,
    /// Fewer requests: enough to see that it works, too few to quote.
    #[arg(long)]
    quick: bool,
    /// Measure only this kind of request, such as `32768:whole:1`: bytes, `whole`, `stream` or `paced` (the chunks' row),
    /// connections.
    #[arg(long, value_name = "BYTES:KIND:CONNECTIONS", value_parser = only)]
    only: Option<Only>,
    /// Requests for each row, instead of the built-in numbers.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(3..=1_000_000))]
    requests: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Only {
    Instant {
        bytes: usize,
        stream: bool,
        connections: usize,
    },
    Paced,
}

impl RouterBenchArgs {
    fn wants(&self, shape: Shape) -> bool {
        let (bytes, stream, connections) = (shape.bytes, shape.stream, shape.connections);
        let kind = Only::Instant {
            bytes,
            stream,
            connections,
        };
        match self.only {
            None => true,
            Some(only) => only == kind && !matches!(shape.sharing, Sharing::Unique),
        }
    }

    fn wants_paced(&self) -> bool {
        self.only.is_none_or(|only| only == Only::Paced)
    }

    fn requests(&self, quick: usize, full: usize) -> usize {
        match self.requests {
            Some(requests) => requests as usize,
            None if self.quick => quick,
            None => full,
        }
    }
}

fn only(text: &str) -> Result<Only, String> {
    let wrong = || {
        format!(
            "`{text}` is no kind of request; give 2048 or 32768, whole or stream, and 1 or 32, such as 32768:whole:1, or \
             2048:paced:32"
        )
    };
    let [bytes, kind, connections] = text.split(':').collect::<Vec<_>>()[..] else {
        return Err(wrong());
    };
    match (bytes.parse(), kind, connections.parse()) {
        (Ok(2048), "paced", Ok(32)) => Ok(Only::Paced),
        (Ok(bytes @ (2048 | 32_768)), "whole" | "stream", Ok(connections @ (1 | 32))) => Ok(Only::Instant {
            bytes,
            stream: kind == "stream",
            connections,
        }),
        _ => Err(wrong()),
    }
}

/// Measures and prints.
pub fn run(args: RouterBenchArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let report = runtime.block_on(measure(&args))?;
    if args.json {
        output::line(serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    Ok(())
}

async fn measure(args: &RouterBenchArgs) -> anyhow::Result<Value> {
    let instant = mock::Mocks::start(ENGINES, Duration::ZERO)?;
    let paced = mock::Mocks::start(ENGINES, CHUNK_GAP)?;
    let mut runs = Vec::new();
    let mut extra = serde_json::Map::new();
    {
        let cairn = Target::cairn(&instant.urls).await?;
        extra.insert(
            "idle_cpu_ms_per_s".into(),
            json!(idle(cairn.pid, if args.quick { 1 } else { 5 }).await?),
        );
        rows(args, &cairn, &instant.urls, &mut runs).await?;
    }
    if args.wants_paced() {
        chunk_row(args, &Target::cairn(&paced.urls).await?, &paced.urls, &mut runs).await?;
    }
    if args.peers {
        for peer in peers::PEERS {
            rows(
                args,
                &Target::peer(peer, &args.peers_dir, &instant.urls).await?,
                &instant.urls,
                &mut runs,
            )
            .await?;
            if args.wants_paced() {
                let paced_peer = Target::peer(peer, &args.peers_dir, &paced.urls).await?;
                chunk_row(args, &paced_peer, &paced.urls, &mut runs).await?;
            }
        }
    }
    extra.insert("tokenised_mb_per_s".into(), json!(holders::tokenised_mb_per_s()?));
    extra.insert("calibration_ms".into(), json!(calibration_ms()));
    extra.insert("runs".into(), Value::Array(runs));
    Ok(Value::Object(extra))
}

/// The rows of instant engines: sizes, whole and streamed, one and many connections, and prompts never seen.
async fn rows(
    args: &RouterBenchArgs,
    target: &Target,
    engines: &[String],
    runs: &mut Vec<Value>,
) -> anyhow::Result<()> {
    for bytes in [2048, 32_768] {
        for (stream, connections, sharing) in [
            (false, 1, Sharing::Shared),
            (true, 1, Sharing::Shared),
            (false, 32, Sharing::Shared),
            (true, 32, Sharing::Shared),
            (false, 1, Sharing::Unique),
        ] {
            let shape = Shape {
                bytes,
                stream,
                connections,
                sharing,
            };
            if !args.wants(shape) {
                continue;
            }
            let requests = args.requests(60, if bytes == 2048 { 1500 } else { 600 });
            runs.push(row(target, engines, shape, requests, 0).await?);
            progress(runs.last());
        }
    }
    Ok(())
}

/// Streams with a pause between chunks: what one chunk costs when it can't be merged with the next.
async fn chunk_row(
    args: &RouterBenchArgs,
    target: &Target,
    engines: &[String],
    runs: &mut Vec<Value>,
) -> anyhow::Result<()> {
    let shape = Shape {
        bytes: 2048,
        stream: true,
        connections: 32,
        sharing: Sharing::Shared,
    };
    let requests = args.requests(64, 960);
    runs.push(row(target, engines, shape, requests, CHUNK_GAP.as_millis() as u64).await?);
    progress(runs.last());
    Ok(())
}

async fn row(target: &Target, engines: &[String], shape: Shape, requests: usize, gap_ms: u64) -> anyhow::Result<Value> {
    let seed = shape.bytes as u64 * 64 + shape.connections as u64 * 2 + u64::from(shape.stream);
    // Connections, tokenizer caches and the peers' trees are warm before anything counts.
    load::run(&target.url, shape, prompts::SYSTEM_MESSAGES * 2, seed ^ 0xdead).await?;
    load::run(&engines[0], shape, 32, seed ^ 0xbeef).await?;
    let (mut direct, mut routed, mut spent) = (Outcome::default(), Outcome::default(), Duration::ZERO);
    for round in 0..ROUNDS {
        let each = requests / ROUNDS as usize;
        direct.merge(load::run(&engines[0], shape, each, seed + 10_000 * round).await?);
        let before = cpu::of_process(target.pid)?;
        routed.merge(load::run(&target.url, shape, each, seed + 10_000 * round + 5_000).await?);
        spent += cpu::of_process(target.pid)?.saturating_sub(before);
    }
    if routed.requests() == 0 {
        bail!("{} answered no request of {shape:?}", target.name);
    }
    let cpu_us = spent.as_secs_f64() * 1e6;
    let per_request = cpu_us / routed.requests() as f64;
    let per_chunk = if shape.stream && gap_ms > 0 {
        Some(cpu_us / routed.chunks.max(1) as f64)
    } else {
        None
    };
    Ok(json!({
        "router": target.name, "bytes": shape.bytes, "stream": shape.stream, "connections": shape.connections,
        "prompts": shape.sharing.name(), "chunk_gap_ms": gap_ms,
        "direct_p50_us": round1(direct.percentile(0.5)), "router_p50_us": round1(routed.percentile(0.5)),
        "added_p50_us": round1(routed.percentile(0.5) - direct.percentile(0.5)),
        "added_p99_us": round1(routed.percentile(0.99) - direct.percentile(0.99)),
        "cpu_us_per_request": round1(per_request), "cpu_us_per_chunk": per_chunk.map(round1),
        "requests_per_s": round1(routed.requests() as f64 / routed.wall.as_secs_f64()),
        "requests": routed.requests(), "errors": routed.errors + direct.errors,
    }))
}

async fn idle(pid: u32, seconds: u64) -> anyhow::Result<f64> {
    let before = cpu::of_process(pid)?;
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let spent = cpu::of_process(pid)?.saturating_sub(before);
    Ok(round1(spent.as_secs_f64() * 1e3 / seconds as f64))
}

/// A fixed piece of work, so that runs of one machine can be told from runs of a busy one.
fn calibration_ms() -> f64 {
    let begun = Instant::now();
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for i in 0..50_000_000u64 {
        x = (x ^ i).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(17);
    }
    std::hint::black_box(x);
    round1(begun.elapsed().as_secs_f64() * 1e3)
}

fn round1(x: f64) -> f64 {
    (x * 10.0).round() / 10.0
}

fn progress(row: Option<&Value>) {
    if let Some(row) = row {
        output::note(format!(
            "{} {} B stream={} x{} {}: added p50 {} us, cpu {} us",
            row["router"],
            row["bytes"],
            row["stream"],
            row["connections"],
            row["prompts"],
            row["added_p50_us"],
            row["cpu_us_per_request"]
        ));
    }
}

/// A port that was free a moment ago.
fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .context("looking for a free port")?
        .local_addr()?
        .port())
}

/// Waits until `url` answers a completion.
async fn wait_for_answer(url: &str, within: Duration) -> anyhow::Result<()> {
    let shape = Shape {
        bytes: 2048,
        stream: false,
        connections: 1,
        sharing: Sharing::Shared,
    };
    let deadline = Instant::now() + within;
    loop {
        match load::run(url, shape, 1, 1).await {
            Ok(outcome) if outcome.errors == 0 => return Ok(()),
            Ok(_) | Err(_) if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(100)).await,
            Ok(_) => bail!("{url} answers with errors"),
            Err(error) => return Err(error),
        }
    }
}

fn print(report: &Value) {
    let columns = [
        "router",
        "bytes",
        "stream",
        "connections",
        "prompts",
        "direct_p50_us",
        "router_p50_us",
        "added_p50_us",
        "added_p99_us",
        "cpu_us_per_request",
        "cpu_us_per_chunk",
        "requests_per_s",
        "errors",
    ];
    let mut rows = vec![columns.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>()];
    for run in report["runs"].as_array().into_iter().flatten() {
        rows.push(
            columns
                .iter()
                .map(|c| run[*c].to_string().trim_matches('"').to_owned())
                .collect(),
        );
    }
    output::table(&rows);
    output::line(format!(
        "idle router: {} ms CPU a second; tokenised: {} MB/s; calibration loop: {} ms",
        report["idle_cpu_ms_per_s"], report["tokenised_mb_per_s"], report["calibration_ms"]
    ));
}
