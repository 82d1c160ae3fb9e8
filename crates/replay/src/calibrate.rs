//! Fits the engine model's costs to what a live engine showed: least squares over times to the first token and times
//! between tokens.

use serde::{Deserialize, Serialize};

use crate::engine_model::Timing;

/// One observation of an engine.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sample {
    /// A prompt alone on the engine, none of it cached.
    Prefill {
        /// Its tokens.
        tokens: u32,
        /// From sending it to the first token.
        seconds: f64,
    },
    /// A step in which only answers went on.
    Decode {
        /// How many.
        sequences: u32,
        /// Context tokens of all of them together.
        context: u64,
        /// Between two tokens of one of them.
        seconds: f64,
    },
}

/// What came out.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Fitted {
    /// The model's costs; loads from host memory and transfers are those that were given.
    pub timing: Timing,
    /// Seconds that a request takes besides the engine's step: HTTP, tokens, the way there and back.
    pub door_s: f64,
    /// Half of the samples lie within this part of the fitted line.
    pub off_median: f64,
    /// Samples used.
    pub samples: usize,
}

/// Samples that don't say enough.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CalibrateError {
    /// Too few different amounts of work.
    #[error("{found} different {what} were measured; {needed} are needed to tell the costs apart")]
    TooFew {
        /// Of what.
        what: &'static str,
        /// There are.
        found: usize,
        /// There have to be.
        needed: usize,
    },
    /// Times that no engine has.
    #[error("a sample took {0} microseconds; give times above 0")]
    Time(i64),
}

/// Fixed, per token, per pair, per sequence, per context token, per request.
const COSTS: usize = 6;

impl Sample {
    fn seconds(&self) -> f64 {
        match *self {
            Self::Prefill { seconds, .. } | Self::Decode { seconds, .. } => seconds,
        }
    }

    /// How often each cost is in it.
    fn amounts(&self) -> [f64; COSTS] {
        match *self {
            Self::Prefill { tokens, .. } => {
                let n = f64::from(tokens);
                [1.0, n, n * n / 2.0, 0.0, 0.0, 1.0]
            }
            Self::Decode { sequences, context, .. } => [1.0, 0.0, 0.0, f64::from(sequences), context as f64, 0.0],
        }
    }
}

/// Fits the costs; those of host memory and transfers are taken from `rest`.
pub fn fit(samples: &[Sample], rest: Timing) -> Result<Fitted, CalibrateError> {
    if let Some(odd) = samples.iter().find(|s| !s.seconds().is_finite() || s.seconds() <= 0.0) {
        return Err(CalibrateError::Time((odd.seconds() * 1e6) as i64));
    }
    let distinct = |of: &dyn Fn(&Sample) -> Option<u64>| {
        let mut all: Vec<u64> = samples.iter().filter_map(of).collect();
        all.sort_unstable();
        all.dedup();
        all.len()
    };
    let lengths = distinct(&|s| match *s {
        Sample::Prefill { tokens, .. } => Some(tokens.into()),
        Sample::Decode { .. } => None,
    });
    let batches = distinct(&|s| match *s {
        Sample::Decode { sequences, context, .. } => Some(u64::from(sequences) << 40 | context),
        Sample::Prefill { .. } => None,
    });
    for (what, found) in [("prompt lengths", lengths), ("batches of running answers", batches)] {
        if found < 3 {
            return Err(CalibrateError::TooFew { what, found, needed: 3 });
        }
    }
    // A cost that comes out negative isn't there: the rest is fitted without it.
    let mut used = [true; COSTS];
    let costs = loop {
        let costs = solve(samples, &used);
        match (0..COSTS)
            .filter(|at| costs[*at] < 0.0)
            .min_by(|a, b| costs[*a].total_cmp(&costs[*b]))
        {
            Some(at) => used[at] = false,
            None => break costs,
        }
    };
    let mut off: Vec<f64> = samples
        .iter()
        .map(|s| (dot(&s.amounts(), &costs) / s.seconds() - 1.0).abs())
        .collect();
    off.sort_by(f64::total_cmp);
    let [
        step_base_s,
        prefill_token_s,
        prefill_pair_s,
        decode_sequence_s,
        decode_context_s,
        door_s,
    ] = costs;
    Ok(Fitted {
        timing: Timing {
            step_base_s,
            prefill_token_s,
            prefill_pair_s,
            decode_sequence_s,
            decode_context_s,
            ..rest
        },
        door_s,
        off_median: off[off.len() / 2],
        samples: samples.len(),
    })
}

fn dot(a: &[f64; COSTS], b: &[f64; COSTS]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Least squares of relative errors over the costs in use, by elimination with the largest pivot; columns are scaled first.
fn solve(samples: &[Sample], used: &[bool; COSTS]) -> [f64; COSTS] {
    let mut scale = [0.0f64; COSTS];
    for sample in samples {
        for (scale, amount) in scale.iter_mut().zip(sample.amounts()) {
            *scale = scale.max(amount / sample.seconds());
        }
    }
    let mut rows = [[0.0f64; COSTS + 1]; COSTS];
    for sample in samples {
        let amounts = sample.amounts();
        let of = |at: usize| {
            if used[at] && scale[at] > 0.0 {
                amounts[at] / sample.seconds() / scale[at]
            } else {
                0.0
            }
        };
        for (at, row) in rows.iter_mut().enumerate() {
            for (other, cell) in row.iter_mut().take(COSTS).enumerate() {
                *cell += of(at) * of(other);
            }
            row[COSTS] += of(at);
        }
    }
    for column in 0..COSTS {
        let Some(pivot) = (column..COSTS).max_by(|a, b| rows[*a][column].abs().total_cmp(&rows[*b][column].abs()))
        else {
            continue;
        };
        rows.swap(column, pivot);
        // Nothing speaks of this cost, or it can't be told from another.
        if rows[column][column].abs() < 1e-12 {
            continue;
        }
        let lead = rows[column];
        for (at, row) in rows.iter_mut().enumerate().filter(|(at, _)| *at != column) {
            debug_assert_ne!(at, column);
            let times = row[column] / lead[column];
            row.iter_mut().zip(lead).for_each(|(cell, lead)| *cell -= times * lead);
        }
    }
    let mut costs = [0.0; COSTS];
    for (at, cost) in costs.iter_mut().enumerate() {
        if used[at] && rows[at][at].abs() >= 1e-12 {
            *cost = rows[at][COSTS] / rows[at][at] / scale[at];
        }
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(timing: &Timing, door: f64, noise: f64) -> Vec<Sample> {
        let mut turn = 0u32;
        let mut about = |seconds: f64| {
            turn += 1;
            seconds * (1.0 + noise * (f64::from(turn * 7 % 11) / 5.0 - 1.0))
        };
        let mut out = Vec::new();
        for _ in 0..5 {
            for tokens in [128, 512, 1_024, 2_048, 4_096] {
                let seconds = about(door + timing.step_base_s + timing.prefill_s(0, tokens));
                out.push(Sample::Prefill {
                    tokens: tokens as u32,
                    seconds,
                });
            }
            for (sequences, each) in [(1, 64), (1, 4_096), (4, 64), (8, 64), (8, 2_048)] {
                let one = timing.decode_s(each);
                let seconds = about(timing.step_base_s + one * f64::from(sequences));
                out.push(Sample::Decode {
                    sequences,
                    context: each * u64::from(sequences),
                    seconds,
                });
            }
        }
        out
    }

    #[test]
    fn known_costs_come_out_again() {
        for timing in [Timing::llama_8b_h100(), Timing::llama_70b_8gpu()] {
            let exact = fit(&shown(&timing, 0.002, 0.0), timing).unwrap();
            for (ours, theirs) in [
                (exact.timing.step_base_s, timing.step_base_s),
                (exact.timing.prefill_token_s, timing.prefill_token_s),
                (exact.timing.prefill_pair_s, timing.prefill_pair_s),
                (exact.timing.decode_sequence_s, timing.decode_sequence_s),
                (exact.timing.decode_context_s, timing.decode_context_s),
                (exact.door_s, 0.002),
            ] {
                assert!((ours / theirs - 1.0).abs() < 1e-3, "{exact:?} {timing:?}");
            }
            let noisy = fit(&shown(&timing, 0.002, 0.03), timing).unwrap();
            assert!(
                (noisy.timing.prefill_token_s / timing.prefill_token_s - 1.0).abs() < 0.1,
                "{noisy:?}"
            );
            assert!(
                (noisy.timing.step_base_s / timing.step_base_s - 1.0).abs() < 0.1,
                "{noisy:?}"
            );
            assert!(noisy.off_median < 0.03);
        }
    }

    #[test]
    fn too_little_is_refused_and_no_cost_is_negative() {
        let timing = Timing::llama_8b_h100();
        let some = shown(&timing, 0.0, 0.05);
        assert!(matches!(
            fit(&some[..3], timing),
            Err(CalibrateError::TooFew { found: 0, .. })
        ));
        assert!(matches!(
            fit(
                &[Sample::Prefill {
                    tokens: 1,
                    seconds: 0.0
                }],
                timing
            ),
            Err(CalibrateError::Time(0))
        ));
        let fitted = fit(&some, timing).unwrap();
        assert!(fitted.timing.prefill_pair_s >= 0.0 && fitted.timing.decode_sequence_s >= 0.0 && fitted.door_s >= 0.0);
    }
}
