//! Grids over the parameters of policies that have some, so that a baseline is compared at its best. `kv` has none.

use cairn_routing::PolicyConfig;

use crate::report::Run;

/// SageMaker's range of `PrefixLength`, in powers of two.
const PREFIX_LENGTHS: [u32; 7] = [1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536];
/// From "overflow at once" to "never", within SageMaker's range of `ConcurrencyThreshold`.
const THRESHOLDS: [u32; 10] = [1, 2, 3, 4, 8, 16, 32, 64, 256, 1_024];
/// Bounds of `chwbl` in percent of the mean load.
const LOADS: [u32; 6] = [105, 110, 125, 150, 200, 300];
/// Shares of a prompt from which `sticky` sticks.
const CACHED: [u32; 3] = [50, 80, 95];
/// Leads that release `sticky`, in tokens.
const TAUS: [u32; 7] = [2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072];

/// Parameter sets to try; one for policies without parameters.
#[must_use]
pub fn grid(policy: &PolicyConfig) -> Vec<PolicyConfig> {
    match policy {
        PolicyConfig::Prefix { .. } => PREFIX_LENGTHS
            .iter()
            .flat_map(|&prefix_length| {
                THRESHOLDS
                    .iter()
                    .map(move |&concurrency_threshold| PolicyConfig::Prefix {
                        prefix_length,
                        concurrency_threshold,
                    })
            })
            .collect(),
        PolicyConfig::Chwbl { .. } => PREFIX_LENGTHS
            .iter()
            .flat_map(|&prefix_length| {
                LOADS.iter().map(move |&load_percent| PolicyConfig::Chwbl {
                    load_percent,
                    prefix_length,
                })
            })
            .collect(),
        PolicyConfig::Sticky { .. } => CACHED
            .iter()
            .flat_map(|&cached_percent| {
                TAUS.iter().map(move |&tau_tokens| PolicyConfig::Sticky {
                    cached_percent,
                    tau_tokens,
                })
            })
            .collect(),
        PolicyConfig::Kv
        | PolicyConfig::Random
        | PolicyConfig::RoundRobin
        | PolicyConfig::LeastRequests
        | PolicyConfig::LeastTokens
        | PolicyConfig::Session
        | PolicyConfig::MaxHit
        | PolicyConfig::Lmetric => vec![policy.clone()],
    }
}

/// The run with the least 90th percentile, then the least mean.
#[must_use]
pub fn best(runs: &[Run]) -> Option<&Run> {
    let rank = |run: &&Run| (run.ttft_ms.p90, run.ttft_ms.mean);
    runs.iter().min_by(|a, b| {
        let (a, b) = (rank(a), rank(b));
        a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
    })
}
