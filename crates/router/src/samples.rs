//! Compares sampled encodings with the reference encoder, now and then and beside the requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cairn_tokens::SampleReport;

use crate::metrics::Reason;
use crate::state::Router;

/// Pause between two comparisons; a comparison takes a tenth of a second at most for each of a few samples.
const EVERY: Duration = Duration::from_secs(10);

/// Compares for as long as the router lives.
pub(crate) async fn compare(router: Arc<Router>) {
    let mut known: HashMap<String, SampleReport> = HashMap::new();
    loop {
        tokio::time::sleep(EVERY).await;
        let pools: Vec<_> = router
            .tokens
            .iter()
            .filter_map(|slot| Some((slot.key().clone(), slot.value().get()?)))
            .collect();
        for (pool, tokens) in pools {
            let Ok(report) = tokio::task::spawn_blocking(move || tokens.run_samples()).await else {
                continue;
            };
            let before = known.insert(pool.clone(), report).unwrap_or_default();
            // A tokenizer that was loaded anew counts from zero.
            let grown = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
            let different = grown(report.different, before.different);
            let compared = grown(report.compared, before.compared);
            let count = |reason, n| router.metrics.samples.get_or_create(&Reason { reason }).inc_by(n);
            count("same", compared.saturating_sub(different));
            count("different", different);
            if different > 0 {
                tracing::warn!(
                    pool,
                    "the fast encoder gave other ids than the reference one on a sampled prompt; the reference one serves \
                     from now on"
                );
            }
        }
    }
}
