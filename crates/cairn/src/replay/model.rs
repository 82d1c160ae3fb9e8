//! `--show-model`: the constants of both engine models, with their units and sources.

use cairn_replay::engine_model::{Timing, constants as c};
use cairn_replay::reference_timing;
use serde_json::json;

use super::args::ReplayArgs;
use crate::output;

/// Prints them.
pub fn show(args: &ReplayArgs) -> anyhow::Result<()> {
    let timing = match args.trace {
        Some(_) => args.open()?.timing,
        None => None,
    };
    let (default, reference) = (timing.unwrap_or_else(Timing::llama_70b_8gpu), reference_timing());
    let constants = constants();
    if args.json {
        let constants: serde_json::Map<String, serde_json::Value> = constants
            .iter()
            .map(|(name, value, unit, source)| {
                (
                    (*name).to_owned(),
                    json!({"value": value, "unit": unit, "source": source}),
                )
            })
            .collect();
        output::line(serde_json::to_string(
            &json!({"reference": reference, "default": default, "constants": constants}),
        )?);
        return Ok(());
    }
    output::line(
        "reference: prefill seconds = (1.4e11 * new + 2.62e6 * new * (cached + new / 2)) / 2e15 + 0.02, one request after the\n\
         other, no decode, least recently used blocks go first, fetching at 20 GB/s of 320 KB a token.\n\
         default: a step takes step_base_s, and for each prefilled token prefill_token_s + prefill_pair_s * its context, and\n\
         for each decoding sequence decode_sequence_s + decode_context_s * its context; chunks of at most 8,192 tokens a step.\n",
    );
    let mut rows = vec![vec!["seconds".into(), "reference".into(), "default".into()]];
    let (reference, default) = (serde_json::to_value(reference)?, serde_json::to_value(default)?);
    for (name, value) in reference.as_object().into_iter().flatten() {
        let number = |value: &serde_json::Value| format!("{:.4e}", value.as_f64().unwrap_or(0.0));
        rows.push(vec![name.clone(), number(value), number(&default[name])]);
    }
    output::table(&rows);
    output::line("");
    let mut rows = vec![vec!["constant".into(), "value".into(), "unit".into(), "source".into()]];
    for (name, value, unit, source) in constants {
        rows.push(vec![name.into(), format!("{value:e}"), unit.into(), source.into()]);
    }
    output::table(&rows);
    Ok(())
}

fn constants() -> Vec<(&'static str, f64, &'static str, &'static str)> {
    vec![
        (
            "REFERENCE_FLOPS_PER_TOKEN",
            c::REFERENCE_FLOPS_PER_TOKEN,
            "FLOP",
            "2 x 70e9 parameters",
        ),
        (
            "REFERENCE_FLOPS_PER_PAIR",
            c::REFERENCE_FLOPS_PER_PAIR,
            "FLOP",
            "4 x 80 layers x 8,192 hidden",
        ),
        (
            "REFERENCE_FLOPS",
            c::REFERENCE_FLOPS,
            "FLOP/s",
            "an 8-GPU node's prefill",
        ),
        ("REFERENCE_BASE_S", c::REFERENCE_BASE_S, "s", "fixed part of a prefill"),
        (
            "LLAMA_70B_KV_BYTES",
            c::LLAMA_70B_KV_BYTES,
            "B/token",
            "2 x 80 layers x 8 KV heads x 128 x 2 bytes",
        ),
        (
            "LLAMA_70B_WEIGHT_BYTES",
            c::LLAMA_70B_WEIGHT_BYTES,
            "B",
            "70e9 parameters in BF16",
        ),
        ("H100_FLOPS", c::H100_FLOPS, "FLOP/s", "NVIDIA data sheet, dense BF16"),
        (
            "H100_BYTES_PER_S",
            c::H100_BYTES_PER_S,
            "B/s",
            "NVIDIA data sheet, HBM3",
        ),
        (
            "PREFILL_EFFICIENCY",
            c::PREFILL_EFFICIENCY,
            "share",
            "commonly reported 0.4-0.5",
        ),
        (
            "DECODE_EFFICIENCY",
            c::DECODE_EFFICIENCY,
            "share",
            "of memory bandwidth in decode",
        ),
        (
            "STEP_OVERHEAD_S",
            c::STEP_OVERHEAD_S,
            "s",
            "scheduling, launches, sampling of a step",
        ),
        (
            "PER_SEQUENCE_S",
            c::PER_SEQUENCE_S,
            "s",
            "bookkeeping of a sequence in a step",
        ),
        (
            "HOST_LINK_BYTES_PER_S",
            c::HOST_LINK_BYTES_PER_S,
            "B/s",
            "PCIe 5.0 x16, block-wise copies",
        ),
        (
            "HOST_LOAD_BASE_S",
            c::HOST_LOAD_BASE_S,
            "s",
            "start of a load from host memory",
        ),
        (
            "TRANSFER_BYTES_PER_S",
            c::TRANSFER_BYTES_PER_S,
            "B/s",
            "one 400 Gb/s RDMA port at about 80 %",
        ),
        ("TRANSFER_BASE_S", c::TRANSFER_BASE_S, "s", "handshake of a transfer"),
        (
            "SHARED_BYTES_PER_S",
            c::SHARED_BYTES_PER_S,
            "B/s",
            "one 100 Gb/s port at about 40 %; what routers assume",
        ),
        (
            "SHARED_LOAD_BASE_S",
            c::SHARED_LOAD_BASE_S,
            "s",
            "start of a load from a shared store",
        ),
        (
            "ENGINE_START_S",
            c::ENGINE_START_S,
            "s",
            "Llama-70B on eight GPUs, vLLM issue 19824; --engine-start-s",
        ),
    ]
}
