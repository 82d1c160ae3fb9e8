//! `cairn members`: which nodes replicate the index.

use anyhow::Context;
use cairn_proto::v1::{AddMemberRequest, MembersReply, MembersRequest, RemoveMemberRequest, ReplaceMemberRequest};
use clap::{Args, Subcommand};

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
        return recover_alone(config);
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

fn recover_alone(path: &std::path::Path) -> anyhow::Result<()> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("reading the configuration {}", path.display()))?;
    let config: cairn_index_node::Config =
        toml::from_str(&text).with_context(|| format!("the configuration {} is not valid", path.display()))?;
    super::block_on(async { Ok(cairn_index_node::recover(config).await?) })?;
    output::line("the node is the only member now: start it, then add empty nodes with `cairn members add`");
    Ok(())
}
