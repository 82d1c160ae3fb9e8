//! One replicated command as bytes.

use std::io::{self, Read, Write};

use cairn_blocks::{ClusterSeed, Depth};

use super::registry::{confidence, put_confidence, put_spec, spec};
use super::wire::{DecodeError, In, Out};
use crate::register::NAME_BYTES_MAX;
use crate::{Batch, Command, HolderId, Incarnation, Op, Seq, SourceId, WorkerId};

/// Version of the bytes of a command.
pub const COMMAND_VERSION: u8 = 1;
/// Most batches in one command: a log entry stays below 256 KiB and a batch takes several bytes.
pub const BATCHES_MAX: usize = 65_536;
/// Most changes in one batch.
pub const OPS_PER_BATCH_MAX: usize = 65_536;
/// Most keys in one store: 16 million tokens of 16-token blocks.
pub const KEYS_PER_STORE_MAX: usize = 1 << 20;

const INIT_CLUSTER: u8 = 0;
const REGISTER: u8 = 1;
const BATCHES: u8 = 2;
const LAPSE: u8 = 3;
const RESTORE: u8 = 4;
const REMOVE: u8 = 5;
const DRAIN: u8 = 6;
const POLICY: u8 = 7;

const OP_STORE: u8 = 0;
const OP_REMOVE: u8 = 1;
const OP_CLEAR: u8 = 2;
const OP_CONFIDENCE: u8 = 3;

/// The command's bytes.
#[must_use]
pub fn encode_command(command: &Command) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_command_into(command, &mut bytes);
    bytes
}

/// Appends the command's bytes.
pub fn encode_command_into(command: &Command, bytes: &mut Vec<u8>) {
    put(&mut Out::new(bytes), command).expect("memory takes every byte");
}

fn put<W: Write>(out: &mut Out<'_, W>, command: &Command) -> io::Result<()> {
    out.byte(COMMAND_VERSION)?;
    match command {
        Command::InitCluster { cluster, seed } => {
            out.byte(INIT_CLUSTER)?;
            out.text(cluster)?;
            out.bytes(&seed.0.to_le_bytes())
        }
        Command::RegisterSource { spec, resume } => {
            out.byte(REGISTER)?;
            put_spec(out, spec)?;
            match resume {
                Some(incarnation) => {
                    out.byte(1)?;
                    out.number(incarnation.0)
                }
                None => out.byte(0),
            }
        }
        Command::Batches(batches) => {
            out.byte(BATCHES)?;
            out.number(batches.len() as u64)?;
            batches.iter().try_for_each(|b| put_batch(out, b))
        }
        Command::LapseLease { source, incarnation } => put_life(out, LAPSE, *source, *incarnation),
        Command::RestoreLease { source, incarnation } => put_life(out, RESTORE, *source, *incarnation),
        Command::RemoveSource { source, incarnation } => put_life(out, REMOVE, *source, *incarnation),
        Command::SetDraining { worker, draining } => {
            out.byte(DRAIN)?;
            out.number(worker.0)?;
            out.byte(u8::from(*draining))
        }
        Command::SetPolicy { pool, policy } => {
            out.byte(POLICY)?;
            out.text(pool)?;
            out.text(policy)
        }
    }
}

fn put_life<W: Write>(out: &mut Out<'_, W>, tag: u8, source: SourceId, incarnation: Incarnation) -> io::Result<()> {
    out.byte(tag)?;
    out.number(source.0)?;
    out.number(incarnation.0)
}

fn put_batch<W: Write>(out: &mut Out<'_, W>, batch: &Batch) -> io::Result<()> {
    out.number(batch.source.0)?;
    out.number(batch.incarnation.0)?;
    out.number(batch.seq.0)?;
    out.number(batch.ops.len() as u64)?;
    for op in &batch.ops {
        match op {
            Op::Store {
                holder,
                anchor,
                anchor_depth,
                skip,
                keys,
            } => {
                out.byte(OP_STORE)?;
                out.number(holder.0)?;
                out.key(*anchor)?;
                out.number(anchor_depth.0)?;
                out.number(*skip)?;
                out.number(keys.len() as u64)?;
                out.keys(keys)?;
            }
            Op::Remove {
                holder,
                key,
                depth,
                count,
            } => {
                out.byte(OP_REMOVE)?;
                out.number(holder.0)?;
                out.key(*key)?;
                out.number(depth.0)?;
                out.number(*count)?;
            }
            Op::Clear { holder } => {
                out.byte(OP_CLEAR)?;
                out.number(holder.0)?;
            }
            Op::Confidence(confidence) => {
                out.byte(OP_CONFIDENCE)?;
                put_confidence(out, *confidence)?;
            }
        }
    }
    Ok(())
}

/// Reads a command; all of `bytes` must belong to it.
pub fn decode_command(bytes: &[u8]) -> Result<Command, DecodeError> {
    let mut input = In::new(bytes);
    let version = input.byte("a command")?;
    if version != COMMAND_VERSION {
        return Err(DecodeError::Version {
            what: "command",
            found: u64::from(version),
            known: u64::from(COMMAND_VERSION),
        });
    }
    let command = command(&mut input)?;
    match input.into_inner().len() {
        0 => Ok(command),
        left => Err(DecodeError::Trailing(left)),
    }
}

fn command<R: Read>(input: &mut In<R>) -> Result<Command, DecodeError> {
    Ok(match input.byte("a command")? {
        INIT_CLUSTER => Command::InitCluster {
            cluster: input.text("the cluster's name", NAME_BYTES_MAX)?,
            seed: ClusterSeed(input.word("the cluster's seed")?),
        },
        REGISTER => {
            let spec = spec(input)?;
            let resume = if input.flag("a resumption")? {
                Some(Incarnation(input.number("a resumption")?))
            } else {
                None
            };
            Command::RegisterSource { spec, resume }
        }
        BATCHES => {
            let count = input.count("the number of batches", BATCHES_MAX)?;
            let mut batches = Vec::with_capacity(count.min(256));
            for _ in 0..count {
                batches.push(batch(input)?);
            }
            Command::Batches(batches)
        }
        LAPSE => {
            let (source, incarnation) = life(input)?;
            Command::LapseLease { source, incarnation }
        }
        RESTORE => {
            let (source, incarnation) = life(input)?;
            Command::RestoreLease { source, incarnation }
        }
        REMOVE => {
            let (source, incarnation) = life(input)?;
            Command::RemoveSource { source, incarnation }
        }
        DRAIN => Command::SetDraining {
            worker: WorkerId(input.small("a worker's id")?),
            draining: input.flag("a drain flag")?,
        },
        POLICY => Command::SetPolicy {
            pool: input.text("a pool's name", NAME_BYTES_MAX)?,
            policy: input.text("a policy's name", NAME_BYTES_MAX)?,
        },
        tag => {
            return Err(DecodeError::Tag {
                what: "a command",
                tag: u64::from(tag),
            });
        }
    })
}

fn life<R: Read>(input: &mut In<R>) -> Result<(SourceId, Incarnation), DecodeError> {
    Ok((
        SourceId(input.small("a source's id")?),
        Incarnation(input.number("a lifetime")?),
    ))
}

fn batch<R: Read>(input: &mut In<R>) -> Result<Batch, DecodeError> {
    let source = SourceId(input.small("a source's id")?);
    let incarnation = Incarnation(input.number("a lifetime")?);
    let seq = Seq(input.number("a batch's position")?);
    let count = input.count("the number of changes", OPS_PER_BATCH_MAX)?;
    let mut ops = Vec::with_capacity(count.min(256));
    for _ in 0..count {
        ops.push(op(input)?);
    }
    Ok(Batch {
        source,
        incarnation,
        seq,
        ops,
    })
}

fn op<R: Read>(input: &mut In<R>) -> Result<Op, DecodeError> {
    Ok(match input.byte("a change")? {
        OP_STORE => {
            let holder = HolderId(input.small("a holder's id")?);
            let anchor = input.key("an anchor")?;
            let anchor_depth = Depth(input.small("an anchor's depth")?);
            let skip = input.small("a number of ancestors")?;
            let count = input.count("the number of stored keys", KEYS_PER_STORE_MAX)?;
            if count == 0 {
                return Err(DecodeError::Invalid("a store without keys"));
            }
            Op::Store {
                holder,
                anchor,
                anchor_depth,
                skip,
                keys: input.keys(count, "stored keys")?,
            }
        }
        OP_REMOVE => Op::Remove {
            holder: HolderId(input.small("a holder's id")?),
            key: input.key("a removed key")?,
            depth: Depth(input.small("a removed block's depth")?),
            count: input.small("the number of removed blocks")?,
        },
        OP_CLEAR => Op::Clear {
            holder: HolderId(input.small("a holder's id")?),
        },
        OP_CONFIDENCE => Op::Confidence(confidence(input)?),
        tag => {
            return Err(DecodeError::Tag {
                what: "a change",
                tag: u64::from(tag),
            });
        }
    })
}
