//! `cairn policy`: which policy a pool's requests are routed by.

use cairn_proto::v1::SetPolicyRequest;
use clap::Args;
use serde_json::json;

use super::IndexAccess;
use crate::output;

/// Arguments of `cairn policy`.
#[derive(Args, Debug)]
pub struct PolicyArgs {
    /// The pool's name.
    pool: String,
    #[arg(help = policy_help())]
    policy: String,
    #[command(flatten)]
    access: IndexAccess,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn policy_help() -> String {
    format!(
        "The policy: {}; or `default` for the routers' own",
        cairn_routing::PolicyConfig::NAMES.join(", ")
    )
}

/// Asks and prints.
pub fn run(args: PolicyArgs) -> anyhow::Result<()> {
    let policy = if args.policy == "default" {
        String::new()
    } else {
        cairn_routing::PolicyConfig::by_name(&args.policy)?.name().to_owned()
    };
    let request = SetPolicyRequest {
        pool: args.pool.clone(),
        policy,
    };
    super::block_on(args.access.ask(|mut admin| {
        let request = request.clone();
        async move { admin.set_policy(request).await }
    }))?;
    if args.json {
        output::line(json!({"pool": args.pool, "policy": args.policy}).to_string());
    } else {
        output::line(format!("pool {} is routed by {}", args.pool, args.policy));
    }
    Ok(())
}
