//! Latency histograms with vLLM's bucket edges, as the Prometheus text format counts them.

/// Edges of `time_to_first_token_seconds` in seconds.
pub(crate) const FIRST_TOKEN_EDGES: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Edges of `inter_token_latency_seconds` in seconds.
pub(crate) const INTER_TOKEN_EDGES: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// Edges of whole-request latencies in seconds.
pub(crate) const REQUEST_EDGES: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];

/// One histogram.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    pub(crate) edges: &'static [f64],
    /// Observations up to each edge and not the edge before; the last is past every edge.
    counts: Vec<u64>,
    pub(crate) sum: f64,
}

impl Histogram {
    fn new(edges: &'static [f64]) -> Self {
        Self {
            edges,
            counts: vec![0; edges.len() + 1],
            sum: 0.0,
        }
    }

    /// Counts one observation in seconds.
    pub(crate) fn observe(&mut self, seconds: f64) {
        let at = self.edges.partition_point(|edge| *edge < seconds);
        self.counts[at] += 1;
        self.sum += seconds;
    }

    /// Observations up to each edge, in the order of the edges, then all of them.
    pub(crate) fn cumulative(&self) -> impl Iterator<Item = u64> + '_ {
        self.counts.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        })
    }
}

/// The histograms of one rank.
#[derive(Clone, Debug)]
pub(crate) struct Histograms {
    pub(crate) first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) request: Histogram,
}

impl Default for Histograms {
    fn default() -> Self {
        Self {
            first_token: Histogram::new(FIRST_TOKEN_EDGES),
            inter_token: Histogram::new(INTER_TOKEN_EDGES),
            queue: Histogram::new(REQUEST_EDGES),
            request: Histogram::new(REQUEST_EDGES),
        }
    }
}
