//! How much one message may carry; senders split at these numbers, receivers refuse above them.

/// Longest name, URL or path in bytes.
pub const NAME_BYTES_MAX: usize = 1024;
/// Model names and aliases of one pool.
pub const MODELS_MAX: usize = 64;
/// Adapters of one worker.
pub const ADAPTERS_MAX: usize = 1024;
/// Holders of one source: GPU, CPU and shared tiers with room for several of each.
pub const HOLDERS_MAX: usize = 16;
/// Operations of one batch: with [`BATCH_KEYS_MAX`] it keeps an encoded batch below 256 KiB, the largest log entry.
pub const BATCH_OPS_MAX: usize = 2048;
/// Block keys of one batch, over all its stores: 16,384 keys of 8 bytes are half of the largest log entry.
pub const BATCH_KEYS_MAX: usize = 16_384;
/// Batches of one push message.
pub const PUSH_BATCHES_MAX: usize = 256;
/// Lease renewals of one push message: one agent speaks for the ranks of one host.
pub const PUSH_RENEWALS_MAX: usize = 4096;
/// Sources of one audit question.
pub const AUDIT_SOURCES_MAX: usize = 4096;
/// Keys of one overlap question: two million tokens at 16 a block.
pub const OVERLAP_KEYS_MAX: usize = 131_072;
/// Soft frames of one message.
pub const SOFT_FRAMES_MAX: usize = 4096;
/// Workers in one router frame.
pub const RESERVATIONS_MAX: usize = 16_384;
/// Speculative prefixes in one router frame.
pub const PREFIXES_MAX: usize = 4096;
/// Keys over all speculative prefixes of one router frame.
pub const PREFIX_KEYS_MAX: usize = 65_536;
/// Keys of one report of what an engine reused: 262,144 tokens in blocks of 16.
pub const REUSED_KEYS_MAX: usize = 16_384;
/// Longest life a speculative prefix may ask for, in milliseconds.
pub const PREFIX_TTL_MS_MAX: u32 = 60_000;
/// Deepest block a chain may have: sixteen million blocks.
pub const DEPTH_MAX: u32 = 1 << 24;
/// Largest gRPC message that is decoded, in bytes; pushes and feed frames stay well below.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;
/// Size of one chunk of a snapshot stream in bytes.
pub const SNAPSHOT_CHUNK_BYTES: usize = 1 << 20;
