//! `cairn bench router`: what a router adds to a request, beside a direct connection and beside other routers.

mod calibration;
mod cpu;
mod holders;
mod load;
mod mock;
mod peers;
mod prompts;
pub mod relay;
mod rows;
mod target;

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::{Value, json};

use self::calibration::Calibration;
use self::load::Shape;
use self::prompts::Sharing;
use self::target::Target;
use crate::output;

/// Mock engines behind each router.
const ENGINES: usize = 4;
/// Time between two chunks where the CPU of one chunk is measured.
const CHUNK_GAP: Duration = Duration::from_millis(3);

/// Arguments of `cairn bench router`.
#[derive(Args, Debug)]
pub struct RouterBenchArgs {
    /// Measure other routers beside Cairn's, and a bare TCP relay, which does nothing but read and write.
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
    /// How the peers choose, such as `round_robin`; the name as they take it.
    #[arg(long, value_name = "NAME", default_value = "cache_aware")]
    peers_policy: String,
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
    let mut clock = Calibration::default();
    let mut runs = Vec::new();
    let mut extra = serde_json::Map::new();
    let mut field = Field::start(args, Duration::ZERO).await?;
    let seconds = if args.quick { 1 } else { 5 };
    extra.insert(
        "idle_cpu_ms_per_s".into(),
        json!(idle(field.targets[0].pid, seconds).await?),
    );
    for (shape, requests) in instant_rows(args) {
        runs.extend(rows::measure(&field, shape, requests, 0, &mut clock).await?);
    }
    if args.wants_paced() {
        // One set of routers at a time: idle ones take CPU too.
        drop(field);
        field = Field::start(args, CHUNK_GAP).await?;
        let shape = Shape {
            bytes: 2048,
            stream: true,
            connections: 32,
            sharing: Sharing::Shared,
        };
        let requests = args.requests(64, 960);
        let gap_ms = CHUNK_GAP.as_millis() as u64;
        runs.extend(rows::measure(&field, shape, requests, gap_ms, &mut clock).await?);
    }
    drop(field);
    extra.insert("tokenised_mb_per_s".into(), json!(holders::tokenised_mb_per_s()?));
    extra.insert("calibration_ms".into(), json!(round1(clock.median_ms())));
    extra.insert("slowdown".into(), json!(round2(clock.slowdown())));
    extra.insert("runs".into(), Value::Array(runs));
    Ok(Value::Object(extra))
}

/// Mock engines and every router under measurement in front of them.
struct Field {
    engines: mock::Mocks,
    targets: Vec<Target>,
}

impl Field {
    async fn start(args: &RouterBenchArgs, gap: Duration) -> anyhow::Result<Self> {
        let engines = mock::Mocks::start(ENGINES, gap)?;
        let mut targets = vec![Target::cairn(&engines.urls).await?];
        if args.peers {
            targets.push(Target::relay(&engines.urls).await?);
            for peer in peers::PEERS {
                targets.push(Target::peer(peer, &args.peers_dir, &args.peers_policy, &engines.urls).await?);
            }
        }
        Ok(Self { engines, targets })
    }
}

/// The rows of instant engines: sizes, whole and streamed, one and many connections, and prompts never seen.
fn instant_rows(args: &RouterBenchArgs) -> Vec<(Shape, usize)> {
    let mut rows = Vec::new();
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
            if args.wants(shape) {
                rows.push((shape, args.requests(60, if bytes == 2048 { 1500 } else { 600 })));
            }
        }
    }
    rows
}

async fn idle(pid: u32, seconds: u64) -> anyhow::Result<f64> {
    let before = cpu::of_process(pid)?;
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let spent = cpu::of_process(pid)?.saturating_sub(before);
    Ok(round1(spent.as_secs_f64() * 1e3 / seconds as f64))
}

fn round1(x: f64) -> f64 {
    (x * 10.0).round() / 10.0
}

fn round2(x: f64) -> f64 {
    (x * 100.0).round() / 100.0
}

/// A port that was free a moment ago.
pub fn free_port() -> anyhow::Result<u16> {
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
        "idle router: {} ms CPU a second; tokenised: {} MB/s; calibration loop: {} ms, {} times its fastest",
        report["idle_cpu_ms_per_s"], report["tokenised_mb_per_s"], report["calibration_ms"], report["slowdown"]
    ));
}
