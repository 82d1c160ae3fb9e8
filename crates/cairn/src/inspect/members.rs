//! `cairn members`: which nodes replicate the index.

use anyhow::{Context, bail};
use cairn_proto::v1::{AddMemberRequest, MembersReply, MembersRequest, RemoveMemberRequest, ReplaceMemberRequest};
use clap::{Args, Subcommand};
use serde_json::json;

use super::{IndexAccess, status};
use crate::output;

/// Arguments of `cairn members`.
#[derive(Args, Debug)]
pub struct MembersArgs {
    #[command(subcommand)]
    change: Option<Change>,
    #[command(flatten)]
    access: IndexAccess,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand, Clone, Debug)]
enum Change {
    /// A node that was started with `join = true` becomes a voter.
    Add {
        /// Its node id.
        id: u64,
        /// Its advertised address.
        address: String,
    },
    /// A node leaves; a majority of those left must be alive.
    Remove {
        /// Its node id.
        id: u64,
    },
    /// A new node takes the place of an old one, in one step.
    Replace {
        /// The node that leaves.
        old_id: u64,
        /// The node that comes.
        new_id: u64,
        /// Its advertised address.
        new_address: String,
    },
    /// Makes a stopped node the only member, with all that it has: for a majority that is lost for good.
    RecoverAlone {
        /// The node's configuration file.
        #[arg(long, value_name = "FILE")]
        config: std::path::PathBuf,
    },
}

/// Asks and prints.
pub fn run(args: MembersArgs) -> anyhow::Result<()> {
    if let Some(Change::RecoverAlone { config }) = &args.change {
        return recover_alone(config, args.json);
    }
    if let Some(Change::Add { id, address }) = &args.change {
        refuse_taken(&args.access, *id, address)?;
    }
    let change = args.change.clone();
    let reply: MembersReply = super::block_on(args.access.ask(|mut admin| {
        let change = change.clone();
        async move {
            match change {
                None | Some(Change::RecoverAlone { .. }) => admin.members(MembersRequest {}).await,
                Some(Change::Add { id, address }) => admin.add_member(AddMemberRequest { id, address }).await,
                Some(Change::Remove { id }) => admin.remove_member(RemoveMemberRequest { id }).await,
                Some(Change::Replace {
                    old_id,
                    new_id,
                    new_address,
                }) => {
                    admin
                        .replace_member(ReplaceMemberRequest {
                            old_id,
                            new_id,
                            new_address,
                        })
                        .await
                }
            }
        }
    }))?;
    if args.json {
        output::line(serde_json::to_string(&status::members_json(&reply.members))?);
    } else {
        status::print_members(&reply.members);
    }
    Ok(())
}

/// An id names one node for ever, so another one can't be added under it; the same one can be asked for again.
fn refuse_taken(access: &IndexAccess, id: u64, address: &str) -> anyhow::Result<()> {
    let bare = |address: &str| {
        let (_, bare) = address.split_once("://").unwrap_or(("", address));
        bare.trim_end_matches('/').to_owned()
    };
    let now: MembersReply =
        super::block_on(access.ask(|mut admin| async move { admin.members(MembersRequest {}).await }))?;
    if let Some(member) = now
        .members
        .iter()
        .find(|member| member.id == id && bare(&member.address) != bare(address))
    {
        bail!(
            "node {id} is a member already, at {}; give the new node an id that was never used",
            member.address
        );
    }
    Ok(())
}

fn recover_alone(path: &std::path::Path, as_json: bool) -> anyhow::Result<()> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("reading the configuration {}", path.display()))?;
    let config: cairn_index_node::Config =
        toml::from_str(&text).with_context(|| format!("the configuration {} is not valid", path.display()))?;
    let node = config.node_id;
    super::block_on(async { Ok(cairn_index_node::recover(config).await?) })?;
    if as_json {
        output::line(json!({"recovered": true, "node": node}).to_string());
        return Ok(());
    }
    output::line("the node is the only member now: start it, then add empty nodes with `cairn members add`");
    Ok(())
}
