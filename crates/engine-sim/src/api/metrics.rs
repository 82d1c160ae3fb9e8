//! `/metrics` with vLLM's names, or SGLang's where that is imitated.

use std::fmt::Write as _;

use super::Failure;
use crate::engine::Engine;
use crate::histogram::Histogram;
use crate::rank::Snapshot;

/// Reads a count of a rank.
type Count = fn(&Snapshot) -> u64;
/// Reads a figure of a rank.
type Value = fn(&Snapshot) -> f64;

/// Writes one page.
struct Page<'a> {
    text: String,
    model: &'a str,
    snapshots: &'a [Snapshot],
}

impl Page<'_> {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One sample for each rank.
    fn ranks(&mut self, name: &str, kind: &str, help: &str, value: impl Fn(&Snapshot) -> f64) {
        self.head(name, kind, help);
        for (rank, snapshot) in self.snapshots.iter().enumerate() {
            let _ = writeln!(
                self.text,
                "{name}{{engine=\"{rank}\",model_name=\"{}\"}} {}",
                self.model,
                value(snapshot)
            );
        }
    }

    /// One sample for each rank and value of a further label.
    fn split(&mut self, name: &str, kind: &str, help: &str, label: &str, values: &[(&str, Count)]) {
        self.head(name, kind, help);
        for (rank, snapshot) in self.snapshots.iter().enumerate() {
            for (value, of) in values {
                let model = self.model;
                let _ = writeln!(
                    self.text,
                    "{name}{{engine=\"{rank}\",model_name=\"{model}\",{label}=\"{value}\"}} {}",
                    of(snapshot)
                );
            }
        }
    }

    fn histogram(&mut self, name: &str, help: &str, of: impl Fn(&Snapshot) -> &Histogram) {
        self.head(name, "histogram", help);
        for (rank, snapshot) in self.snapshots.iter().enumerate() {
            let histogram = of(snapshot);
            let labels = format!("engine=\"{rank}\",model_name=\"{}\"", self.model);
            let edges = histogram
                .edges
                .iter()
                .map(|edge| format!("{edge:?}"))
                .chain(["+Inf".to_owned()]);
            let mut all = 0;
            for (edge, count) in edges.zip(histogram.cumulative()) {
                all = count;
                let _ = writeln!(self.text, "{name}_bucket{{{labels},le=\"{edge}\"}} {count}");
            }
            let _ = writeln!(
                self.text,
                "{name}_sum{{{labels}}} {}\n{name}_count{{{labels}}} {all}",
                histogram.sum
            );
        }
    }
}

/// The whole page.
pub(super) async fn page(engine: &Engine) -> Result<String, Failure> {
    let life = engine.life();
    let mut snapshots = Vec::with_capacity(life.ranks.len());
    for rank in &life.ranks {
        snapshots.push(rank.snapshot().await?);
    }
    let model = engine
        .config
        .model
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    let mut page = Page {
        text: String::with_capacity(16 << 10),
        model: &model,
        snapshots: &snapshots,
    };
    page.head(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since unix epoch in seconds.",
    );
    let _ = writeln!(page.text, "process_start_time_seconds {:.2}", life.started);
    if engine.config.events.wire.is_sglang() {
        sglang(&mut page);
    } else {
        load(&mut page);
        cache(&mut page, engine);
        work(&mut page);
    }
    Ok(page.text)
}

fn load(page: &mut Page<'_>) {
    page.ranks(
        "vllm:num_requests_running",
        "gauge",
        "Requests in the running batch.",
        |s| s.gauges.running as f64,
    );
    let waiting = |s: &Snapshot| (s.gauges.waiting + s.gauges.loading) as f64;
    page.ranks("vllm:num_requests_waiting", "gauge", "Requests that wait.", waiting);
    page.split(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "Requests that wait, by reason.",
        "reason",
        &[
            ("capacity", |s| s.gauges.waiting as u64),
            ("deferred", |s| s.gauges.loading as u64),
        ],
    );
    page.ranks(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share of blocks in use; 1 is all.",
        |s| s.gauges.kv_usage,
    );
    page.ranks("vllm:num_preemptions_total", "counter", "Preemptions.", |s| {
        s.counters.preemptions as f64
    });
}

fn cache(page: &mut Page<'_>, engine: &Engine) {
    let tokens = |name: &str| format!("vllm:{name}_total");
    page.ranks(
        &tokens("prefix_cache_queries"),
        "counter",
        "Tokens asked of the prefix cache.",
        |s| s.counters.prefix_queries as f64,
    );
    page.ranks(
        &tokens("prefix_cache_hits"),
        "counter",
        "Tokens found in the prefix cache.",
        |s| s.counters.prefix_hits as f64,
    );
    page.ranks(
        &tokens("external_prefix_cache_queries"),
        "counter",
        "Tokens asked of tiers and peers.",
        |s| s.counters.external_queries as f64,
    );
    page.ranks(
        &tokens("external_prefix_cache_hits"),
        "counter",
        "Tokens found in tiers and peers.",
        |s| (s.counters.cpu_hits + s.counters.remote_hits) as f64,
    );
    let config = &engine.config;
    page.head("vllm:cache_config_info", "gauge", "Shape of the cache.");
    for rank in 0..page.snapshots.len() {
        let _ = writeln!(
            page.text,
            "vllm:cache_config_info{{block_size=\"{}\",enable_prefix_caching=\"{}\",engine=\"{rank}\",\
             kv_cache_size_tokens=\"{}\",num_gpu_blocks=\"{}\",prefix_caching_hash_algo=\"simulated\"}} 1",
            config.cache.block_size,
            if config.cache.prefix_caching { "True" } else { "False" },
            u64::from(config.cache.gpu_blocks - 1) * u64::from(config.cache.block_size),
            config.cache.gpu_blocks,
        );
    }
    let asleep = engine.sleeping.load(std::sync::atomic::Ordering::Relaxed);
    page.head(
        "vllm:engine_sleep_state",
        "gauge",
        "1 in the state that the engine is in.",
    );
    for rank in 0..page.snapshots.len() {
        for (state, on) in [
            ("awake", !asleep),
            ("weights_offloaded", asleep),
            ("discard_all", false),
        ] {
            let (model, on) = (page.model, u8::from(on));
            let _ = writeln!(
                page.text,
                "vllm:engine_sleep_state{{engine=\"{rank}\",model_name=\"{model}\",sleep_state=\"{state}\"}} {on}"
            );
        }
    }
}

fn work(page: &mut Page<'_>) {
    page.ranks("vllm:prompt_tokens_total", "counter", "Prompt tokens.", |s| {
        s.counters.prompt_tokens as f64
    });
    page.ranks("vllm:generation_tokens_total", "counter", "Tokens generated.", |s| {
        s.counters.generation_tokens as f64
    });
    page.split(
        "vllm:prompt_tokens_by_source_total",
        "counter",
        "Prompt tokens by where their KV came from.",
        "source",
        &[
            ("local_compute", |s| {
                let c = &s.counters;
                c.prompt_tokens
                    .saturating_sub(c.prefix_hits + c.cpu_hits + c.remote_hits)
            }),
            ("local_cache_hit", |s| s.counters.prefix_hits),
            ("external_kv_transfer", |s| s.counters.cpu_hits + s.counters.remote_hits),
        ],
    );
    page.split(
        "vllm:prompt_tokens_cached_by_source_total",
        "counter",
        "Cached prompt tokens by tier.",
        "source",
        &[
            ("device", |s| s.counters.prefix_hits),
            ("host", |s| s.counters.cpu_hits),
            ("p2p", |s| s.counters.remote_hits),
        ],
    );
    page.split(
        "vllm:request_success_total",
        "counter",
        "Requests by their end.",
        "finished_reason",
        &[
            ("stop", |s| s.counters.finished_stop),
            ("length", |s| s.counters.finished_length),
            ("abort", |s| s.counters.finished_abort),
        ],
    );
    let first = "vllm:time_to_first_token_seconds";
    page.histogram(first, "Time to the first token.", |s| &s.histograms.first_token);
    let between = "vllm:inter_token_latency_seconds";
    page.histogram(between, "Time between tokens.", |s| &s.histograms.inter_token);
    page.histogram("vllm:request_queue_time_seconds", "Time in the queue.", |s| {
        &s.histograms.queue
    });
    page.histogram("vllm:e2e_request_latency_seconds", "Time of whole requests.", |s| {
        &s.histograms.request
    });
}

fn sglang(page: &mut Page<'_>) {
    let names: [(&str, &str, Value); 6] = [
        ("sglang:num_running_reqs", "gauge", |s| s.gauges.running as f64),
        ("sglang:num_queue_reqs", "gauge", |s| {
            (s.gauges.waiting + s.gauges.loading) as f64
        }),
        ("sglang:token_usage", "gauge", |s| s.gauges.kv_usage),
        ("sglang:num_retracted_requests_total", "counter", |s| {
            s.counters.preemptions as f64
        }),
        ("sglang:prompt_tokens_total", "counter", |s| {
            s.counters.prompt_tokens as f64
        }),
        ("sglang:cached_tokens_total", "counter", |s| {
            (s.counters.prefix_hits + s.counters.cpu_hits + s.counters.remote_hits) as f64
        }),
    ];
    for (name, kind, value) in names {
        page.head(name, kind, "As the engine counts it.");
        for (rank, snapshot) in page.snapshots.iter().enumerate() {
            let model = page.model;
            let _ = writeln!(
                page.text,
                "{name}{{dp_rank=\"{rank}\",model_name=\"{model}\",tp_rank=\"0\"}} {}",
                value(snapshot)
            );
        }
    }
}
