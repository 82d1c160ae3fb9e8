//! Tells an index which mock engine holds which shared start, as an agent would, and keeps its leases alive.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use cairn_blocks::{BlockKey, BlockSize, Chain, ClusterSeed, Namespace};
use cairn_proto::security::{AuthChannel, Security};
use cairn_proto::v1::ingest_client::IngestClient;
use cairn_proto::v1::{self, register_reply::Outcome};
use cairn_tokens::{ChatRequest, ModelTokens};
use http::Method;
use serde_json::json;
use tokio_stream::wrappers::ReceiverStream;

use super::prompts::{self, MODEL, Prompts, Sharing};
use crate::inspect::ask_http;

/// Sizes of bodies whose shared starts are stored.
const SIZES: [usize; 2] = [2048, 32_768];
/// How often leases are renewed.
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// Longest wait for the router to see the stored starts.
const SEEN_TIMEOUT: Duration = Duration::from_secs(20);

/// Registered sources; their leases lapse when this is dropped.
pub struct Holders {
    renewing: tokio::task::JoinHandle<()>,
}

impl Drop for Holders {
    fn drop(&mut self) {
        self.renewing.abort();
    }
}

impl Holders {
    /// Registers one source for each engine and stores the shared starts, spread over them.
    pub async fn register(index: &str, engines: &[String]) -> anyhow::Result<Self> {
        let credentials = Security::default()
            .load()
            .context("no security is needed on loopback")?;
        let channel = credentials.client_channel(index).context("the index's address")?;
        let mut client = IngestClient::new(channel);
        let mut sources = Vec::new();
        for engine in engines {
            sources.push(register(&mut client, engine).await?);
        }
        let seed = ClusterSeed(sources.first().context("there are engines")?.cluster_seed);
        let starts = shared_starts(seed)?;
        let mut batches = Vec::new();
        for (i, source) in sources.iter().enumerate() {
            let mut ops = vec![v1::Op {
                op: Some(v1::op::Op::Confidence(v1::DegradedReason::None.into())),
            }];
            ops.extend(
                starts
                    .iter()
                    .skip(i)
                    .step_by(sources.len())
                    .map(|(root, keys)| store(source.holders[0], *root, keys)),
            );
            // Batches are bounded by keys: each start travels alone.
            for (seq, op) in ops.into_iter().enumerate() {
                batches.push(v1::Batch {
                    source: source.source,
                    incarnation: source.incarnation,
                    seq: seq as u64 + 1,
                    ops: vec![op],
                    ..v1::Batch::default()
                });
            }
        }
        let leases = sources
            .iter()
            .map(|s| v1::Lease {
                source: s.source,
                incarnation: s.incarnation,
            })
            .collect();
        let renewing = push(client, batches, leases).await?;
        Ok(Self { renewing })
    }

    /// Waits until the router credits an engine with a start of each size.
    pub async fn wait_until_seen(&self, router: &str) -> anyhow::Result<()> {
        let deadline = Instant::now() + SEEN_TIMEOUT;
        for bytes in SIZES {
            let body = Bytes::from(Prompts::new(7, bytes, Sharing::Shared, false).next_body());
            loop {
                let answer =
                    ask_http::json(Method::POST, &format!("{router}/cairn/explain"), None, body.clone()).await?;
                let best = answer["candidates"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(|c| c["gpu_tokens"].as_u64())
                    .max();
                if best.unwrap_or(0) > 0 {
                    break;
                }
                if Instant::now() > deadline {
                    bail!("the router credits no engine with a shared start of {bytes} bytes: {answer}");
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(())
    }
}

async fn register(client: &mut IngestClient<AuthChannel>, engine: &str) -> anyhow::Result<v1::Registered> {
    let spec = v1::SourceSpec {
        name: format!("{engine}#0"),
        agent: "bench".into(),
        pool: Some(v1::PoolSpec {
            name: MODEL.into(),
            models: vec![MODEL.into()],
            block_size: BlockSize::DEFAULT.tokens(),
            max_model_len: 131_072,
            model_root: "cairn:embedded".into(),
        }),
        worker: Some(v1::WorkerSpec {
            engine_url: engine.into(),
            ranks: 1,
            host: "bench".into(),
            engine_kind: "vllm".into(),
            engine_block_size: BlockSize::DEFAULT.tokens(),
            capacity_blocks: 1 << 20,
            max_num_seqs: 256,
            max_batched_tokens: 8192,
            ..v1::WorkerSpec::default()
        }),
        holders: vec![v1::HolderSpec {
            tier: v1::Tier::Gpu.into(),
            fetch_unit: BlockSize::DEFAULT.tokens(),
            reach: Some(v1::holder_spec::Reach::Worker(true)),
        }],
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let request = v1::RegisterRequest {
            spec: Some(spec.clone()),
            resume_incarnation: 0,
        };
        match client.register(request).await {
            Ok(reply) => match reply.into_inner().outcome {
                Some(Outcome::Registered(registered)) => return Ok(registered),
                other => bail!("the index refused {engine}: {other:?}"),
            },
            // A fresh node needs a moment to elect itself.
            Err(status) if Instant::now() < deadline => {
                tracing::debug!(%status, "registering again");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(status) => return Err(status).with_context(|| format!("registering {engine}")),
        }
    }
}

fn store(holder: u32, root: BlockKey, keys: &[BlockKey]) -> v1::Op {
    let keys = keys.iter().map(|k| k.0).collect();
    v1::Op {
        op: Some(v1::op::Op::Store(v1::Store {
            holder,
            anchor: root.0,
            anchor_depth: 0,
            skip: 0,
            keys,
        })),
    }
}

/// For each shared start: its chain's root and the blocks that every prompt of it begins with.
fn shared_starts(seed: ClusterSeed) -> anyhow::Result<Vec<(BlockKey, Vec<BlockKey>)>> {
    let tokens = ModelTokens::embedded()?;
    let root = Namespace {
        seed,
        pool: MODEL,
        block_size: BlockSize::DEFAULT,
        adapter: "",
        salt: "",
    }
    .root();
    let mut starts = Vec::new();
    for bytes in SIZES {
        for system in prompts::system_messages(bytes) {
            let chain = |user: &str| -> anyhow::Result<Vec<BlockKey>> {
                let body =
                    json!({"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]});
                let prompt = tokens.encode_chat(&ChatRequest::from_body(&body)?)?;
                Ok(Chain::new(root, BlockSize::DEFAULT, &prompt.ids, &[]).keys)
            };
            let (one, other) = (
                chain("a quite different ending of this prompt")?,
                chain("0123456789 and something else")?,
            );
            let keys: Vec<BlockKey> = one
                .iter()
                .zip(&other)
                .take_while(|(a, b)| a == b)
                .map(|(a, _)| *a)
                .collect();
            starts.push((root, keys));
        }
    }
    Ok(starts)
}

async fn push(
    mut client: IngestClient<AuthChannel>,
    batches: Vec<v1::Batch>,
    leases: Vec<v1::Lease>,
) -> anyhow::Result<tokio::task::JoinHandle<()>> {
    let expected = batches.len();
    let (send, receive) = tokio::sync::mpsc::channel(16);
    let mut replies = client
        .push(ReceiverStream::new(receive))
        .await
        .context("opening the push stream")?
        .into_inner();
    for batch in batches.chunks(8) {
        let request = v1::PushRequest {
            batches: batch.to_vec(),
            renew: leases.clone(),
        };
        send.send(request).await.context("the index closed the push stream")?;
    }
    let mut acknowledged = 0;
    while acknowledged < expected {
        let reply = replies
            .message()
            .await
            .context("waiting for acknowledgements")?
            .context("the push stream ended")?;
        for ack in &reply.acks {
            if !matches!(&ack.outcome, Some(v1::batch_ack::Outcome::Applied(a)) if a.unknown_anchors.is_empty()) {
                bail!("the index did not apply batch {}: {:?}", ack.seq, ack.outcome);
            }
        }
        acknowledged += reply.acks.len();
    }
    Ok(tokio::spawn(async move {
        loop {
            tokio::time::sleep(RENEW_EVERY).await;
            let renewal = v1::PushRequest {
                batches: Vec::new(),
                renew: leases.clone(),
            };
            if send.send(renewal).await.is_err() || send.is_closed() {
                return;
            }
            // Replies are read so that the stream's window never fills.
            while let Ok(Ok(Some(_))) = tokio::time::timeout(Duration::from_millis(1), replies.message()).await {}
        }
    }))
}

/// Speed of tokenizing text that no cache has seen, on one core.
pub fn tokenised_mb_per_s() -> anyhow::Result<f64> {
    let tokens = ModelTokens::embedded()?;
    let mut bodies = Prompts::new(99, 32_768, Sharing::Unique, false);
    let texts: Vec<String> = (0..64)
        .map(|_| String::from_utf8_lossy(&bodies.next_body()).into_owned())
        .collect();
    let bytes: usize = texts.iter().map(String::len).sum();
    let begun = Instant::now();
    for text in &texts {
        std::hint::black_box(tokens.encode_prompt(text, false)?);
    }
    let value: f64 = bytes as f64 / 1e6 / begun.elapsed().as_secs_f64();
    Ok((value * 10.0).round() / 10.0)
}
