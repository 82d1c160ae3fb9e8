//! The workloads of a quick and of a full run.

use std::path::Path;

use anyhow::Context;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::log::Log;
use crate::simulate::{Caches, simulate};
use crate::trace::{Request, agentic, read};

/// One workload.
pub struct Workload {
    /// Name in the rows.
    pub name: &'static str,
    /// Gzipped trace file and tokens behind each of its ids; none where requests are generated.
    trace: Option<(&'static str, usize)>,
    /// Requests at most.
    requests: usize,
    /// Caches.
    pub caches: Caches,
}

const CONVERSATION: (&str, Option<(&str, usize)>) = ("conversation-16", Some(("mooncake_conversation.jsonl.gz", 512)));
const CHATS: (&str, Option<(&str, usize)>) = ("sharegpt-16", Some(("sharegpt_multiturn_60min_b16.jsonl.gz", 16)));
const AGENTIC: (&str, Option<(&str, usize)>) = ("agentic-16", None);

impl Workload {
    fn new(
        (name, trace): (&'static str, Option<(&'static str, usize)>),
        (workers, capacity): (u32, u32),
        holes: f64,
        requests: usize,
    ) -> Self {
        Self {
            name,
            trace,
            requests,
            caches: Caches {
                workers,
                capacity,
                holes,
            },
        }
    }

    /// The rows that the project's marks are about.
    pub fn quick() -> Vec<Self> {
        let all = usize::MAX;
        vec![
            Self::new(CONVERSATION, (64, 16_384), 0.0, all),
            Self::new(CONVERSATION, (64, 16_384), 0.001, all),
            Self::new(CONVERSATION, (64, 16_384), 1.0, 5_000),
            Self::new(CHATS, (64, 2_048), 0.0, all),
            Self::new(CONVERSATION, (1_000, 4_096), 0.0, 8_000),
            Self::new(AGENTIC, (64, 16_384), 0.0, 2_500),
        ]
    }

    /// More of everything.
    pub fn full() -> Vec<Self> {
        let all = usize::MAX;
        let mut rows = Vec::new();
        for holes in [0.0, 0.001, 1.0] {
            for size in [(8, 65_536), (64, 16_384), (256, 8_192), (1_000, 4_096)] {
                rows.push(Self::new(CONVERSATION, size, holes, all));
            }
            for size in [(8, 8_192), (64, 2_048), (256, 1_024)] {
                rows.push(Self::new(CHATS, size, holes, all));
            }
            for size in [(8, 65_536), (64, 16_384), (256, 16_384)] {
                rows.push(Self::new(AGENTIC, size, holes, 8_000));
            }
        }
        rows
    }

    /// Whether it can be made: its trace is there, or it needs none.
    pub fn available(&self, data: Option<&Path>) -> Result<(), String> {
        let Some((file, _)) = self.trace else { return Ok(()) };
        let Some(folder) = data else {
            return Err(format!(
                "SKIPPED: {}: set CAIRN_DATA=DIR or --data DIR, a folder with {file}",
                self.label()
            ));
        };
        if folder.join(file).exists() {
            return Ok(());
        }
        Err(format!("SKIPPED: {}: {} has no {file}", self.label(), folder.display()))
    }

    /// Name, size and holes.
    pub fn label(&self) -> String {
        let Caches {
            workers,
            capacity,
            holes,
        } = self.caches;
        format!("{} {workers} x {capacity}, holes {}%", self.name, holes * 100.0)
    }

    /// Makes its log.
    pub fn log(&self, data: Option<&Path>) -> anyhow::Result<Log> {
        let mut rng = SmallRng::seed_from_u64(7);
        let requests: Vec<Request> = match self.trace {
            Some((file, id_tokens)) => {
                let folder = data.context("a trace needs its folder")?;
                read(&folder.join(file), id_tokens, self.requests)?
            }
            None => agentic(&mut rng, self.requests),
        };
        Ok(simulate(&self.caches, &requests, &mut rng))
    }
}
