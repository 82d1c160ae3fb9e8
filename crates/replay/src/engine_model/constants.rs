//! Every physical constant of the engine model, each with its source.
//!
//! Two hardware profiles are derived from published model shapes and data-sheet figures; a profile fitted from a live
//! engine has the same fields. Efficiencies are the shares of the data-sheet peak that serving stacks reach in practice.

/// Parameters of Llama-3.1-8B (model card).
pub const LLAMA_8B_PARAMETERS: f64 = 8.03e9;
/// Layers x hidden size of Llama-3.1-8B (its `config.json`: 32 layers, hidden size 4,096).
pub const LLAMA_8B_LAYERS_X_HIDDEN: f64 = 32.0 * 4096.0;
/// KV bytes a token of Llama-3.1-8B: 2 (K and V) x 32 layers x 8 KV heads x 128 dimensions x 2 bytes.
pub const LLAMA_8B_KV_BYTES: f64 = 2.0 * 32.0 * 8.0 * 128.0 * 2.0;

/// Dense BF16 peak of one H100 SXM in FLOP/s (NVIDIA data sheet, without sparsity).
pub const H100_FLOPS: f64 = 989e12;
/// HBM3 bandwidth of one H100 SXM in bytes/s (NVIDIA data sheet).
pub const H100_BYTES_PER_S: f64 = 3.35e12;
/// Share of peak FLOP/s that prefill reaches; 40-50 % is commonly reported for dense models of this size.
pub const PREFILL_EFFICIENCY: f64 = 0.45;
/// Share of peak memory bandwidth that decode reaches.
pub const DECODE_EFFICIENCY: f64 = 0.75;

/// Scheduling, kernel launches and sampling of one step, in seconds; small models on fast GPUs show 1-3 ms.
pub const STEP_OVERHEAD_S: f64 = 0.0015;
/// Sampling and bookkeeping of one sequence in one step, in seconds.
pub const PER_SEQUENCE_S: f64 = 6e-6;

/// FLOPs of one prefilled token, Llama-70B-like (2 x 70e9 parameters), as in the reference model.
pub const REFERENCE_FLOPS_PER_TOKEN: f64 = 1.4e11;
/// Attention FLOPs for each (token, context token) pair, as in the reference model (4 x 80 layers x 8,192 hidden).
pub const REFERENCE_FLOPS_PER_PAIR: f64 = 2.62e6;
/// FLOP/s that an 8-GPU node delivers to prefill, as in the reference model.
pub const REFERENCE_FLOPS: f64 = 2e15;
/// Fixed seconds of one prefill, as in the reference model.
pub const REFERENCE_BASE_S: f64 = 0.02;
/// KV bytes a token of a 70B model with grouped-query attention: 2 x 80 layers x 8 heads x 128 x 2 bytes.
pub const LLAMA_70B_KV_BYTES: f64 = 2.0 * 80.0 * 8.0 * 128.0 * 2.0;
/// Weights of a 70B model in bytes (BF16).
pub const LLAMA_70B_WEIGHT_BYTES: f64 = 140e9;
/// GPUs of the reference node.
pub const REFERENCE_GPUS: f64 = 8.0;

/// Host to GPU copies in bytes/s: PCIe 5.0 x16 moves 64 GB/s raw, block-wise copies reach about 20.
pub const HOST_LINK_BYTES_PER_S: f64 = 20e9;
/// Latency of starting a host to GPU load, in seconds (one scheduler round and the copy's submission).
pub const HOST_LOAD_BASE_S: f64 = 0.001;
/// GPU to GPU transfers between hosts in bytes/s: one 400 Gb/s RDMA port at about 80 %.
pub const TRANSFER_BYTES_PER_S: f64 = 40e9;
/// Latency of starting a transfer between engines, in seconds (handshake and descriptor exchange).
pub const TRANSFER_BASE_S: f64 = 0.003;

/// Shared store to GPU in bytes/s, as routers assume before they have seen any load: one 100 Gb/s port at about 40 %, where
/// small objects are read one by one.
pub const SHARED_BYTES_PER_S: f64 = 5e9;
/// Latency of starting a load from a shared store, in seconds (look-up, and the first object's way).
pub const SHARED_LOAD_BASE_S: f64 = 0.005;

/// Seconds that a prefill engine keeps blocks for a decode engine that never pulls them (vLLM's NIXL connector default).
pub const HELD_BLOCKS_EXPIRY_S: f64 = 480.0;

/// From the start of an engine's process to its first request, in seconds: Llama-70B in FP8 on eight GPUs under vLLM, as told
/// in its issue 19824 (June 2025): 60 checking peer access, 10 reading weights from the page cache, 15 tracing, 70
/// compiling, 60 capturing graphs.
pub const ENGINE_START_S: f64 = 215.0;

/// Requests that may wait in one engine; past it submission is refused. vLLM itself has no limit; a hundred thousand
/// waiting requests are hours of work for any engine, so the bound only protects memory.
pub const WAITING_MAX: u32 = 100_000;
/// Steps that one call of `step` completes at most, so that an instant engine yields to its driver.
pub const STEPS_PER_CALL_MAX: usize = 256;
