//! What an engine's metrics page says: load figures by rank, cache shape, sleep, process start.

use std::collections::BTreeMap;

use crate::engine_http::{EngineHttp, EngineHttpError};
use crate::prometheus_text::{Reader, Sample};

/// Ranks of one engine that are told apart; more are left out.
pub const MAX_RANKS: u32 = 256;

/// Names read from the page, of every engine family and version.
const WANTED: &[&str] = &[
    "process_start_time_seconds",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:engine_sleep_state",
    "vllm:cache_config_info",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:num_retracted_requests_total",
    "sglang:prompt_tokens_total",
    "sglang:cached_tokens_total",
];

/// One rank's figures.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankFigures {
    /// Sequences being computed.
    pub running: u32,
    /// Sequences waiting.
    pub waiting: u32,
    /// Share of blocks that running sequences pin, 0 to 1.
    pub kv_usage: f32,
    /// Preemptions since the engine started.
    pub preemptions: u64,
    /// Prompt tokens looked up in the prefix cache since the engine started.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Asleep: its cache is empty or out of reach.
    pub asleep: bool,
    /// Engine block size in tokens, where said.
    pub block_size: Option<u32>,
    /// Blocks of that size, where said.
    pub blocks: Option<u64>,
}

/// One page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// Unix seconds at which the process started.
    pub start_time: Option<f64>,
    /// By rank.
    pub ranks: BTreeMap<u32, RankFigures>,
    /// Engine family by the names on the page.
    pub family: Option<&'static str>,
    /// Lines of wanted metrics that couldn't be read.
    pub malformed: u64,
}

impl Page {
    /// Asks an engine for its page.
    ///
    /// # Errors
    /// When it doesn't answer.
    pub async fn fetch(http: &EngineHttp) -> Result<Self, EngineHttpError> {
        let mut page = Self::default();
        let mut reader = Reader::new(WANTED);
        http.page("/metrics", &mut |chunk| {
            reader.push(chunk, &mut |sample| page.take(&sample))
        })
        .await?;
        let skipped = reader.finish(&mut |sample| page.take(&sample));
        page.malformed += skipped;
        Ok(page)
    }

    fn take(&mut self, sample: &Sample) {
        let value = sample.value;
        if sample.name == "process_start_time_seconds" {
            self.start_time = Some(value);
            return;
        }
        let (family, name) = match sample.name.split_once(':') {
            Some(("vllm", name)) => ("vllm", name),
            Some(("sglang", name)) => ("sglang", name),
            _ => return,
        };
        self.family = Some(family);
        // SGLang repeats a rank's figures for each of its tensor-parallel processes.
        if sample
            .label("tp_rank")
            .is_some_and(|rank| rank != "0" && !rank.is_empty() && sample.label("dp_rank").is_none())
        {
            return;
        }
        let rank = sample
            .label("engine")
            .or_else(|| sample.label("dp_rank"))
            .and_then(|r| r.parse().ok())
            .unwrap_or(0);
        if rank >= MAX_RANKS {
            self.malformed += 1;
            return;
        }
        let figures = self.ranks.entry(rank).or_default();
        match name {
            "num_requests_running" | "num_running_reqs" => figures.running = small(value),
            "num_requests_waiting" | "num_queue_reqs" => figures.waiting = small(value),
            "kv_cache_usage_perc" | "gpu_cache_usage_perc" | "token_usage" => figures.kv_usage = share(value),
            "num_preemptions_total" | "num_retracted_requests_total" => figures.preemptions = count(value),
            "prefix_cache_queries_total" | "gpu_prefix_cache_queries_total" => figures.prefix_queries = count(value),
            "prefix_cache_hits_total" | "gpu_prefix_cache_hits_total" | "cached_tokens_total" => {
                figures.prefix_hits = count(value);
            }
            // Only where the family has no lookup counter of its own.
            "prompt_tokens_total" if family == "sglang" => figures.prefix_queries = count(value),
            "engine_sleep_state" => {
                figures.asleep |= value > 0.0 && sample.label("sleep_state").is_some_and(|state| state != "awake");
            }
            "cache_config_info" => {
                figures.block_size = sample.label("block_size").and_then(|v| v.parse().ok());
                figures.blocks = sample.label("num_gpu_blocks").and_then(|v| v.parse().ok());
            }
            _ => {}
        }
    }
}

fn small(value: f64) -> u32 {
    if value.is_finite() {
        value.clamp(0.0, f64::from(u32::MAX)) as u32
    } else {
        0
    }
}

fn count(value: f64) -> u64 {
    if value.is_finite() && value > 0.0 {
        value as u64
    } else {
        0
    }
}

fn share(value: f64) -> f32 {
    if value.is_finite() {
        value.clamp(0.0, 1.0) as f32
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str) -> Page {
        let mut page = Page::default();
        let mut reader = Reader::new(WANTED);
        reader.push(text.as_bytes(), &mut |sample| page.take(&sample));
        let skipped = reader.finish(&mut |sample| page.take(&sample));
        page.malformed += skipped;
        page
    }

    #[test]
    fn vllm_figures_are_told_apart_by_rank() {
        let page = page(
            "process_start_time_seconds 1.7e9\n\
             vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n\
             vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 5.0\n\
             vllm:num_requests_waiting{engine=\"1\",model_name=\"m\"} 2.0\n\
             vllm:kv_cache_usage_perc{engine=\"1\"} 0.25\n\
             vllm:cache_config_info{block_size=\"32\",engine=\"0\",num_gpu_blocks=\"1023\"} 1.0\n\
             vllm:cache_config_info{block_size=\"32\",engine=\"1\",num_gpu_blocks=\"None\"} 1.0\n\
             vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 0.0\n\
             vllm:engine_sleep_state{engine=\"0\",sleep_state=\"weights_offloaded\"} 1.0\n\
             vllm:engine_sleep_state{engine=\"1\",sleep_state=\"awake\"} 1.0\n\
             vllm:engine_sleep_state{engine=\"1\",sleep_state=\"discard_all\"} 0.0\n",
        );
        assert_eq!(page.family, Some("vllm"));
        assert_eq!(page.start_time, Some(1.7e9));
        assert_eq!(
            (page.ranks[&0].running, page.ranks[&1].running, page.ranks[&1].waiting),
            (3, 5, 2)
        );
        assert_eq!(
            (page.ranks[&0].block_size, page.ranks[&0].blocks),
            (Some(32), Some(1023))
        );
        assert_eq!(page.ranks[&1].blocks, None);
        assert!(page.ranks[&0].asleep && !page.ranks[&1].asleep);
    }

    #[test]
    fn sglang_figures_come_from_its_own_names() {
        let page = page(
            "sglang:num_running_reqs{model_name=\"m\",tp_rank=\"0\"} 4\n\
             sglang:num_running_reqs{model_name=\"m\",tp_rank=\"1\"} 9\n\
             sglang:num_queue_reqs{model_name=\"m\"} 1\nsglang:token_usage{model_name=\"m\"} 0.5\n\
             sglang:prompt_tokens_total{model_name=\"m\"} 1000\n",
        );
        assert_eq!(page.family, Some("sglang"));
        let rank = &page.ranks[&0];
        assert_eq!((rank.running, rank.waiting, rank.prefix_queries), (4, 1, 1000));
    }

    #[test]
    fn absurd_values_and_ranks_do_no_harm() {
        let page = page(
            "vllm:num_requests_running{engine=\"4000000\"} 1\nvllm:num_requests_running NaN\n\
             vllm:num_requests_waiting 1e300\nvllm:kv_cache_usage_perc -4\n",
        );
        assert_eq!(page.ranks.len(), 1);
        assert_eq!((page.ranks[&0].running, page.ranks[&0].waiting), (0, u32::MAX));
        assert_eq!(page.malformed, 1);
    }
}
