//! One engine's task: finds out what it is, keeps one source per rank, and reports its load and health.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cairn_blocks::BlockSize;
use cairn_index::{HolderSpec, PoolSpec, Reach, SourceSpec, Tier, WorkerSpec};
use cairn_proto::security::is_link_local;
use cairn_proto::{limits, v1};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::clock::Backoff;
use crate::config::EngineConfig;
use crate::discovery::{DiscoveryError, EngineFacts, discover};
use crate::engine_http::EngineHttp;
use crate::metrics::EngineLabel;
use crate::page::{Page, RankFigures};
use crate::soft::SoftPublisher;
use crate::source::{self, EngineView, Plan, Surroundings};

/// Tiers that every source registers, first the GPU; those that an engine doesn't have stay empty.
const TIERS: [Tier; 3] = [Tier::Gpu, Tier::Cpu, Tier::Shared];
const DISCOVERY_FIRST: Duration = Duration::from_millis(200);
const DISCOVERY_LAST: Duration = Duration::from_secs(5);

/// What every engine's task shares beside the sources' surroundings.
#[derive(Clone)]
pub struct Reporter {
    /// Agent id.
    pub agent: String,
    /// Host name.
    pub host: String,
    /// Agent start in milliseconds since the epoch.
    pub boot: u64,
    /// Load goes here.
    pub soft: SoftPublisher,
}

struct Rank {
    plan: Plan,
    view: watch::Sender<EngineView>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// Follows one engine until cancelled.
pub async fn run(
    config: EngineConfig,
    http: EngineHttp,
    around: Surroundings,
    reporter: Reporter,
    stop: CancellationToken,
) {
    let label = EngineLabel {
        engine: http.base().to_owned(),
    };
    let mut task = EngineTask {
        config,
        http,
        around,
        reporter,
        label,
        ranks: BTreeMap::new(),
        facts: None,
        up: false,
        count: 0,
        next_discovery: Instant::now(),
        backoff: Backoff::new(DISCOVERY_FIRST, DISCOVERY_LAST),
        trouble: None,
    };
    let mut ticks = interval(Duration::from_millis(task.around.poll.load_ms));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = ticks.tick() => {}
        }
        tokio::select! {
            () = stop.cancelled() => break,
            () = task.look() => {}
        }
    }
    task.stop_all().await;
}

struct EngineTask {
    config: EngineConfig,
    http: EngineHttp,
    around: Surroundings,
    reporter: Reporter,
    label: EngineLabel,
    ranks: BTreeMap<u32, Rank>,
    facts: Option<EngineFacts>,
    up: bool,
    /// Load reports so far.
    count: u64,
    next_discovery: Instant,
    backoff: Backoff,
    trouble: Option<String>,
}

impl EngineTask {
    async fn look(&mut self) {
        if Instant::now() >= self.next_discovery {
            self.discover().await;
        }
        if self.facts.is_none() {
            return;
        }
        let (page, health) = tokio::join!(Page::fetch(&self.http), self.http.probe("/health"));
        let page = match page {
            Ok(page) => page,
            // An engine that serves no metrics is still an engine.
            Err(error) if error.is_absent() => Page::default(),
            Err(error) => {
                self.around.metrics.poll_failures.get_or_create(&self.label).inc();
                self.went_down(error.to_string());
                return;
            }
        };
        let health = health.err().filter(|error| !error.is_absent());
        if !self.up {
            tracing::info!(engine = %self.label.engine, "the engine answers");
            // It may be another one than before.
            self.next_discovery = Instant::now();
        }
        self.up = true;
        let started_anew = self
            .facts
            .as_ref()
            .is_some_and(|facts| facts.start_time != page.start_time);
        if started_anew {
            self.next_discovery = Instant::now();
            if let Some(facts) = &mut self.facts {
                facts.start_time = page.start_time;
            }
        }
        self.around.metrics.engine_up.get_or_create(&self.label).set(1);
        self.spread(&page, health.is_none());
        self.trouble = health.map(|error| error.to_string());
        self.note();
    }

    fn went_down(&mut self, trouble: String) {
        if self.up {
            tracing::warn!(engine = %self.label.engine, %trouble, "the engine does not answer");
        }
        self.up = false;
        self.trouble = Some(trouble);
        self.around.metrics.engine_up.get_or_create(&self.label).set(0);
        let names: Vec<String> = self.ranks.values().map(|rank| rank.plan.name.clone()).collect();
        for name in names {
            self.report(name, &RankFigures::default(), false);
        }
        self.note();
    }

    /// Tells every rank and the routers what the page says.
    fn spread(&mut self, page: &Page, healthy: bool) {
        let mut reports = Vec::with_capacity(self.ranks.len());
        let mut asleep = false;
        for (number, rank) in &self.ranks {
            let figures = page.ranks.get(number).cloned().unwrap_or_default();
            asleep |= figures.asleep;
            let computed = figures.prefix_queries.saturating_sub(figures.prefix_hits);
            let start = page.start_time.map(f64::to_bits);
            rank.view.send_if_modified(|view| {
                let changed = view.asleep != figures.asleep || view.computed_tokens != computed || view.start != start;
                view.asleep = figures.asleep;
                view.computed_tokens = computed;
                view.start = start;
                changed
            });
            let label = crate::metrics::SourceLabel {
                source: rank.plan.name.clone(),
            };
            self.around
                .metrics
                .kv_usage
                .get_or_create(&label)
                .set(f64::from(figures.kv_usage));
            reports.push((rank.plan.name.clone(), figures));
        }
        self.around
            .metrics
            .engine_asleep
            .get_or_create(&self.label)
            .set(i64::from(asleep));
        self.around
            .board
            .engine(&self.label.engine, |status| status.asleep = asleep);
        for (name, figures) in reports {
            self.report(name, &figures, healthy);
        }
    }

    fn report(&mut self, source: String, figures: &RankFigures, healthy: bool) {
        self.count += 1;
        self.reporter.soft.report(v1::LoadReport {
            source,
            boot: self.reporter.boot,
            n: self.count,
            running: figures.running,
            waiting: figures.waiting,
            kv_usage: figures.kv_usage,
            preemptions: figures.preemptions,
            healthy,
            asleep: figures.asleep,
            prefix_queries: figures.prefix_queries,
            prefix_hits: figures.prefix_hits,
            age_ms: 0,
        });
    }

    async fn discover(&mut self) {
        let found = match self.refuse_link_local().await {
            Ok(()) => discover(&self.http, &self.config).await,
            Err(error) => Err(error),
        };
        match found {
            Ok(facts) => {
                self.backoff.reset();
                self.next_discovery = Instant::now() + Duration::from_millis(self.around.poll.discovery_ms);
                self.adopt(facts).await;
            }
            Err(error) => {
                self.next_discovery = Instant::now() + self.backoff.delay();
                let text = error.to_string();
                if self.facts.is_none() && self.trouble.as_deref() != Some(text.as_str()) {
                    tracing::warn!(engine = %self.label.engine, error = %text, "waiting for the engine");
                }
                self.trouble = Some(text);
                self.note();
            }
        }
    }

    /// A name may lead to an address that hands out credentials to whoever asks.
    async fn refuse_link_local(&self) -> Result<(), DiscoveryError> {
        if self.config.allow_link_local || self.http.host().parse::<std::net::IpAddr>().is_ok() {
            return Ok(());
        }
        // A name that doesn't resolve is reported by the first request.
        let Ok(addresses) = tokio::net::lookup_host((self.http.host(), 0)).await else {
            return Ok(());
        };
        match addresses.into_iter().find(|address| is_link_local(address.ip())) {
            Some(address) => Err(DiscoveryError::Unusable {
                engine: self.http.base().to_owned(),
                fault: format!(
                    "its name leads to the link-local address {}; set allow_link_local = true if an engine really is there",
                    address.ip()
                ),
            }),
            None => Ok(()),
        }
    }

    /// Makes sources match what was found.
    async fn adopt(&mut self, facts: EngineFacts) {
        if let Some(note) = &facts.events_note {
            let known = self
                .facts
                .as_ref()
                .is_some_and(|old| old.events_note.as_ref() == Some(note));
            if !known {
                tracing::warn!(engine = %self.label.engine, "{note}");
            }
        }
        let pool = if self.config.pool.is_empty() {
            facts.models[0].clone()
        } else {
            self.config.pool.clone()
        };
        let Ok(block_size) = BlockSize::new(self.config.block_size) else {
            return;
        };
        let start = facts.start_time.map(f64::to_bits);
        for (rank, events) in facts.events.iter().enumerate() {
            let rank = u32::try_from(rank).unwrap_or(u32::MAX);
            let plan = Plan {
                name: format!("{}#{rank}", self.http.base()),
                pool: pool.clone(),
                block_size,
                tiers: TIERS.to_vec(),
                capacity_blocks: facts.capacity_blocks,
                multimodal: self.config.multimodal,
                events: events.clone(),
            };
            let spec = Arc::new(self.spec(&facts, &plan, rank));
            match self.ranks.get(&rank) {
                Some(present) if present.plan == plan && !present.task.is_finished() => {
                    present.view.send_if_modified(|view| {
                        let changed = view.spec != spec || view.start != start;
                        view.spec = spec;
                        view.start = start;
                        changed
                    });
                }
                _ => {
                    if let Some(old) = self.ranks.remove(&rank) {
                        stop(old).await;
                    }
                    self.begin(rank, plan, spec, start);
                }
            }
        }
        let count = u32::try_from(facts.events.len()).unwrap_or(u32::MAX);
        for (_, gone) in self.ranks.split_off(&count) {
            self.remove(gone).await;
        }
        self.trouble = None;
        self.facts = Some(facts);
        self.note();
    }

    fn begin(&mut self, rank: u32, plan: Plan, spec: Arc<SourceSpec>, start: Option<u64>) {
        let (view, seen) = watch::channel(EngineView {
            spec,
            start,
            asleep: false,
            computed_tokens: 0,
        });
        let stop = CancellationToken::new();
        let events = plan.events.as_ref().map(|events| events.endpoint.to_string());
        self.around.board.source(&plan.name, |status| {
            status.state = "unregistered";
            status.events = events;
        });
        let task = tokio::spawn(source::run(plan.clone(), seen, self.around.clone(), stop.clone()));
        self.ranks.insert(rank, Rank { plan, view, stop, task });
    }

    fn spec(&self, facts: &EngineFacts, plan: &Plan, rank: u32) -> SourceSpec {
        let mut models = facts.models.clone();
        models.truncate(limits::MODELS_MAX);
        let mut adapters = facts.adapters.clone();
        adapters.truncate(limits::ADAPTERS_MAX);
        SourceSpec {
            name: plan.name.clone(),
            agent: self.reporter.agent.clone(),
            pool: PoolSpec {
                name: plan.pool.clone(),
                models,
                block_size: plan.block_size,
                max_model_len: facts.max_model_len,
                model_root: facts.model_root.clone(),
            },
            worker: WorkerSpec {
                engine_url: self.http.base().to_owned(),
                rank,
                ranks: u32::try_from(facts.events.len()).unwrap_or(u32::MAX),
                host: self.reporter.host.clone(),
                role: self.config.role.resolve(facts.says_prefill),
                engine_kind: facts.kind.as_str().to_owned(),
                engine_block_size: facts.block_size,
                capacity_blocks: facts.capacity_blocks,
                max_num_seqs: facts.max_num_seqs,
                max_batched_tokens: facts.max_batched_tokens,
                adapters,
                bootstrap: self.config.bootstrap.clone().or_else(|| facts.bootstrap.clone()),
            },
            holders: plan
                .tiers
                .iter()
                .map(|tier| HolderSpec {
                    tier: *tier,
                    fetch_unit: facts.block_size,
                    reach: Reach::Worker,
                })
                .collect(),
        }
    }

    /// A rank that the engine no longer has leaves the index.
    async fn remove(&self, rank: Rank) {
        let name = rank.plan.name.clone();
        let known = self
            .around
            .board
            .sources()
            .get(&name)
            .and_then(|s| s.source.zip(s.incarnation));
        stop(rank).await;
        let Some((source, incarnation)) = known else { return };
        let (source, incarnation) = (cairn_index::SourceId(source), cairn_index::Incarnation(incarnation));
        if let Err(error) = self.around.uplink.remove(source, incarnation).await {
            tracing::warn!(source = %name, %error, "a rank that is gone could not be removed; its lease will lapse");
        }
    }

    fn note(&self) {
        let facts = self.facts.as_ref();
        self.around.board.engine(&self.label.engine, |status| {
            status.kind = facts.map(|f| f.kind.as_str().to_owned()).unwrap_or_default();
            status.up = self.up;
            status.pool = self
                .ranks
                .values()
                .next()
                .map(|r| r.plan.pool.clone())
                .unwrap_or_default();
            status.models = facts.map(|f| f.models.clone()).unwrap_or_default();
            status.ranks = u32::try_from(self.ranks.len()).unwrap_or(u32::MAX);
            status.trouble = self
                .trouble
                .clone()
                .or_else(|| facts.and_then(|f| f.events_note.clone()));
        });
    }

    async fn stop_all(&mut self) {
        for (_, rank) in std::mem::take(&mut self.ranks) {
            stop(rank).await;
        }
    }
}

async fn stop(rank: Rank) {
    rank.stop.cancel();
    if let Err(error) = rank.task.await {
        tracing::error!(source = %rank.plan.name, %error, "a source's task broke");
    }
}
