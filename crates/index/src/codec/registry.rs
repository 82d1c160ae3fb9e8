//! The registry's part of commands, snapshots and digests.

use std::io::{self, Read, Write};

use cairn_blocks::{BlockSize, ClusterSeed};
use xxhash_rust::xxh3::Xxh3;

use super::wire::{DecodeError, In, Out};
use crate::register::{ADAPTERS_MAX, HOLDERS_PER_SOURCE_MAX, MODELS_MAX, NAME_BYTES_MAX, POOLS_MAX, SOURCES_MAX};
use crate::{
    Confidence, DegradedReason, Holder, HolderId, HolderSpec, Incarnation, IndexState, LeaseState, LogIndex, Pool,
    PoolSpec, Reach, Registry, Role, Seq, Source, SourceId, SourceSpec, Tier, Worker, WorkerId, WorkerSpec,
};

/// Longest text that a decoder takes; registration allows less, and answers with the remedy.
const TEXT_MAX: usize = 64 * 1024;
/// As many holders as all sources may have.
const HOLDERS_MAX: usize = SOURCES_MAX * HOLDERS_PER_SOURCE_MAX;

/// Digest of the registry and of the counters behind it, without the positions of the sources.
pub(crate) fn registry_digest(state: &IndexState) -> u64 {
    let mut hasher = Hasher(Xxh3::new());
    let mut out = Out::new(&mut hasher);
    put_registry(&mut out, state, false).expect("a hasher takes every byte");
    hasher.0.digest()
}

struct Hasher(Xxh3);

impl Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes the registry; `positions` adds each source's last applied batch.
pub(super) fn put_registry<W: Write>(out: &mut Out<'_, W>, state: &IndexState, positions: bool) -> io::Result<()> {
    let registry = &state.registry;
    match registry.seed {
        Some(seed) => {
            out.byte(1)?;
            out.bytes(&seed.0.to_le_bytes())?;
        }
        None => out.byte(0)?,
    }
    out.text(&registry.cluster)?;
    out.number(registry.version)?;
    out.number(state.next_source)?;
    out.number(state.next_worker)?;
    out.number(registry.pools.len() as u64)?;
    for pool in registry.pools.values() {
        put_pool(out, &pool.spec)?;
        out.text(&pool.policy)?;
    }
    out.number(registry.workers.len() as u64)?;
    for (id, worker) in &registry.workers {
        out.number(id.0)?;
        put_worker(out, &worker.spec)?;
        out.text(&worker.pool)?;
        out.number(worker.source.0)?;
        out.byte(u8::from(worker.draining))?;
    }
    out.number(registry.sources.len() as u64)?;
    for (id, source) in &registry.sources {
        out.number(id.0)?;
        out.text(&source.name)?;
        out.text(&source.agent)?;
        out.number(source.incarnation.0)?;
        if positions {
            out.number(source.seq.0)?;
        }
        out.number(source.worker.0)?;
        out.number(source.holders.len() as u64)?;
        for holder in &source.holders {
            out.number(holder.0)?;
        }
        put_confidence(out, source.confidence)?;
        match source.lease {
            LeaseState::Live => out.byte(0)?,
            LeaseState::Lapsed(at) => {
                out.byte(1)?;
                out.number(at.0)?;
            }
        }
    }
    out.number(registry.holders.len() as u64)?;
    for (id, holder) in &registry.holders {
        out.number(id.0)?;
        put_holder(out, &holder.spec)?;
        out.number(holder.source.0)?;
    }
    Ok(())
}

/// Reads a registry with positions, and the next ids of sources and workers.
pub(super) fn registry<R: Read>(input: &mut In<R>) -> Result<(Registry, u32, u32), DecodeError> {
    let mut registry = Registry::default();
    if input.flag("the cluster's seed")? {
        registry.seed = Some(ClusterSeed(input.word("the cluster's seed")?));
    }
    registry.cluster = input.text("the cluster's name", TEXT_MAX)?;
    registry.version = input.number("the registry's version")?;
    let next_source = input.small("the next source")?;
    let next_worker = input.small("the next worker")?;
    for _ in 0..input.count("the number of pools", POOLS_MAX)? {
        let spec = pool(input)?;
        let policy = input.text("a policy", TEXT_MAX)?;
        registry.pools.insert(spec.name.clone(), Pool { spec, policy });
    }
    for _ in 0..input.count("the number of workers", SOURCES_MAX)? {
        let id = WorkerId(input.small("a worker's id")?);
        let spec = worker(input)?;
        let pool = input.text("a worker's pool", TEXT_MAX)?;
        let source = SourceId(input.small("a worker's source")?);
        let draining = input.flag("a worker's drain flag")?;
        registry.workers.insert(
            id,
            Worker {
                spec,
                pool,
                source,
                draining,
            },
        );
    }
    for _ in 0..input.count("the number of sources", SOURCES_MAX)? {
        let (id, source) = source(input)?;
        registry.sources.insert(id, source);
    }
    for _ in 0..input.count("the number of holders", HOLDERS_MAX)? {
        let id = HolderId(input.small("a holder's id")?);
        let spec = holder(input)?;
        let source = SourceId(input.small("a holder's source")?);
        registry.holders.insert(id, Holder { spec, source });
    }
    check_links(&registry)?;
    Ok((registry, next_source, next_worker))
}

/// Everything that names something else must find it.
fn check_links(registry: &Registry) -> Result<(), DecodeError> {
    let workers = registry
        .workers
        .values()
        .all(|w| registry.pools.contains_key(&w.pool) && registry.sources.contains_key(&w.source));
    let sources = registry.sources.iter().all(|(id, s)| {
        registry.workers.contains_key(&s.worker)
            && s.holders
                .iter()
                .all(|h| registry.holders.get(h).is_some_and(|h| h.source == *id))
    });
    let listed: usize = registry.sources.values().map(|s| s.holders.len()).sum();
    // Ids are dense, so that depths by holder stay a short list.
    let dense = registry
        .holders
        .keys()
        .next_back()
        .is_none_or(|last| (last.0 as usize) < HOLDERS_MAX);
    let units = registry.holders.values().all(|h| h.spec.fetch_unit > 0);
    if workers && sources && dense && units && listed == registry.holders.len() {
        Ok(())
    } else {
        Err(DecodeError::Invalid("a reference inside the registry"))
    }
}

fn source<R: Read>(input: &mut In<R>) -> Result<(SourceId, Source), DecodeError> {
    let id = SourceId(input.small("a source's id")?);
    let name = input.text("a source's name", TEXT_MAX)?;
    let agent = input.text("a source's agent", TEXT_MAX)?;
    let incarnation = Incarnation(input.number("a source's lifetime")?);
    let seq = Seq(input.number("a source's position")?);
    let worker = WorkerId(input.small("a source's worker")?);
    let count = input.count("the number of a source's caches", HOLDERS_PER_SOURCE_MAX)?;
    let mut holders = Vec::with_capacity(count);
    for _ in 0..count {
        holders.push(HolderId(input.small("a source's cache")?));
    }
    let confidence = confidence(input)?;
    let lease = if input.flag("a lease")? {
        LeaseState::Lapsed(LogIndex(input.number("a lease")?))
    } else {
        LeaseState::Live
    };
    Ok((
        id,
        Source {
            name,
            agent,
            incarnation,
            seq,
            worker,
            holders,
            confidence,
            lease,
        },
    ))
}

/// Writes all that a registration says.
pub(super) fn put_spec<W: Write>(out: &mut Out<'_, W>, spec: &SourceSpec) -> io::Result<()> {
    out.text(&spec.name)?;
    out.text(&spec.agent)?;
    put_pool(out, &spec.pool)?;
    put_worker(out, &spec.worker)?;
    out.number(spec.holders.len() as u64)?;
    spec.holders.iter().try_for_each(|h| put_holder(out, h))
}

/// Reads all that a registration says.
pub(super) fn spec<R: Read>(input: &mut In<R>) -> Result<SourceSpec, DecodeError> {
    let name = input.text("a source's name", TEXT_MAX)?;
    let agent = input.text("a source's agent", TEXT_MAX)?;
    let pool = pool(input)?;
    let worker = worker(input)?;
    let count = input.count("the number of a source's caches", HOLDERS_PER_SOURCE_MAX * 8)?;
    let holders = (0..count).map(|_| holder(input)).collect::<Result<_, _>>()?;
    Ok(SourceSpec {
        name,
        agent,
        pool,
        worker,
        holders,
    })
}

fn put_pool<W: Write>(out: &mut Out<'_, W>, spec: &PoolSpec) -> io::Result<()> {
    out.text(&spec.name)?;
    put_texts(out, &spec.models)?;
    out.number(spec.block_size.tokens())?;
    match spec.max_model_len {
        Some(len) => {
            out.byte(1)?;
            out.number(len)?;
        }
        None => out.byte(0)?,
    }
    out.maybe_text(spec.model_root.as_deref())
}

fn pool<R: Read>(input: &mut In<R>) -> Result<PoolSpec, DecodeError> {
    let name = input.text("a pool's name", TEXT_MAX)?;
    let models = texts(input, "a model's name", MODELS_MAX * 4)?;
    let block_size = BlockSize::new(input.small("a block size")?).map_err(|_| DecodeError::Invalid("a block size"))?;
    let max_model_len = if input.flag("a pool's longest context")? {
        Some(input.small("a pool's longest context")?)
    } else {
        None
    };
    let model_root = input.maybe_text("a model's directory", TEXT_MAX)?;
    Ok(PoolSpec {
        name,
        models,
        block_size,
        max_model_len,
        model_root,
    })
}

fn put_worker<W: Write>(out: &mut Out<'_, W>, spec: &WorkerSpec) -> io::Result<()> {
    out.text(&spec.engine_url)?;
    out.number(spec.rank)?;
    out.number(spec.ranks)?;
    out.text(&spec.host)?;
    out.byte(match spec.role {
        Role::Both => 0,
        Role::Prefill => 1,
        Role::Decode => 2,
    })?;
    out.text(&spec.engine_kind)?;
    out.number(spec.engine_block_size)?;
    out.number(spec.capacity_blocks)?;
    out.number(spec.max_num_seqs)?;
    out.number(spec.max_batched_tokens)?;
    put_texts(out, &spec.adapters)?;
    out.maybe_text(spec.bootstrap.as_deref())
}

fn worker<R: Read>(input: &mut In<R>) -> Result<WorkerSpec, DecodeError> {
    Ok(WorkerSpec {
        engine_url: input.text("an engine's URL", TEXT_MAX)?,
        rank: input.small("a rank")?,
        ranks: input.small("a number of ranks")?,
        host: input.text("a host's name", TEXT_MAX)?,
        role: match input.byte("a role")? {
            0 => Role::Both,
            1 => Role::Prefill,
            2 => Role::Decode,
            tag => {
                return Err(DecodeError::Tag {
                    what: "a role",
                    tag: u64::from(tag),
                });
            }
        },
        engine_kind: input.text("an engine's kind", TEXT_MAX)?,
        engine_block_size: input.small("an engine's block size")?,
        capacity_blocks: input.number("an engine's blocks")?,
        max_num_seqs: input.small("an engine's sequences")?,
        max_batched_tokens: input.small("an engine's chunk")?,
        adapters: texts(input, "an adapter's name", ADAPTERS_MAX * 4)?,
        bootstrap: input.maybe_text("a bootstrap address", TEXT_MAX)?,
    })
}

fn put_holder<W: Write>(out: &mut Out<'_, W>, spec: &HolderSpec) -> io::Result<()> {
    out.byte(match spec.tier {
        Tier::Gpu => 0,
        Tier::Cpu => 1,
        Tier::Shared => 2,
    })?;
    out.number(spec.fetch_unit)?;
    match &spec.reach {
        Reach::Worker => out.byte(0),
        Reach::Host(host) => {
            out.byte(1)?;
            out.text(host)
        }
        Reach::Pool => out.byte(2),
    }
}

fn holder<R: Read>(input: &mut In<R>) -> Result<HolderSpec, DecodeError> {
    let tier = match input.byte("a tier")? {
        0 => Tier::Gpu,
        1 => Tier::Cpu,
        2 => Tier::Shared,
        tag => {
            return Err(DecodeError::Tag {
                what: "a tier",
                tag: u64::from(tag),
            });
        }
    };
    let fetch_unit = input.small("a fetch unit")?;
    let reach = match input.byte("a reach")? {
        0 => Reach::Worker,
        1 => Reach::Host(input.text("a host's name", TEXT_MAX)?),
        2 => Reach::Pool,
        tag => {
            return Err(DecodeError::Tag {
                what: "a reach",
                tag: u64::from(tag),
            });
        }
    };
    Ok(HolderSpec {
        tier,
        fetch_unit,
        reach,
    })
}

fn put_texts<W: Write>(out: &mut Out<'_, W>, texts: &[String]) -> io::Result<()> {
    out.number(texts.len() as u64)?;
    texts.iter().try_for_each(|text| out.text(text))
}

fn texts<R: Read>(input: &mut In<R>, what: &'static str, max: usize) -> Result<Vec<String>, DecodeError> {
    let count = input.count(what, max)?;
    (0..count).map(|_| input.text(what, NAME_BYTES_MAX * 4)).collect()
}

/// Writes what a source claims.
pub(super) fn put_confidence<W: Write>(out: &mut Out<'_, W>, confidence: Confidence) -> io::Result<()> {
    out.byte(match confidence {
        Confidence::Exact => 0,
        Confidence::Degraded(reason) => match reason {
            DegradedReason::Gap => 1,
            DegradedReason::Replaying => 2,
            DegradedReason::Hybrid => 3,
            DegradedReason::Silent => 4,
            DegradedReason::NoEvents => 5,
            DegradedReason::Mismatch => 6,
            DegradedReason::LeaseLapsed => 7,
            DegradedReason::Bounded => 8,
        },
    })
}

/// Reads what a source claims.
pub(super) fn confidence<R: Read>(input: &mut In<R>) -> Result<Confidence, DecodeError> {
    Ok(match input.byte("a confidence")? {
        0 => Confidence::Exact,
        1 => Confidence::Degraded(DegradedReason::Gap),
        2 => Confidence::Degraded(DegradedReason::Replaying),
        3 => Confidence::Degraded(DegradedReason::Hybrid),
        4 => Confidence::Degraded(DegradedReason::Silent),
        5 => Confidence::Degraded(DegradedReason::NoEvents),
        6 => Confidence::Degraded(DegradedReason::Mismatch),
        7 => Confidence::Degraded(DegradedReason::LeaseLapsed),
        8 => Confidence::Degraded(DegradedReason::Bounded),
        tag => {
            return Err(DecodeError::Tag {
                what: "a confidence",
                tag: u64::from(tag),
            });
        }
    })
}
