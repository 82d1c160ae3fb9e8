//! The parts of a checkpoint, each with its reader beside its writer.

use cairn_blocks::BlockKey;
use cairn_index::{HolderId, Incarnation, Seq, SourceId, Tier};

use super::CheckpointError;
use super::bytes::{Reader, Writer};
use crate::mirror::Mirror;
use crate::mirror::node::{MAX_END, MAX_SLOTS, NONE, Node, PERSISTED, ROOT, Side, Slot, TIERS};
use crate::outbox::Outbox;
use crate::session::{Recent, Session};
use crate::source::{Unknown, mirror_config};
use crate::{EngineHash, Millis, Registration, SourceConfig};

type Read<T> = Result<T, CheckpointError>;

/// What the keys depend on: other values make every key wrong.
pub(super) fn write_identity(out: &mut Writer, config: &SourceConfig) {
    out.u64(config.seed.0);
    out.text(&config.pool);
    out.u32(config.block_size.tokens());
    out.u32(config.tiers.len() as u32);
    for tier in &config.tiers {
        out.u8(tier_code(*tier));
    }
}

fn tier_code(tier: Tier) -> u8 {
    match tier {
        Tier::Gpu => 0,
        Tier::Cpu => 1,
        Tier::Shared => 2,
    }
}

pub(super) fn check_identity(input: &mut Reader<'_>, config: &SourceConfig) -> Read<()> {
    if input.u64("seed")? != config.seed.0 {
        return Err(CheckpointError::Other("cluster seed"));
    }
    if input.text("pool")? != config.pool {
        return Err(CheckpointError::Other("pool"));
    }
    if input.u32("block size")? != config.block_size.tokens() {
        return Err(CheckpointError::Other("canonical block size"));
    }
    let tiers = input.count("tiers", 1)?;
    let same_count = tiers == config.tiers.len();
    for i in 0..tiers {
        let code = input.u8("tiers")?;
        if !same_count || code != tier_code(config.tiers[i]) {
            return Err(CheckpointError::Other("set of tiers"));
        }
    }
    if same_count {
        Ok(())
    } else {
        Err(CheckpointError::Other("set of tiers"))
    }
}

pub(super) fn write_session(out: &mut Writer, session: &Session) {
    let (next, recent, last_ts, process_start) = session.cursor();
    out.u64(next);
    out.u64(last_ts.to_bits());
    out.option(process_start);
    out.u32(recent.len() as u32);
    for (seq, content) in recent.iter() {
        out.u64(seq);
        out.u64(content);
    }
}

pub(super) fn read_session(input: &mut Reader<'_>, replay: bool, now: Millis) -> Read<Session> {
    let next = input.u64("cursor")?;
    let last_ts = f64::from_bits(input.u64("engine time")?);
    let process_start = input.option("process start")?;
    let mut recent = Recent::default();
    for _ in 0..input.count("recent batches", 16)? {
        recent.push(input.u64("recent batches")?, input.u64("recent batches")?);
    }
    Ok(Session::resume(replay, now, next, recent, last_ts, process_start))
}

/// `behind` says whether the mirror has told what no batch has yet.
pub(super) fn write_outbox(out: &mut Writer, outbox: &Outbox, behind: bool) {
    let registration = outbox.registration();
    out.u8(u8::from(registration.is_some()));
    if let Some(registration) = registration {
        out.u32(registration.source.0);
        out.u64(registration.incarnation.0);
        out.u32(registration.holders.len() as u32);
        for holder in &registration.holders {
            out.u32(holder.0);
        }
        out.u64(outbox.built().0);
        out.u8(u8::from(behind));
    }
}

pub(super) fn read_outbox(input: &mut Reader<'_>) -> Read<Outbox> {
    let mut outbox = Outbox::default();
    if input.flag("registration")? {
        let source = SourceId(input.u32("source")?);
        let incarnation = Incarnation(input.u64("incarnation")?);
        let mut holders = Vec::new();
        for _ in 0..input.count("holders", 4)? {
            holders.push(HolderId(input.u32("holders")?));
        }
        let built = Seq(input.u64("seq")?);
        let behind = input.flag("tape")?;
        outbox.restore(
            Registration {
                source,
                incarnation,
                holders,
                seq: built,
                resumed: true,
            },
            built,
            behind,
        );
    }
    Ok(outbox)
}

pub(super) fn write_unknown(out: &mut Writer, unknown: Unknown) {
    out.option(unknown.gap_ends);
    out.option(unknown.bound_ends);
}

pub(super) fn read_unknown(input: &mut Reader<'_>) -> Read<Unknown> {
    Ok(Unknown {
        gap_ends: input.option("gap")?,
        bound_ends: input.option("bound")?,
    })
}

pub(super) fn write_mirror(out: &mut Writer, mirror: &Mirror) {
    out.u64(mirror.gpu_stores);
    let (primary, sure, hybrid) = mirror.group_parts();
    out.option(primary.map(u64::from));
    out.u8(u8::from(sure));
    out.u8(u8::from(hybrid));
    for clear in mirror.clear_first {
        out.u8(u8::from(clear));
    }
    // Slots in use, numbered without the holes between them.
    let mut number = vec![0u32; mirror.arena.slot_bound()];
    let mut nodes = 0;
    for slot in mirror.arena.slots() {
        number[slot as usize] = nodes;
        nodes += 1;
    }
    out.u32(nodes);
    for slot in mirror.arena.slots() {
        write_node(out, mirror, slot, &number);
    }
}

fn write_node(out: &mut Writer, mirror: &Mirror, slot: Slot, number: &[u32]) {
    let node = mirror.arena.get(slot);
    out.u32(u32::from(node.flags & PERSISTED));
    out.u64(node.key().0);
    if node.has(ROOT) {
        return;
    }
    out.u64(node.hash().0);
    out.u32(number[node.parent() as usize]);
    out.u32(node.end());
    for tier in 0..TIERS {
        out.u32(mirror.arena.copies(slot, tier));
    }
    let side = mirror.arena.side(slot);
    out.u8(u8::from(side.is_some()));
    if let Some(side) = side {
        out.u32(side.keys.len() as u32);
        side.keys.iter().for_each(|k| out.u64(k.0));
        out.u32(side.tail.len() as u32);
        side.tail.iter().for_each(|t| out.u32(*t));
        out.u32(side.tail_extra.len() as u32);
        side.tail_extra.iter().for_each(|e| out.text(e));
    }
}

pub(super) fn read_mirror(input: &mut Reader<'_>, config: &SourceConfig) -> Read<Mirror> {
    let mut mirror = Mirror::new(mirror_config(config));
    mirror.gpu_stores = input.u64("stores")?;
    let primary = input.option("group")?;
    let primary = primary
        .map(u32::try_from)
        .transpose()
        .map_err(|_| CheckpointError::Invalid("group"))?;
    mirror.set_group_parts((primary, input.flag("group")?, input.flag("group")?));
    for tier in 0..TIERS {
        mirror.clear_first[tier] = input.flag("clears")?;
    }
    let nodes = input.count("blocks", 12)?;
    if nodes > MAX_SLOTS {
        return Err(CheckpointError::Invalid("blocks"));
    }
    let mut parents = Vec::with_capacity(nodes);
    for _ in 0..nodes {
        parents.push(read_node(input, &mut mirror)?);
    }
    for (slot, parent) in parents.iter().enumerate() {
        let slot = slot as Slot;
        let end = mirror.arena.get(slot).end();
        if let Some(parent) = *parent {
            // A parent ends before its child, so there are no circles.
            let above = mirror.arena.live(parent).ok_or(CheckpointError::Invalid("parent"))?;
            if above.end() >= end {
                return Err(CheckpointError::Invalid("parent"));
            }
        }
        mirror.arena.link(slot);
    }
    mirror
        .rebuild(config.block_size.tokens())
        .map_err(CheckpointError::Invalid)?;
    Ok(mirror)
}

/// Reads one node, not linked yet; returns its parent, `None` for a root.
fn read_node(input: &mut Reader<'_>, mirror: &mut Mirror) -> Read<Option<Slot>> {
    let flags = input.u32("flags")?;
    let flags = u16::try_from(flags)
        .ok()
        .filter(|f| f & !PERSISTED == 0)
        .ok_or(CheckpointError::Invalid("flags"))?;
    let key = BlockKey(input.u64("key")?);
    if flags & ROOT != 0 {
        mirror
            .arena
            .place_unlinked(Node::new(EngineHash(0), key, NONE, 0, ROOT), None);
        return Ok(None);
    }
    let hash = EngineHash(input.u64("hash")?);
    let parent = input.u32("parent")?;
    let end = input.u32("end")?;
    if parent > NONE || end > MAX_END {
        return Err(CheckpointError::Invalid("place"));
    }
    let mut copies = [0; TIERS];
    for copies in &mut copies {
        *copies = input.u32("copies")?;
    }
    let side = if input.flag("side")? {
        Some(read_side(input)?)
    } else {
        None
    };
    let slot = mirror
        .arena
        .place_unlinked(Node::new(hash, key, parent, end, flags), side);
    for (tier, copies) in copies.into_iter().enumerate() {
        mirror.arena.set_copies(slot, tier, copies);
    }
    Ok(Some(parent))
}

fn read_side(input: &mut Reader<'_>) -> Read<Side> {
    let mut side = Side::default();
    for _ in 0..input.count("keys", 8)? {
        side.keys.push(BlockKey(input.u64("keys")?));
    }
    for _ in 0..input.count("tail", 4)? {
        side.tail.push(input.u32("tail")?);
    }
    for _ in 0..input.count("identities", 4)? {
        side.tail_extra.push(input.text("identities")?.into());
    }
    Ok(side)
}
