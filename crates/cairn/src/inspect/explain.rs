//! `cairn explain`: why this worker, and why zero.

use std::path::PathBuf;

use anyhow::{Context, bail};
use bytes::Bytes;
use clap::Args;
use http::Method;
use serde_json::Value;

use super::ask_http;
use crate::output;

/// Arguments of `cairn explain`.
#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// The router's base URL.
    #[arg(
        long,
        value_name = "URL",
        default_value = "http://127.0.0.1:8080",
        env = "CAIRN_ROUTER"
    )]
    router: String,
    /// File with a request body (`-` for standard input): say where it would go, without sending it.
    #[arg(long, value_name = "FILE", required_unless_present_any = ["request", "last"], conflicts_with_all = ["request", "last"])]
    body: Option<PathBuf>,
    /// Id of a past request (its `x-request-id` or trace id): say where it went.
    #[arg(long, value_name = "ID", conflicts_with = "last")]
    request: Option<String>,
    /// Say where the last request went.
    #[arg(long)]
    last: bool,
    /// Policy to decide by instead of the pool's own.
    #[arg(long, requires = "body")]
    policy: Option<String>,
    /// Show the token ids that the router makes of it, a list for each prompt.
    #[arg(long, requires = "body")]
    token_ids: bool,
    /// File with the router's operator token.
    #[arg(long, value_name = "FILE", env = "CAIRN_OPERATOR_TOKEN_FILE")]
    token: Option<PathBuf>,
    /// File with the CA certificate that an https router's certificate is signed by (PEM).
    #[arg(long, value_name = "FILE", env = "CAIRN_TLS_CA_FILE")]
    tls_ca: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Asks and prints.
pub fn run(args: ExplainArgs) -> anyhow::Result<()> {
    let token = match &args.token {
        Some(file) => {
            Some(std::fs::read_to_string(file).with_context(|| format!("reading the token {}", file.display()))?)
        }
        None => None,
    };
    let token = token.as_deref().map(str::trim);
    let tls_ca = args.tls_ca.as_deref();
    let router = args.router.trim_end_matches('/');
    let decision = match (&args.body, &args.request) {
        (Some(file), _) => {
            let body = read_body(file)?;
            let policy = args.policy.as_ref().map(|name| format!("policy={name}"));
            let token_ids = args.token_ids.then(|| "token_ids=true".to_owned());
            let query: Vec<String> = policy.into_iter().chain(token_ids).collect();
            super::block_on(ask_http::json_from(
                Method::POST,
                &format!("{router}/cairn/explain?{}", query.join("&")),
                token,
                tls_ca,
                body,
            ))?
        }
        (None, request) => {
            let query = request.as_ref().map(|id| format!("&id={id}")).unwrap_or_default();
            let url = format!("{router}/cairn/decisions?limit=1{query}");
            let found = super::block_on(ask_http::json_from(Method::GET, &url, token, tls_ca, Bytes::new()))?;
            let list = found
                .get("decisions")
                .and_then(Value::as_array)
                .cloned()
                .unwrap_or_default();
            match list.into_iter().next() {
                Some(decision) => decision,
                None => {
                    bail!("{router} remembers no such decision; it keeps the latest ones only, and each router its own")
                }
            }
        }
    };
    if args.json {
        output::line(serde_json::to_string(&decision)?);
    } else {
        print(&decision);
    }
    Ok(())
}

fn read_body(file: &PathBuf) -> anyhow::Result<Bytes> {
    if file.as_os_str() == "-" {
        let mut body = Vec::new();
        std::io::Read::read_to_end(&mut std::io::stdin().lock(), &mut body)
            .context("reading the body from standard input")?;
        return Ok(body.into());
    }
    Ok(std::fs::read(file)
        .with_context(|| format!("reading the body {}", file.display()))?
        .into())
}

fn print(decision: &Value) {
    let text = |key: &str| decision.get(key).map(plain).unwrap_or_default();
    output::line(format!(
        "pool {}, {} prompt tokens, policy {}",
        text("pool"),
        text("tokens"),
        text("policy")
    ));
    output::line(format!("chosen: worker {}: {}", text("chosen"), text("reason")));
    if let Some(prompts) = decision.get("token_ids").and_then(Value::as_array) {
        for ids in prompts {
            output::line(format!("token ids: {ids}"));
        }
    }
    output::line("");
    let columns = [
        ("worker", "WORKER"),
        ("gpu_tokens", "GPU"),
        ("cpu_tokens", "CPU"),
        ("shared_tokens", "SHARED"),
        ("queue_ms", "QUEUE ms"),
        ("prefill_ms", "PREFILL ms"),
        ("fetch_ms", "FETCH ms"),
        ("transfer_ms", "TRANSFER ms"),
        ("others_ms", "OTHERS ms"),
        ("paid_ms", "PAID ms"),
        ("cost_ms", "COST ms"),
        ("why_not", "WHY NOT"),
        ("why_zero", "WHY ZERO"),
    ];
    let candidates = decision
        .get("candidates")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let mut rows = vec![columns.iter().map(|(_, head)| (*head).to_owned()).collect::<Vec<_>>()];
    rows.extend(candidates.iter().map(|c| {
        columns
            .iter()
            .map(|(key, _)| c.get(*key).map(plain).unwrap_or_default())
            .collect()
    }));
    output::table(&rows);
    for advice in advice(&candidates) {
        output::line(format!("why zero: {advice}"));
    }
}

/// What is said of candidates without credit, each once.
fn advice(candidates: &[Value]) -> Vec<String> {
    let mut said: Vec<String> = Vec::new();
    for reason in candidates
        .iter()
        .filter_map(|c| c.get("why_zero").and_then(Value::as_array))
        .flatten()
    {
        let (why, advice) = (reason.get("why").map(plain), reason.get("advice").map(plain));
        let text = format!("{}: {}", why.unwrap_or_default(), advice.unwrap_or_default());
        if !said.contains(&text) {
            said.push(text);
        }
    }
    said
}

fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(reasons) => {
            let named: Vec<&str> = reasons
                .iter()
                .filter_map(|r| r.get("why").and_then(Value::as_str))
                .collect();
            named.join(", ")
        }
        Value::Number(n) if n.is_f64() => format!("{:.2}", n.as_f64().unwrap_or_default()),
        other => other.to_string(),
    }
}
