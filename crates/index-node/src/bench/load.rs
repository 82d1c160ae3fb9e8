//! Sources that push batches, on one thread of their own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cairn_proto::security::Credentials;

use super::source::{Content, Pushing, Source};
use super::{BenchError, Options, Shared, Told, failed, gauge};

/// What the sources do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// Store until every source holds its share, or has told everything.
    Fill,
    /// A chain stored and one removed in each batch: at `rate` changes per second over all, or as fast as it goes.
    Push { rate: Option<f64>, length: Duration },
}

/// All sources.
pub(super) struct Load {
    address: SocketAddr,
    shared: Arc<Shared>,
    content: Content,
    /// Changes of a batch of one source, and of the one that it replaces.
    per_batch: usize,
    sources: Vec<Source>,
}

impl Load {
    pub(super) fn new(options: &Options, address: SocketAddr, shared: Arc<Shared>) -> Self {
        let chains = options.memberships / (options.sources * options.chain_blocks).max(1);
        Self {
            address,
            shared,
            content: Content::Chains {
                blocks: options.chain_blocks,
                kept: chains.max(1) as u64,
            },
            per_batch: options.chain_blocks * 2,
            sources: (0..options.sources).map(|i| Source::new("bench", i)).collect(),
        }
    }

    /// Sources that tell what those of a trace told.
    pub(super) fn telling(told: Told, address: SocketAddr, shared: Arc<Shared>) -> Self {
        Self {
            address,
            shared,
            per_batch: 0,
            sources: (0..told.len()).map(|i| Source::new("trace", i)).collect(),
            content: Content::Told(Arc::new(told)),
        }
    }

    /// Runs one phase until everything is acknowledged; gives the CPU that the sources took.
    pub(super) async fn run(&mut self, phase: Phase) -> Result<Duration, BenchError> {
        self.shared.stop.store(false, Ordering::Relaxed);
        let sources = std::mem::take(&mut self.sources);
        let (address, shared, content, per_batch) =
            (self.address, self.shared.clone(), self.content.clone(), self.per_batch);
        let pushing = tokio::task::spawn_blocking(move || {
            let before = gauge::thread_cpu();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(failed)?;
            let sources = runtime.block_on(push_all(sources, address, shared, (content, per_batch), phase))?;
            Ok::<_, BenchError>((sources, gauge::thread_cpu().saturating_sub(before)))
        });
        let (sources, cpu) = pushing.await.map_err(failed)??;
        self.sources = sources;
        Ok(cpu)
    }
}

async fn push_all(
    sources: Vec<Source>,
    address: SocketAddr,
    shared: Arc<Shared>,
    (content, per_batch): (Content, usize),
    phase: Phase,
) -> Result<Vec<Source>, BenchError> {
    let channel = Credentials::default()
        .client_channel(&address.to_string())
        .map_err(failed)?;
    let per_turn = per_batch as f64 * sources.len() as f64;
    let pushing = Pushing {
        channel,
        shared: shared.clone(),
        content,
        fill: matches!(phase, Phase::Fill),
        pause: match phase {
            Phase::Fill | Phase::Push { rate: None, .. } => None,
            Phase::Push { rate: Some(rate), .. } => Some(Duration::from_secs_f64(per_turn / rate.max(1.0))),
        },
    };
    let mut running = tokio::task::JoinSet::new();
    for source in sources {
        running.spawn(source.run(pushing.clone()));
    }
    if let Phase::Push { length, .. } = phase {
        let begun = Instant::now();
        while begun.elapsed() < length && !shared.stop.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        shared.stop.store(true, Ordering::Relaxed);
    }
    let mut sources = Vec::new();
    while let Some(ended) = running.join_next().await {
        sources.push(ended.map_err(failed)??);
    }
    sources.sort_by_key(|source| source.number);
    Ok(sources)
}
