//! Registrations: pools, workers, holders and sources.

use cairn_blocks::BlockSize;
use cairn_index::{
    DegradedReason, HolderSpec, Incarnation, PoolSpec, Reach, Role, SourceId, SourceSpec, Tier, WorkerSpec,
};

use super::{WireError, count, limits, name, text, unknown_enum};
use crate::v1;

impl From<Role> for v1::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Both => v1::Role::Both,
            Role::Prefill => v1::Role::Prefill,
            Role::Decode => v1::Role::Decode,
        }
    }
}

impl From<v1::Role> for Role {
    fn from(role: v1::Role) -> Self {
        match role {
            v1::Role::Both => Role::Both,
            v1::Role::Prefill => Role::Prefill,
            v1::Role::Decode => Role::Decode,
        }
    }
}

impl From<Tier> for v1::Tier {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Gpu => v1::Tier::Gpu,
            Tier::Cpu => v1::Tier::Cpu,
            Tier::Shared => v1::Tier::Shared,
        }
    }
}

impl From<v1::Tier> for Tier {
    fn from(tier: v1::Tier) -> Self {
        match tier {
            v1::Tier::Gpu => Tier::Gpu,
            v1::Tier::Cpu => Tier::Cpu,
            v1::Tier::Shared => Tier::Shared,
        }
    }
}

impl From<DegradedReason> for v1::DegradedReason {
    fn from(reason: DegradedReason) -> Self {
        match reason {
            DegradedReason::Gap => v1::DegradedReason::Gap,
            DegradedReason::Replaying => v1::DegradedReason::Replaying,
            DegradedReason::Hybrid => v1::DegradedReason::Hybrid,
            DegradedReason::Silent => v1::DegradedReason::Silent,
            DegradedReason::NoEvents => v1::DegradedReason::NoEvents,
            DegradedReason::Mismatch => v1::DegradedReason::Mismatch,
            DegradedReason::LeaseLapsed => v1::DegradedReason::LeaseLapsed,
            DegradedReason::Bounded => v1::DegradedReason::Bounded,
        }
    }
}

impl TryFrom<v1::PoolSpec> for PoolSpec {
    type Error = WireError;

    fn try_from(pool: v1::PoolSpec) -> Result<Self, WireError> {
        count("pool.models", pool.models.len(), limits::MODELS_MAX)?;
        if pool.models.is_empty() {
            return Err(WireError::Missing { field: "pool.models" });
        }
        let block_size = BlockSize::new(pool.block_size).map_err(|error| WireError::Invalid {
            field: "pool.block_size",
            reason: error.to_string(),
        })?;
        let root = text("pool.model_root", pool.model_root, limits::NAME_BYTES_MAX)?;
        Ok(PoolSpec {
            name: name("pool.name", pool.name)?,
            models: pool
                .models
                .into_iter()
                .map(|model| name("pool.models", model))
                .collect::<Result<_, _>>()?,
            block_size,
            max_model_len: (pool.max_model_len != 0).then_some(pool.max_model_len),
            model_root: (!root.is_empty()).then_some(root),
        })
    }
}

impl From<PoolSpec> for v1::PoolSpec {
    fn from(pool: PoolSpec) -> Self {
        Self {
            name: pool.name,
            models: pool.models,
            block_size: pool.block_size.tokens(),
            max_model_len: pool.max_model_len.unwrap_or(0),
            model_root: pool.model_root.unwrap_or_default(),
        }
    }
}

impl TryFrom<v1::WorkerSpec> for WorkerSpec {
    type Error = WireError;

    fn try_from(worker: v1::WorkerSpec) -> Result<Self, WireError> {
        let role = v1::Role::try_from(worker.role).map_err(|_| unknown_enum("worker.role", worker.role))?;
        count("worker.adapters", worker.adapters.len(), limits::ADAPTERS_MAX)?;
        if worker.rank >= worker.ranks.max(1) {
            let reason = format!("rank {} of {} ranks; ranks count from 0", worker.rank, worker.ranks);
            return Err(WireError::Invalid {
                field: "worker.rank",
                reason,
            });
        }
        let bootstrap = text("worker.bootstrap", worker.bootstrap, limits::NAME_BYTES_MAX)?;
        let engine_url = name("worker.engine_url", worker.engine_url)?;
        if !(engine_url.starts_with("http://") || engine_url.starts_with("https://")) {
            let reason = "it must begin with http:// or https://".to_owned();
            return Err(WireError::Invalid {
                field: "worker.engine_url",
                reason,
            });
        }
        Ok(WorkerSpec {
            engine_url,
            rank: worker.rank,
            ranks: worker.ranks.max(1),
            host: text("worker.host", worker.host, limits::NAME_BYTES_MAX)?,
            role: role.into(),
            engine_kind: name("worker.engine_kind", worker.engine_kind)?,
            engine_block_size: worker.engine_block_size,
            capacity_blocks: worker.capacity_blocks,
            max_num_seqs: worker.max_num_seqs,
            max_batched_tokens: worker.max_batched_tokens,
            adapters: worker
                .adapters
                .into_iter()
                .map(|a| name("worker.adapters", a))
                .collect::<Result<_, _>>()?,
            bootstrap: (!bootstrap.is_empty()).then_some(bootstrap),
        })
    }
}

impl From<WorkerSpec> for v1::WorkerSpec {
    fn from(worker: WorkerSpec) -> Self {
        Self {
            engine_url: worker.engine_url,
            rank: worker.rank,
            ranks: worker.ranks,
            host: worker.host,
            role: v1::Role::from(worker.role).into(),
            engine_kind: worker.engine_kind,
            engine_block_size: worker.engine_block_size,
            capacity_blocks: worker.capacity_blocks,
            max_num_seqs: worker.max_num_seqs,
            max_batched_tokens: worker.max_batched_tokens,
            adapters: worker.adapters,
            bootstrap: worker.bootstrap.unwrap_or_default(),
        }
    }
}

impl TryFrom<v1::HolderSpec> for HolderSpec {
    type Error = WireError;

    fn try_from(holder: v1::HolderSpec) -> Result<Self, WireError> {
        let tier = v1::Tier::try_from(holder.tier).map_err(|_| unknown_enum("holder.tier", holder.tier))?;
        if holder.fetch_unit == 0 {
            let reason = "0 tokens; name the smallest run the cache can serve, the engine's block size for a GPU";
            return Err(WireError::Invalid {
                field: "holder.fetch_unit",
                reason: reason.to_owned(),
            });
        }
        let reach = match holder.reach.ok_or(WireError::Missing { field: "holder.reach" })? {
            v1::holder_spec::Reach::Worker(_) => Reach::Worker,
            v1::holder_spec::Reach::Host(host) => Reach::Host(name("holder.host", host)?),
            v1::holder_spec::Reach::Pool(_) => Reach::Pool,
        };
        Ok(HolderSpec {
            tier: tier.into(),
            fetch_unit: holder.fetch_unit,
            reach,
        })
    }
}

impl From<HolderSpec> for v1::HolderSpec {
    fn from(holder: HolderSpec) -> Self {
        Self {
            tier: v1::Tier::from(holder.tier).into(),
            fetch_unit: holder.fetch_unit,
            reach: Some(match holder.reach {
                Reach::Worker => v1::holder_spec::Reach::Worker(true),
                Reach::Host(host) => v1::holder_spec::Reach::Host(host),
                Reach::Pool => v1::holder_spec::Reach::Pool(true),
            }),
        }
    }
}

impl TryFrom<v1::SourceSpec> for SourceSpec {
    type Error = WireError;

    fn try_from(spec: v1::SourceSpec) -> Result<Self, WireError> {
        count("spec.holders", spec.holders.len(), limits::HOLDERS_MAX)?;
        if spec.holders.is_empty() {
            return Err(WireError::Missing { field: "spec.holders" });
        }
        Ok(SourceSpec {
            name: name("spec.name", spec.name)?,
            agent: name("spec.agent", spec.agent)?,
            pool: spec.pool.ok_or(WireError::Missing { field: "spec.pool" })?.try_into()?,
            worker: spec
                .worker
                .ok_or(WireError::Missing { field: "spec.worker" })?
                .try_into()?,
            holders: spec
                .holders
                .into_iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
        })
    }
}

impl From<SourceSpec> for v1::SourceSpec {
    fn from(spec: SourceSpec) -> Self {
        Self {
            name: spec.name,
            agent: spec.agent,
            pool: Some(spec.pool.into()),
            worker: Some(spec.worker.into()),
            holders: spec.holders.into_iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<v1::RegisterRequest> for (SourceSpec, Option<Incarnation>) {
    type Error = WireError;

    fn try_from(request: v1::RegisterRequest) -> Result<Self, WireError> {
        let spec = request.spec.ok_or(WireError::Missing { field: "spec" })?.try_into()?;
        Ok((
            spec,
            (request.resume_incarnation != 0).then_some(Incarnation(request.resume_incarnation)),
        ))
    }
}

impl From<(SourceSpec, Option<Incarnation>)> for v1::RegisterRequest {
    fn from((spec, resume): (SourceSpec, Option<Incarnation>)) -> Self {
        Self {
            spec: Some(spec.into()),
            resume_incarnation: resume.map_or(0, |incarnation| incarnation.0),
        }
    }
}

impl From<v1::Lease> for (SourceId, Incarnation) {
    fn from(lease: v1::Lease) -> Self {
        (SourceId(lease.source), Incarnation(lease.incarnation))
    }
}

impl From<(SourceId, Incarnation)> for v1::Lease {
    fn from((source, incarnation): (SourceId, Incarnation)) -> Self {
        Self {
            source: source.0,
            incarnation: incarnation.0,
        }
    }
}
