//! Requests in full: token ids that are equal where a trace's blocks are, and nowhere else.

use std::fmt::Write as _;

use cairn_replay::trace::Trace;
use cairn_routing::PolicyConfig;
use serde_json::Value;

/// Token ids that every vocabulary has and that stand for ordinary text.
const TOKEN_IDS: std::ops::Range<u32> = 300..4_000;
/// Name under which engines serve.
pub const MODEL: &str = "replay";

/// The body of the request numbered `index`.
pub fn body(trace: &Trace, index: usize, policy: &PolicyConfig) -> String {
    let row = &trace.rows[index];
    let mut path = Vec::new();
    trace.chains.path(row.last, &mut path);
    let mut text = format!("{{\"model\":\"{MODEL}\",\"prompt\":[");
    for at in 0..row.input {
        // What no block stands for is the request's own.
        let block = path
            .get((at / trace.block) as usize)
            .map_or(u64::MAX - index as u64, |number| u64::from(*number));
        let comma = if at == 0 { "" } else { "," };
        // Writing to a string does not fail.
        let _ = write!(text, "{comma}{}", token(block, at));
    }
    let output = row.output;
    let _ = write!(
        text,
        "],\"max_tokens\":{output},\"min_tokens\":{output},\"ignore_eos\":true,\"temperature\":0,\"stream\":true,\
         \"stream_options\":{{\"include_usage\":true}}"
    );
    if matches!(policy, PolicyConfig::Session) && !trace.session(row).is_empty() {
        let _ = write!(text, ",\"prompt_cache_key\":{}", Value::from(trace.session(row)));
    }
    text.push('}');
    text
}

/// The token at one place of one block, drawn by SplitMix64 (Steele, Lea, Flood 2014).
fn token(block: u64, at: u32) -> u32 {
    let mut z = block.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(at).wrapping_mul(0xd134_2543_de82_ef95);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    TOKEN_IDS.start + ((z ^ (z >> 31)) % u64::from(TOKEN_IDS.end - TOKEN_IDS.start)) as u32
}
