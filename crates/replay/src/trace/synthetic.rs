//! Synthetic workloads, drawn from a seed: long shared contexts, short chats, retrieval, coding agents, and the published
//! 8,000-token one. Mathematical functions come from `libm`, not from the platform, so that a seed gives the same bytes
//! everywhere.

use super::{Builder, Row, Trace};
use crate::engine_model::{Micros, Timing};

/// Names that [`synthetic`] knows.
pub const SYNTHETIC_NAMES: [&str; 5] = ["longctx", "chat", "rag", "agent", "sagemaker-8k"];

/// Tokens for each block id.
const BLOCK: u32 = 16;

/// SplitMix64 with the few distributions that the recipes need.
pub(super) struct Draw(u64);

impl Draw {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        let z = super::mix(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    pub(super) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * libm::log(1.0 - self.unit())
    }

    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * libm::log(1.0 - self.unit())).sqrt();
        radius * libm::cos(2.0 * std::f64::consts::PI * self.unit())
    }

    fn lognormal(&mut self, mu: f64, sigma: f64, low: f64, high: f64) -> u32 {
        libm::exp(mu + sigma * self.normal()).max(low).min(high) as u32
    }

    fn integer(&mut self, low: u32, high: u32) -> u32 {
        low + (self.unit() * f64::from(high - low + 1)) as u32
    }

    /// The first place of a cumulative table that a draw doesn't pass.
    fn zipf(&mut self, cumulative: &[f64]) -> usize {
        let at = self.unit() * cumulative.last().copied().unwrap_or(0.0);
        cumulative.partition_point(|sum| *sum < at).min(cumulative.len() - 1)
    }
}

fn zipf_table(count: usize, exponent: f64) -> Vec<f64> {
    let mut sum = 0.0;
    let weights = (1..=count).map(|k| {
        sum += libm::pow(k as f64, -exponent);
        sum
    });
    weights.collect()
}

/// Streams of one kind don't meet those of another.
fn stream(kind: u64, number: usize) -> u64 {
    kind << 48 | number as u64
}

/// A workload by name; `None` for names that aren't known. `seed` 0 takes the recipe's own.
#[must_use]
pub fn synthetic(name: &str, seed: u64) -> Option<Trace> {
    let own = |recipe: u64| if seed == 0 { recipe } else { seed };
    let builder = match name {
        "longctx" => long_context(own(1), &LONG_CONTEXT),
        "sagemaker-8k" => long_context(own(1), &PUBLISHED),
        "chat" => chat(own(2)),
        "rag" => rag(own(3)),
        "agent" => agent(own(4)),
        _ => return None,
    };
    let mut trace = builder.build(&format!("synthetic:{name}"), BLOCK);
    if name == "sagemaker-8k" {
        trace.timing = Some(published_timing());
    }
    Some(trace)
}

/// Costs of the published engines: a prompt of 8,000 known tokens and a question of 92 takes 63 ms, one of 8,092 unknown
/// tokens 280 ms, so 27 us a token and 60.5 ms around them. Nothing was said of decoding, and answers here are one token.
fn published_timing() -> Timing {
    Timing {
        step_base_s: 0.0605,
        prefill_token_s: 27.1e-6,
        prefill_pair_s: 0.0,
        ..Timing::llama_8b_h100()
    }
}

/// Requests of a common prefix and a question of their own.
struct LongContext {
    /// Prefixes that are in use at one time.
    prefixes: usize,
    /// Requests of one prefix after which another takes its place, alternately one less; 0 for no end.
    uses: u32,
    prefix_tokens: u32,
    per_s: f64,
    seconds: f64,
    question: (u32, u32),
    answer: (u32, u32),
}

impl LongContext {
    /// Requests that a prefix gets; 0 counts down for ever.
    fn lives(&self, prefix: usize) -> u32 {
        self.uses.saturating_sub(prefix as u32 % 2)
    }
}

const LONG_CONTEXT: LongContext = LongContext {
    prefixes: 512,
    uses: 0,
    prefix_tokens: 8_000,
    per_s: 7.0,
    seconds: 3_600.0,
    question: (64, 512),
    answer: (128, 384),
};

/// Each 8,000-token prefix comes about 5.5 times.
const PUBLISHED: LongContext = LongContext {
    prefixes: 100,
    uses: 6,
    prefix_tokens: 8_000,
    per_s: 8.1,
    seconds: 680.0,
    question: (24, 160),
    answer: (1, 1),
};

fn long_context(seed: u64, shape: &LongContext) -> Builder {
    let (mut draw, mut builder, mut questions) = (Draw::new(seed), Builder::new(), 0);
    let popularity = zipf_table(shape.prefixes, 0.0);
    // Each place's present prefix, and how often it will still come.
    let mut places: Vec<(usize, u32)> = (0..shape.prefixes).map(|at| (at, shape.lives(at))).collect();
    let mut fresh = shape.prefixes;
    let mut at = draw.exponential(1.0 / shape.per_s);
    while at < shape.seconds {
        let place = draw.zipf(&popularity);
        let which = places[place].0;
        places[place].1 = places[place].1.wrapping_sub(1);
        if places[place].1 == 0 {
            places[place] = (fresh, shape.lives(fresh));
            fresh += 1;
        }
        let question = draw.integer(shape.question.0, shape.question.1);
        let answer = draw.integer(shape.answer.0, shape.answer.1);
        questions += 1;
        let segments = [
            (stream(1, which), shape.prefix_tokens),
            (stream(2, questions), question),
        ];
        row(&mut builder, at, answer, &segments, &format!("p{which}"));
        at += draw.exponential(1.0 / shape.per_s);
    }
    builder
}

fn rag(seed: u64) -> Builder {
    let (mut draw, mut builder, mut questions) = (Draw::new(seed), Builder::new(), 0);
    let popularity = zipf_table(400, 0.9);
    let lengths: Vec<u32> = (0..400).map(|_| draw.lognormal(8.6, 0.6, 512.0, 32_000.0)).collect();
    let mut at = draw.exponential(0.25);
    while at < 1_800.0 {
        let document = draw.zipf(&popularity);
        let (question, answer) = (draw.integer(24, 160), draw.integer(64, 400));
        questions += 1;
        let segments = [
            (stream(1, 0), 320),
            (stream(2, document), lengths[document]),
            (stream(3, questions), question),
        ];
        row(&mut builder, at, answer, &segments, &format!("d{document}"));
        at += draw.exponential(0.25);
    }
    builder
}

fn chat(seed: u64) -> Builder {
    let (mut draw, mut builder) = (Draw::new(seed), Builder::new());
    let mut start = draw.exponential(0.5);
    let mut session = 0;
    while start < 3_600.0 {
        session += 1;
        let turns = draw.lognormal(1.011, 0.728, 1.0, 20.0);
        let (mut at, mut length) = (start, 0);
        for turn in 0..turns {
            let (mu, sigma) = if turn == 0 { (3.523, 1.698) } else { (2.91, 1.222) };
            length += draw.lognormal(mu, sigma, 1.0, 8_000.0) + 8;
            let answer = draw.lognormal(5.266, 1.087, 1.0, 2_048.0);
            if length > 32_768 {
                break;
            }
            if at < 3_600.0 {
                let segments = [(stream(1, session), length)];
                row(&mut builder, at, answer, &segments, &session.to_string());
            }
            length += answer + 5;
            at += 0.02 * f64::from(answer) + draw.exponential(25.0);
        }
        start += draw.exponential(0.5);
    }
    builder
}

fn agent(seed: u64) -> Builder {
    let (mut draw, mut builder) = (Draw::new(seed), Builder::new());
    let groups = zipf_table(12, 1.0);
    let starts: Vec<u32> = (0..12).map(|_| draw.integer(12_000, 16_000)).collect();
    let mut start = draw.exponential(20.0);
    let mut session = 0;
    while start < 3_600.0 {
        session += 1;
        let group = draw.zipf(&groups);
        let turns = draw.lognormal(3.75, 1.1, 3.0, 400.0);
        let shared = starts[group];
        let mut length = shared + draw.lognormal(8.6, 0.9, 500.0, 60_000.0);
        let (mut at, mut compactions) = (start, 0);
        for _ in 0..turns {
            let answer = draw.lognormal(5.36, 0.85, 20.0, 8_000.0);
            if length > 180_000 {
                // Compacted: system prompt and tools stay, a summary begins anew.
                compactions += 1;
                length = shared + 6_000;
            }
            if at < 3_600.0 {
                let own = stream(2 + compactions, session);
                let segments = [(stream(1, group), shared), (own, length - shared)];
                row(&mut builder, at, answer, &segments, &session.to_string());
            }
            let pause = if draw.unit() < 0.85 { 12.0 } else { 120.0 };
            at += 1.0 + 0.02 * f64::from(answer) + draw.exponential(pause);
            length += answer + draw.lognormal(6.1, 1.3, 20.0, 20_000.0);
        }
        start += draw.exponential(20.0);
    }
    builder
}

/// Adds a request whose prompt is made of segments (stream, tokens); full blocks only, each named by the segment that
/// it ends in.
fn row(builder: &mut Builder, at: f64, output: u32, segments: &[(u64, u32)], session: &str) {
    let input: u32 = segments.iter().map(|(_, tokens)| tokens).sum();
    let (mut last, mut end, mut blocks) = (0, 0, 0);
    for (stream, tokens) in segments {
        end += tokens;
        last = builder.run(last, *stream, end / BLOCK - blocks);
        blocks = end / BLOCK;
    }
    let session = builder.session(session);
    builder.push(Row {
        at: Micros((at * 1e3) as u64 * 1_000),
        input,
        output,
        last,
        session,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_workload_repeats_from_its_seed_and_is_in_order() {
        for name in SYNTHETIC_NAMES {
            let trace = synthetic(name, 3).unwrap();
            assert_eq!(trace, synthetic(name, 3).unwrap());
            assert_ne!(trace, synthetic(name, 5).unwrap());
            assert!(trace.rows.windows(2).all(|pair| pair[0].at <= pair[1].at));
        }
        assert_eq!(synthetic("nothing", 3), None);
    }

    /// Rows, blocks and mean lengths of the recipes at their own seeds, as an independent implementation has them.
    #[test]
    fn recipes_give_the_workloads_that_their_parameters_describe() {
        for (name, rows, blocks, input, output) in [
            ("longctx", 25_233, 698_170, 8_287.8, 256.4),
            ("chat", 22_022, 414_395, 992.9, 326.9),
            ("rag", 7_205, 204_670, 7_073.9, 232.1),
            ("agent", 5_681, 558_598, 52_987.3, 303.5),
        ] {
            let trace = synthetic(name, 0).unwrap();
            let mean = |of: fn(&Row) -> u32| {
                let sum: u64 = trace.rows.iter().map(|row| u64::from(of(row))).sum();
                (sum as f64 / trace.rows.len() as f64 * 10.0).round() / 10.0
            };
            assert_eq!((trace.rows.len(), trace.chains.len()), (rows, blocks), "{name}");
            assert_eq!((mean(|r| r.input), mean(|r| r.output)), (input, output), "{name}");
        }
    }

    #[test]
    fn the_published_shape_uses_each_prefix_about_five_and_a_half_times() {
        let trace = synthetic("sagemaker-8k", 0).unwrap();
        let prefixes = trace.sessions.len() as f64;
        let uses = trace.rows.len() as f64 / prefixes;
        assert!((5.2..5.6).contains(&uses), "{uses}");
        let hit = trace.oracle_hit();
        assert!((0.79..0.83).contains(&hit), "{hit}");
    }
}
