//! `cairn drain`: an engine gets no new requests, its running ones finish.

use cairn_proto::v1::DrainRequest;
use clap::Args;
use serde_json::json;

use super::IndexAccess;
use crate::output;

/// Arguments of `cairn drain`.
#[derive(Args, Debug)]
pub struct DrainArgs {
    /// The engine's base URL as `cairn status` shows it.
    engine: String,
    /// Only this data-parallel rank; without it, all.
    #[arg(long)]
    rank: Option<u32>,
    /// Let it take requests again.
    #[arg(long)]
    undo: bool,
    #[command(flatten)]
    access: IndexAccess,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Asks and prints.
pub fn run(args: DrainArgs) -> anyhow::Result<()> {
    let request = DrainRequest {
        engine_url: args.engine.trim_end_matches('/').to_owned(),
        rank: args.rank.unwrap_or_default(),
        all_ranks: args.rank.is_none(),
        undo: args.undo,
    };
    let reply = super::block_on(args.access.ask(|mut admin| {
        let request = request.clone();
        async move { admin.drain(request).await }
    }))?;
    if args.json {
        output::line(json!({"workers": reply.workers, "draining": !args.undo}).to_string());
    } else {
        let verb = if args.undo {
            "takes new requests again"
        } else {
            "takes no new requests"
        };
        for worker in reply.workers {
            output::line(format!("worker {worker} {verb}"));
        }
    }
    Ok(())
}
