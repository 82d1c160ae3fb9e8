//! Synthetic workloads, drawn from a seed: long shared contexts, short chats, retrieval, and the published 8,000-token one.

use super::{Row, Trace};
use crate::engine_model::Micros;

/// Names that [`synthetic`] knows.
pub const SYNTHETIC_NAMES: [&str; 4] = ["longctx", "chat", "rag", "sagemaker-8k"];

/// Tokens for each block id.
const BLOCK: u32 = 16;

/// SplitMix64 with the few distributions that the recipes need.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 * 2f64.powi(-53)
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (2.0 * std::f64::consts::PI * self.unit()).cos()
    }

    fn lognormal(&mut self, mu: f64, sigma: f64, low: f64, high: f64) -> u32 {
        (mu + sigma * self.normal()).exp().max(low).min(high) as u32
    }

    fn integer(&mut self, low: u32, high: u32) -> u32 {
        low + (self.unit() * f64::from(high - low + 1)) as u32
    }

    fn zipf(&mut self, cumulative: &[f64]) -> usize {
        let at = self.unit() * cumulative.last().copied().unwrap_or(0.0);
        cumulative.partition_point(|sum| *sum < at).min(cumulative.len() - 1)
    }
}

fn zipf_table(count: usize, exponent: f64) -> Vec<f64> {
    let mut sum = 0.0;
    let weights = (1..=count).map(|k| {
        sum += (k as f64).powf(-exponent);
        sum
    });
    weights.collect()
}

/// Ids of a prompt made of segments (stream, tokens), full blocks only.
///
/// A block belongs to the first segment and to the one that it ends in: equal ids mean an equal start. Ids are mixed,
/// not numbered: 64 bits keep a million blocks apart.
fn ids(segments: &[(u64, u32)]) -> Vec<u64> {
    let all: u32 = segments.iter().map(|(_, tokens)| tokens).sum();
    let first = segments.first().map_or(0, |(stream, _)| *stream);
    let (mut ids, mut end, mut at) = (Vec::with_capacity((all / BLOCK) as usize), 0, 0);
    for block in 0..all / BLOCK {
        while end < (block + 1) * BLOCK {
            end += segments[at].1;
            at += 1;
        }
        let chain = Draw(first).next() ^ segments[at - 1].0;
        ids.push(Draw(Draw(chain).next() ^ u64::from(block)).next());
    }
    ids
}

/// Stream numbers of one kind don't meet those of another.
fn stream(kind: u64, number: usize) -> u64 {
    kind << 48 | number as u64
}

/// A workload by name; `None` for names that aren't known.
#[must_use]
pub fn synthetic(name: &str, seed: u64) -> Option<Trace> {
    let mut rows = match name {
        "longctx" => long_context(seed, 512, 7.0, 3_600.0, 8_000),
        // Each 8,000-token prefix comes about 5.5 times.
        "sagemaker-8k" => long_context(seed, 1_000, 7.0, 786.0, 8_000),
        "chat" => chat(seed),
        "rag" => rag(seed),
        _ => return None,
    };
    rows.sort_by_key(|row| row.at);
    Some(Trace {
        name: format!("synthetic:{name}"),
        block: BLOCK,
        rows,
    })
}

fn long_context(seed: u64, prefixes: usize, rate: f64, seconds: f64, prefix: u32) -> Vec<Row> {
    let (mut draw, mut rows) = (Draw(seed), Vec::new());
    let popularity = zipf_table(prefixes, 0.0);
    let mut at = draw.exponential(1.0 / rate);
    while at < seconds {
        let which = draw.zipf(&popularity);
        let (question, output) = (draw.integer(64, 512), draw.integer(128, 384));
        let segments = [(stream(1, which), prefix), (stream(2, rows.len()), question)];
        rows.push(row(at, output, &segments, format!("p{which}")));
        at += draw.exponential(1.0 / rate);
    }
    rows
}

fn rag(seed: u64) -> Vec<Row> {
    let (mut draw, mut rows) = (Draw(seed), Vec::new());
    let popularity = zipf_table(400, 0.9);
    let lengths: Vec<u32> = (0..400).map(|_| draw.lognormal(8.6, 0.6, 512.0, 32_000.0)).collect();
    let mut at = draw.exponential(0.25);
    while at < 1_800.0 {
        let document = draw.zipf(&popularity);
        let (question, output) = (draw.integer(24, 160), draw.integer(64, 400));
        let segments = [
            (stream(1, 0), 320),
            (stream(2, document), lengths[document]),
            (stream(3, rows.len()), question),
        ];
        rows.push(row(at, output, &segments, format!("d{document}")));
        at += draw.exponential(0.25);
    }
    rows
}

fn chat(seed: u64) -> Vec<Row> {
    let (mut draw, mut rows) = (Draw(seed), Vec::new());
    let mut start = draw.exponential(0.5);
    let mut session = 0;
    while start < 3_600.0 {
        session += 1;
        let turns = draw.lognormal(1.011, 0.728, 1.0, 20.0);
        let (mut at, mut length) = (start, 0);
        for turn in 0..turns {
            let (mu, sigma) = if turn == 0 { (3.523, 1.698) } else { (2.91, 1.222) };
            length += draw.lognormal(mu, sigma, 1.0, 8_000.0) + 8;
            let output = draw.lognormal(5.266, 1.087, 1.0, 2_048.0);
            if length > 32_768 {
                break;
            }
            if at < 3_600.0 {
                rows.push(row(at, output, &[(stream(1, session), length)], session.to_string()));
            }
            length += output + 5;
            at += 0.02 * f64::from(output) + draw.exponential(25.0);
        }
        start += draw.exponential(0.5);
    }
    rows
}

fn row(at: f64, output: u32, segments: &[(u64, u32)], session: String) -> Row {
    Row {
        at: Micros((at * 1e3) as u64 * 1_000),
        input: segments.iter().map(|(_, tokens)| tokens).sum(),
        output,
        blocks: ids(segments),
        session: Some(session),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_workload_repeats_from_its_seed_and_is_in_order() {
        for name in SYNTHETIC_NAMES {
            let trace = synthetic(name, 3).unwrap();
            assert_eq!(trace, synthetic(name, 3).unwrap());
            assert_ne!(trace, synthetic(name, 4).unwrap());
            assert!(trace.rows.windows(2).all(|pair| pair[0].at <= pair[1].at));
        }
        assert_eq!(synthetic("nothing", 3), None);
    }

    #[test]
    fn the_published_shape_uses_each_prefix_about_five_and_a_half_times() {
        let trace = synthetic("sagemaker-8k", 1).unwrap();
        let uses = trace.rows.len() as f64 / 1_000.0;
        assert!((5.2..5.8).contains(&uses), "{uses}");
        let hit = trace.oracle_hit();
        assert!((0.74..0.84).contains(&hit), "{hit}");
    }
}
