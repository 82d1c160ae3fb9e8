//! `cairn members`: which nodes replicate the index.

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
}

/// Asks and prints.
pub fn run(args: MembersArgs) -> anyhow::Result<()> {
    let change = args.change.clone();
    let reply: MembersReply = super::block_on(args.access.ask(|mut admin| {
        let change = change.clone();
        async move {
            match change {
                None => admin.members(MembersRequest {}).await,
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
