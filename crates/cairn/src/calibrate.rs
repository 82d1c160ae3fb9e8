//! `cairn calibrate`: measures a live engine and fits the replay's default engine model to it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use cairn_replay::engine_model::Timing;
use cairn_replay::{Sample, fit};
use clap::Args;
use futures::future::try_join_all;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

use crate::inspect::{ask_http, block_on};
use crate::output;

/// Prompt lengths whose prefill is timed; all fit into one step of an engine with its usual budget.
const LENGTHS: [u32; 5] = [128, 512, 1_024, 2_048, 4_096];
/// Answers at once, and the prompt length of each.
const BATCHES: [(u32, u32); 5] = [(1, 64), (1, 2_048), (4, 64), (8, 64), (8, 1_024)];
/// Tokens of each of those answers: the first and last few don't count, since not all run then.
const ANSWER_TOKENS: u32 = 48;
/// Tokens that don't count at each end.
const EDGE: usize = 8;
/// Token ids that every vocabulary has and that stand for ordinary text.
const TOKEN_IDS: std::ops::Range<u32> = 300..4_000;
/// Longest wait for one answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

/// Arguments of `cairn calibrate`.
#[derive(Args, Debug)]
pub struct CalibrateArgs {
    /// The engine, which should have nothing else to do.
    #[arg(long, value_name = "URL")]
    engine: String,
    /// Model to ask for; the first that the engine lists where not given.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Longest prompt, for engines that take less than 4,096 tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = 4_096, value_parser = clap::value_parser!(u32).range(512..))]
    longest: u32,
    /// How often each length and each batch is measured.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeat: u32,
    /// Where the costs go, for `cairn replay --timing`.
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Measures, fits and prints.
pub fn run(args: CalibrateArgs) -> anyhow::Result<()> {
    let samples = block_on(measure(&args))?;
    let fitted = fit(&samples, Timing::llama_70b_8gpu())?;
    if let Some(file) = &args.write {
        std::fs::write(file, serde_json::to_string_pretty(&fitted.timing)?)
            .with_context(|| format!("writing {}", file.display()))?;
    }
    if args.json {
        output::line(serde_json::to_string(&fitted)?);
        return Ok(());
    }
    let mut rows = vec![vec!["cost".to_owned(), "seconds".to_owned()]];
    for (name, value) in serde_json::to_value(fitted.timing)?.as_object().into_iter().flatten() {
        let measured = ["host_load", "transfer", "shared_load"]
            .iter()
            .all(|other| !name.starts_with(other));
        if measured {
            rows.push(vec![name.clone(), format!("{:.3e}", value.as_f64().unwrap_or(0.0))]);
        }
    }
    rows.push(vec!["each request besides".into(), format!("{:.3e}", fitted.door_s)]);
    output::table(&rows);
    output::line(format!(
        "{} samples, half of them within {:.1} % of this; loads from other memory and transfers weren't measured",
        fitted.samples,
        fitted.off_median * 100.0
    ));
    Ok(())
}

struct Engine {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
    model: String,
    /// State of the prompts' chance: no two share a start, also not with those of an earlier run.
    state: std::cell::Cell<u64>,
}

async fn measure(args: &CalibrateArgs) -> anyhow::Result<Vec<Sample>> {
    let url = args.engine.trim_end_matches('/');
    if !url.starts_with("http://") {
        bail!("--engine is {:?}; give http://host:port", args.engine);
    }
    let model = match &args.model {
        Some(model) => model.clone(),
        None => {
            let list = ask_http::json(Method::GET, &format!("{url}/v1/models"), None, Bytes::new()).await?;
            let first = list.pointer("/data/0/id").and_then(Value::as_str);
            first
                .context("the engine lists no model; name one with --model")?
                .to_owned()
        }
    };
    let started = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let engine = Engine {
        client: Client::builder(TokioExecutor::new()).build(connector),
        url: format!("{url}/v1/completions"),
        model,
        state: std::cell::Cell::new(started.map_or(1, |span| span.as_nanos() as u64) | 1),
    };
    // The first answers of a process pay for what it sets up.
    for _ in 0..2 {
        engine.answer(64, 2).await?;
    }
    let mut samples = Vec::new();
    for _ in 0..args.repeat {
        for tokens in LENGTHS.into_iter().filter(|tokens| *tokens <= args.longest) {
            let seconds = engine.answer(tokens, 1).await?.first().copied().unwrap_or(0.0);
            samples.push(Sample::Prefill { tokens, seconds });
        }
        for (sequences, tokens) in BATCHES.into_iter().filter(|(_, tokens)| *tokens <= args.longest) {
            let answers = (0..sequences).map(|_| engine.answer(tokens, ANSWER_TOKENS));
            let seconds = between(&try_join_all(answers).await?)?;
            let context = u64::from(sequences) * u64::from(tokens + ANSWER_TOKENS / 2);
            samples.push(Sample::Decode {
                sequences,
                context,
                seconds,
            });
        }
    }
    Ok(samples)
}

/// The median time between two tokens while all answers ran.
fn between(answers: &[Vec<f64>]) -> anyhow::Result<f64> {
    let began = answers
        .iter()
        .filter_map(|times| times.get(EDGE))
        .copied()
        .fold(0.0, f64::max);
    let ended = answers
        .iter()
        .map(|times| times.get(times.len().saturating_sub(EDGE)).copied().unwrap_or(0.0));
    let ended = ended.fold(f64::INFINITY, f64::min);
    let mut gaps: Vec<f64> = answers
        .iter()
        .flat_map(|times| {
            times
                .windows(2)
                .filter(|pair| pair[0] >= began && pair[1] <= ended)
                .map(|pair| pair[1] - pair[0])
        })
        .filter(|gap| *gap > 0.0)
        .collect();
    gaps.sort_by(f64::total_cmp);
    let median = gaps.get(gaps.len() / 2).copied();
    median
        .context("the engine's answers were too short to see it decode; does it take ignore_eos and token-id prompts?")
}

impl Engine {
    fn prompt(&self, tokens: u32) -> Vec<u32> {
        let width = TOKEN_IDS.end - TOKEN_IDS.start;
        (0..tokens)
            .map(|_| {
                let state = self
                    .state
                    .get()
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                self.state.set(state);
                TOKEN_IDS.start + (state >> 33) as u32 % width
            })
            .collect()
    }

    /// Seconds from sending a fresh prompt to each token of its answer.
    async fn answer(&self, prompt_tokens: u32, answer_tokens: u32) -> anyhow::Result<Vec<f64>> {
        let body = json!({
            "model": self.model, "prompt": self.prompt(prompt_tokens), "max_tokens": answer_tokens, "min_tokens": answer_tokens,
            "ignore_eos": true, "temperature": 0, "stream": true,
        });
        let request = Request::builder()
            .method(Method::POST)
            .uri(&self.url)
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .with_context(|| format!("`{}` is not a URL; use http://host:port", self.url))?;
        let read = async {
            let sent = Instant::now();
            let response = self
                .client
                .request(request)
                .await
                .with_context(|| format!("asking {}", self.url))?;
            let status = response.status();
            let mut body = response.into_body();
            let (mut times, mut text, mut read) = (Vec::new(), Vec::new(), 0);
            while let Some(frame) = body.frame().await {
                let Ok(data) = frame
                    .with_context(|| format!("reading the answer of {}", self.url))?
                    .into_data()
                else {
                    continue;
                };
                text.extend_from_slice(&data);
                let at = sent.elapsed().as_secs_f64();
                while let Some(end) = text[read..].iter().position(|byte| *byte == b'\n') {
                    if text[read..read + end].starts_with(b"data: {") {
                        times.push(at);
                    }
                    read += end + 1;
                }
            }
            if status != StatusCode::OK {
                bail!(
                    "{} answered {status}: {}",
                    self.url,
                    String::from_utf8_lossy(&text).trim()
                );
            }
            // The end of an answer may come as a chunk of its own.
            times.truncate(answer_tokens as usize);
            Ok(times)
        };
        tokio::time::timeout(ANSWER_TIMEOUT, read)
            .await
            .with_context(|| format!("{} did not answer within {ANSWER_TIMEOUT:?}", self.url))?
    }
}
