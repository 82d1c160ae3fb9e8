//! Keeps the fleet, the routing core and the tokenizers in step with the registry, and the last registry on disk.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cairn_index::{Command, IndexState, LogIndex, Registry, SourceSpec, WorkerId, codec};
use cairn_routing::WorkerFacts;
use parking_lot::Mutex;
use tokio::task::JoinSet;

use crate::ask_engine;
use crate::decide::policy_of;
use crate::engines::{self, Engine, Health};
use crate::fleet::{Fleet, Pool, Worker};
use crate::state::Router;

/// The fleet is rebuilt at most this often.
const REBUILD_PAUSE: Duration = Duration::from_millis(20);
/// The registry is written at most this often.
const SAVE_PAUSE: Duration = Duration::from_secs(1);
/// Tokenizers that couldn't be loaded are looked for again, and roots of engines that came late are seen.
const IDLE_ROUND: Duration = Duration::from_secs(5);
/// File name of the last registry in the data folder.
const FILE: &str = "engines.commands";
/// Largest registry file that is read; 10,000 workers take a few MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// What is remembered between rebuilds.
#[derive(Default)]
pub(crate) struct Known {
    incarnations: Mutex<BTreeMap<WorkerId, u64>>,
}

/// Runs for as long as the router lives.
pub(crate) async fn keep(router: Arc<Router>, fallback: Registry) {
    let known = Known::default();
    let mut tasks = JoinSet::new();
    let mut saved: Option<(u64, Instant)> = None;
    loop {
        while tasks.try_join_next().is_some() {}
        let current = router.view.registry();
        // Until the first snapshot is here the last registry of the run before serves.
        let registry = if router.view.applied() == 0 && current.workers.is_empty() {
            &fallback
        } else {
            &current
        };
        rebuild(&router, registry, &known, &mut tasks);
        load_tokenizers(&router, &mut tasks);
        verify_tokenizers(&router, &mut tasks);
        if router.view.applied() > 0
            && saved.is_none_or(|(version, at)| version != current.version && at.elapsed() >= SAVE_PAUSE)
        {
            save(&router, &current);
            saved = Some((current.version, Instant::now()));
        }
        tokio::time::sleep(REBUILD_PAUSE).await;
        let _ = tokio::time::timeout(IDLE_ROUND, router.fleet_changed.notified()).await;
    }
}

/// Rebuilds the fleet, tells the routing core, and starts the checks of engines that are new in it.
fn rebuild(router: &Arc<Router>, registry: &Registry, known: &Known, tasks: &mut JoinSet<()>) {
    let mut made: Vec<Arc<Engine>> = Vec::new();
    let fleet = Fleet::build(registry, &router.config, &router.engines, &mut made);
    router
        .engines
        .retain(|url| fleet.workers().any(|(_, worker)| worker.engine.url == url));
    tell_routing(router, &fleet, known);
    router.fleet.store(Arc::new(fleet));
    for engine in made {
        tasks.spawn(engines::check_loop(
            Arc::clone(&router.engines),
            engine,
            router.upstream.clone(),
            Duration::from_millis(router.config.check_interval_ms),
            Arc::clone(&router.fleet_changed),
        ));
    }
}

fn tell_routing(router: &Router, fleet: &Fleet, known: &Known) {
    let now = router.now();
    let mut routing = router.routing.lock();
    let gone: Vec<WorkerId> = routing
        .workers()
        .map(|facts| facts.worker)
        .filter(|id| fleet.worker(*id).is_none())
        .collect();
    let mut incarnations = known.incarnations.lock();
    for id in gone {
        routing.remove_worker(now, id);
        incarnations.remove(&id);
    }
    for (pool, worker) in fleet.workers() {
        let asleep = routing.worker(worker.id).is_some_and(|facts| facts.asleep);
        routing.set_worker(now, facts(pool, worker, asleep));
        let before = incarnations.insert(worker.id, worker.incarnation);
        if before.is_some_and(|before| before != worker.incarnation) {
            routing.forget_cache(worker.id);
        }
    }
    for pool in &fleet.pools {
        let set = policy_of(router, pool).and_then(|policy| {
            routing
                .set_pool_policy(&pool.name, Some(policy))
                .map_err(|e| e.to_string())
        });
        if let Err(reason) = set {
            tracing::warn!(
                pool = pool.name,
                reason,
                "a pool's policy can't be used; it keeps the one before"
            );
        }
    }
}

fn facts(pool: &Pool, worker: &Worker, asleep: bool) -> WorkerFacts {
    let spec = &worker.spec;
    WorkerFacts {
        role: spec.role,
        decode_serves_whole: spec.engine_kind != "sglang",
        healthy: worker.engine.health() != Health::Unhealthy,
        asleep,
        draining: worker.draining,
        confidence: worker.confidence,
        adapters: worker.adapters.clone(),
        max_num_seqs: spec.max_num_seqs,
        capacity_tokens: spec.capacity_blocks.saturating_mul(u64::from(spec.engine_block_size)),
        max_model_len: pool.max_model_len.unwrap_or(0),
        max_in_flight: 0,
        ..WorkerFacts::new(worker.id, &pool.name)
    }
}

/// Loads the tokenizers of pools that have none yet, beside the reactor.
fn load_tokenizers(router: &Arc<Router>, tasks: &mut JoinSet<()>) {
    let fleet = router.fleet.load();
    for pool in fleet.pools.iter().filter(|pool| pool.is_known()) {
        let slot = router.tokens_of(&pool.name);
        let started = router.config.pool.iter().find(|own| own.name == pool.name);
        let own = started
            .map(|own| own.tokenizer.as_str())
            .filter(|folder| !folder.is_empty());
        let configured = own.unwrap_or(&router.config.tokenizer).to_owned();
        let source = (configured, pool.model_root.clone(), pool.models.clone());
        if !slot.is_due(&source) {
            continue;
        }
        let started = started.cloned().unwrap_or_default();
        tasks.spawn(async move {
            let (folder, root, models) = source;
            let loading = tokio::task::spawn_blocking(move || slot.load(&folder, root.as_deref(), &models, &started));
            if loading.await.is_err() {
                tracing::error!("loading a tokenizer failed");
            }
        });
    }
}

/// Compares tokenizers with their engines, once each.
fn verify_tokenizers(router: &Arc<Router>, tasks: &mut JoinSet<()>) {
    let fleet = router.fleet.load();
    for pool in fleet.pools.iter().filter(|pool| pool.is_known()) {
        let slot = router.tokens_of(&pool.name);
        if slot.get().is_none() || !slot.verification_is_due() {
            continue;
        }
        let (router, pool) = (Arc::clone(router), Arc::clone(pool));
        tasks.spawn(async move { ask_engine::verify(&router, &pool, &slot).await });
    }
}

fn path_of(router_data: &str) -> Option<PathBuf> {
    (!router_data.is_empty()).then(|| Path::new(router_data).join(FILE))
}

/// Writes the registry as the commands that make it, so that a router that starts without any index node knows its
/// engines.
fn save(router: &Router, registry: &Registry) {
    let Some(path) = path_of(&router.config.data_dir) else {
        return;
    };
    let mut bytes = Vec::new();
    for command in commands(registry) {
        let encoded = codec::encode_command(&command);
        let length = u32::try_from(encoded.len()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&encoded);
    }
    let fresh = path.with_extension("new");
    let written = std::fs::write(&fresh, &bytes).and_then(|()| std::fs::rename(&fresh, &path));
    if let Err(error) = written {
        tracing::warn!(%error, path = %path.display(), "the last known engines can't be written");
    }
}

/// What makes a registry with the same pools and workers; their ids are drawn anew.
fn commands(registry: &Registry) -> Vec<Command> {
    let mut all = Vec::new();
    if let Some(seed) = registry.seed {
        all.push(Command::InitCluster {
            cluster: registry.cluster.clone(),
            seed,
        });
    }
    for source in registry.sources.values() {
        let Some(worker) = registry.workers.get(&source.worker).filter(|worker| !worker.draining) else {
            continue;
        };
        let Some(pool) = registry.pools.get(&worker.pool) else {
            continue;
        };
        let holders = source
            .holders
            .iter()
            .filter_map(|id| registry.holders.get(id))
            .map(|holder| holder.spec.clone());
        let spec = SourceSpec {
            name: source.name.clone(),
            agent: source.agent.clone(),
            pool: pool.spec.clone(),
            worker: worker.spec.clone(),
            holders: holders.collect(),
        };
        all.push(Command::RegisterSource { spec, resume: None });
    }
    for (name, pool) in registry.pools.iter().filter(|(_, pool)| !pool.policy.is_empty()) {
        all.push(Command::SetPolicy {
            pool: name.clone(),
            policy: pool.policy.clone(),
        });
    }
    all
}

/// The registry that the last run wrote, empty where there is none.
pub(crate) fn load(data_dir: &str) -> Result<Registry, String> {
    let Some(path) = path_of(data_dir) else {
        return Ok(Registry::default());
    };
    std::fs::create_dir_all(data_dir)
        .map_err(|e| format!("can't make {data_dir}: {e}; give a folder that can be written"))?;
    let size = match std::fs::metadata(&path) {
        Ok(meta) => meta.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Registry::default()),
        Err(error) => return Err(format!("can't read {}: {error}", path.display())),
    };
    if size > FILE_BYTES_MAX {
        return Err(format!("{} has {size} bytes; remove it", path.display()));
    }
    let bytes = std::fs::read(&path).map_err(|e| format!("can't read {}: {e}", path.display()))?;
    let mut state = IndexState::new();
    if let Err(problem) = replay(&bytes, &mut state) {
        tracing::warn!(problem, path = %path.display(), "the last known engines can't be read from there on");
    }
    Ok(state.registry().clone())
}

fn replay(mut bytes: &[u8], state: &mut IndexState) -> Result<(), String> {
    let mut at = 0;
    while let Some((length, rest)) = bytes.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some((command, rest)) = rest.split_at_checked(length) else {
            return Err("it is cut short".into());
        };
        let command = codec::decode_command(command).map_err(|e| e.to_string())?;
        at += 1;
        state.apply(LogIndex(at), &command);
        bytes = rest;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use cairn_blocks::{BlockSize, ClusterSeed};
    use cairn_index::{HolderSpec, PoolSpec, Reach, Role, Tier, WorkerSpec};

    use super::*;

    #[test]
    fn the_last_known_engines_survive_a_restart() {
        let spec = |n: u32| SourceSpec {
            name: format!("http://127.0.0.1:{n}#0"),
            agent: "a".into(),
            pool: PoolSpec {
                name: "m".into(),
                models: vec!["m".into()],
                block_size: BlockSize::DEFAULT,
                max_model_len: Some(4096),
                model_root: None,
            },
            worker: WorkerSpec {
                engine_url: format!("http://127.0.0.1:{n}"),
                rank: 0,
                ranks: 1,
                host: "h".into(),
                role: Role::Both,
                engine_kind: "vllm".into(),
                engine_block_size: 16,
                capacity_blocks: 100,
                max_num_seqs: 8,
                max_batched_tokens: 2048,
                adapters: vec![],
                bootstrap: None,
            },
            holders: vec![HolderSpec {
                tier: Tier::Gpu,
                fetch_unit: 16,
                reach: Reach::Worker,
            }],
        };
        let mut state = IndexState::new();
        state.apply(
            LogIndex(1),
            &Command::InitCluster {
                cluster: "c".into(),
                seed: ClusterSeed(7),
            },
        );
        for n in 1..4 {
            state.apply(
                LogIndex(u64::from(n) + 1),
                &Command::RegisterSource {
                    spec: spec(n),
                    resume: None,
                },
            );
        }
        let mut again = IndexState::new();
        let mut bytes = Vec::new();
        for command in commands(state.registry()) {
            let encoded = codec::encode_command(&command);
            bytes.extend_from_slice(&u32::try_from(encoded.len()).unwrap().to_le_bytes());
            bytes.extend_from_slice(&encoded);
        }
        replay(&bytes, &mut again).unwrap();
        let urls = |state: &IndexState| {
            state
                .registry()
                .workers
                .values()
                .map(|w| w.spec.engine_url.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(urls(&again), urls(&state));
        assert_eq!(again.registry().seed, Some(ClusterSeed(7)));
        assert!(replay(&bytes[..bytes.len() - 1], &mut IndexState::new()).is_err());
    }
}
