//! An agent that never gives up: it sends numbered batches and remembers what was acknowledged.

use std::collections::BTreeMap;
use std::time::Duration;

use cairn_index::{BatchOutcome, RegisterOutcome};
use cairn_proto::security::AuthChannel;
use cairn_proto::{BatchAnswer, RegisterAnswer, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::Streaming;

use crate::harness::{channel, eventually};

/// Pause between two renewals of a lease.
const RENEW_EVERY: Duration = Duration::from_millis(100);

pub fn spec(name: &str, agent: &str) -> v1::SourceSpec {
    v1::SourceSpec {
        name: format!("http://{name}:8000#0"),
        agent: agent.to_owned(),
        pool: Some(v1::PoolSpec {
            name: "pool".to_owned(),
            models: vec!["model".to_owned()],
            block_size: 16,
            ..Default::default()
        }),
        worker: Some(v1::WorkerSpec {
            engine_url: format!("http://{name}:8000"),
            ranks: 1,
            host: name.to_owned(),
            engine_kind: "vllm".to_owned(),
            engine_block_size: 16,
            ..Default::default()
        }),
        holders: vec![v1::HolderSpec {
            tier: v1::Tier::Gpu.into(),
            fetch_unit: 16,
            reach: Some(v1::holder_spec::Reach::Worker(true)),
        }],
    }
}

pub fn ingest(address: &str) -> v1::ingest_client::IngestClient<AuthChannel> {
    v1::ingest_client::IngestClient::new(channel(address))
}

/// Registers, trying every address until one answers.
pub async fn register(addresses: &[String], spec: &v1::SourceSpec, resume: u64) -> RegisterAnswer {
    eventually("a registration is answered", || async {
        for address in addresses {
            let request = v1::RegisterRequest {
                spec: Some(spec.clone()),
                resume_incarnation: resume,
            };
            if let Ok(reply) = ingest(address).register(request).await {
                return Some(RegisterAnswer::try_from(reply.into_inner()).unwrap());
            }
        }
        None
    })
    .await
}

pub struct Push {
    pub requests: mpsc::Sender<v1::PushRequest>,
    pub replies: Streaming<v1::PushReply>,
}

impl Push {
    pub async fn open(address: &str) -> Result<Self, tonic::Status> {
        let (requests, receiver) = mpsc::channel(64);
        let replies = ingest(address).push(ReceiverStream::new(receiver)).await?.into_inner();
        Ok(Self { requests, replies })
    }

    pub async fn send(&self, batches: Vec<v1::Batch>) {
        let _ = self
            .requests
            .send(v1::PushRequest {
                batches,
                renew: Vec::new(),
            })
            .await;
    }

    pub async fn answers(&mut self) -> Result<Vec<BatchAnswer>, tonic::Status> {
        match self.replies.message().await? {
            Some(reply) => Ok(reply.acks.into_iter().map(|ack| ack.try_into().unwrap()).collect()),
            None => Err(tonic::Status::unavailable("the stream ended")),
        }
    }
}

/// One source and the truth about what it sent.
pub struct Agent {
    pub addresses: Vec<String>,
    pub source: u32,
    pub incarnation: u64,
    pub holder: u32,
    pub worker: u32,
    /// Last acknowledged batch.
    pub acked: u64,
    turn: usize,
}

/// Keys of batch `seq` of a source: one chain of `n` blocks from a root of its own.
pub fn keys(source: u32, seq: u64, n: u64) -> Vec<u64> {
    (1..=n).map(|i| (u64::from(source) << 48) | (seq << 16) | i).collect()
}

pub fn root(source: u32, seq: u64) -> u64 {
    (u64::from(source) << 48) | (seq << 16)
}

impl Agent {
    pub async fn register(addresses: Vec<String>, name: &str) -> Self {
        let spec = spec(name, name);
        let answer = register(&addresses, &spec, 0).await;
        assert!(answer.lease_ms > 0);
        let RegisterOutcome::Registered {
            source,
            incarnation,
            worker,
            holders,
            ..
        } = answer.outcome
        else {
            panic!("{:?}", answer.outcome);
        };
        Self {
            addresses,
            source: source.0,
            incarnation: incarnation.0,
            holder: holders[0].0,
            worker: worker.0,
            acked: 0,
            turn: 0,
        }
    }

    pub fn batch(&self, seq: u64, blocks: u64) -> v1::Batch {
        let store = v1::Store {
            holder: self.holder,
            anchor: root(self.source, seq),
            anchor_depth: 0,
            skip: 0,
            keys: keys(self.source, seq, blocks),
        };
        let op = v1::Op {
            op: Some(v1::op::Op::Store(store)),
        };
        v1::Batch {
            source: self.source,
            incarnation: self.incarnation,
            seq,
            ops: vec![op],
            ..Default::default()
        }
    }

    /// Sends batches up to `upto` and returns when all are acknowledged, through any number of failures.
    pub async fn push_until(&mut self, upto: u64, blocks: u64) {
        let begun = std::time::Instant::now();
        while self.acked < upto {
            assert!(
                begun.elapsed() < crate::harness::PATIENCE * 2,
                "stuck at {} of {upto}",
                self.acked
            );
            let address = self.addresses[self.turn % self.addresses.len()].clone();
            self.turn += 1;
            if self.push_some(&address, upto, blocks).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }

    async fn push_some(&mut self, address: &str, upto: u64, blocks: u64) -> Result<(), tonic::Status> {
        let mut push = Push::open(address).await?;
        let mut sent = self.acked;
        while self.acked < upto {
            while sent < upto && sent < self.acked + 32 {
                sent += 1;
                push.send(vec![self.batch(sent, blocks)]).await;
            }
            let limit = Duration::from_secs(5);
            let answers = tokio::time::timeout(limit, push.answers())
                .await
                .map_err(|_| tonic::Status::deadline_exceeded("no answer"))??;
            for answer in answers {
                match answer.outcome {
                    BatchOutcome::Applied { ref unknown_anchors } => {
                        assert!(unknown_anchors.is_empty());
                        self.acked = self.acked.max(answer.seq.0);
                    }
                    BatchOutcome::Duplicate => self.acked = self.acked.max(answer.seq.0),
                    BatchOutcome::OutOfOrder { expected } => {
                        assert!(expected.0 > self.acked, "an acknowledged batch was lost: {answer:?}");
                        return Err(tonic::Status::aborted("send again from the expected batch"));
                    }
                    BatchOutcome::Fenced { .. } | BatchOutcome::UnknownSource => panic!("{answer:?}"),
                }
            }
        }
        Ok(())
    }

    /// Renews its lease through a node, as a living agent does, until dropped.
    pub fn renewing(&self, address: &str) -> AbortOnDropHandle<()> {
        let (source, incarnation, address) = (self.source, self.incarnation, address.to_owned());
        AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                if let Ok(push) = Push::open(&address).await {
                    let lease = v1::Lease { source, incarnation };
                    let renewal = || v1::PushRequest {
                        batches: Vec::new(),
                        renew: vec![lease],
                    };
                    while push.requests.send(renewal()).await.is_ok() {
                        tokio::time::sleep(RENEW_EVERY).await;
                    }
                }
                tokio::time::sleep(RENEW_EVERY).await;
            }
        }))
    }

    /// Tokens that a node credits this agent's worker with for batch `seq`.
    pub async fn credit(&self, address: &str, seq: u64, blocks: u64) -> Result<u32, tonic::Status> {
        let request = v1::OverlapRequest {
            pool: "pool".to_owned(),
            keys: keys(self.source, seq, blocks),
            prompt_tokens: u32::MAX,
        };
        let mut client = v1::feed_client::FeedClient::new(channel(address));
        let reply = client.overlap(request).await?.into_inner();
        let by_worker: BTreeMap<u32, u32> = reply.workers.iter().map(|w| (w.worker, w.gpu_tokens)).collect();
        Ok(by_worker.get(&self.worker).copied().unwrap_or(0))
    }

    /// Every acknowledged batch is there on a node.
    pub async fn verify(&self, address: &str, blocks: u64) {
        for seq in 1..=self.acked {
            let credit = self.credit(address, seq, blocks).await.unwrap();
            assert_eq!(
                u64::from(credit),
                blocks * 16,
                "batch {seq} of source {} at {address}",
                self.source
            );
        }
    }

    pub async fn audit(&self, address: &str) -> v1::SourceAudit {
        let sources = vec![v1::Lease {
            source: self.source,
            incarnation: self.incarnation,
        }];
        let reply = ingest(address)
            .audit(v1::AuditRequest { sources })
            .await
            .unwrap()
            .into_inner();
        reply.sources[0].clone()
    }
}
