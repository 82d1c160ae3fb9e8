//! Engine KV events in Cairn's own words, whatever wire form an engine version used.

use cairn_blocks::Token;
use xxhash_rust::xxh3::xxh3_64;

use crate::RefusalReason;

/// The engine's own opaque name of a block: used only to resolve its events, never as an identity.
///
/// Integers are kept as they are (negative ones by their bits); byte strings are folded to 64 bits, the width that
/// engines themselves use by default.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct EngineHash(pub u64);

impl EngineHash {
    /// From a signed integer, by its bits.
    #[must_use]
    pub fn from_signed(hash: i64) -> Self {
        Self(u64::from_ne_bytes(hash.to_ne_bytes()))
    }

    /// From a byte string of any length.
    #[must_use]
    pub fn from_bytes(hash: &[u8]) -> Self {
        Self(xxh3_64(hash))
    }
}

/// Where the engine says that a copy lies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Medium {
    /// GPU memory; also what a missing field means.
    #[default]
    Gpu,
    /// CPU memory of the engine's host.
    Cpu,
    /// Storage below CPU memory: disk, file system, object store, an external cache.
    Shared,
}

impl Medium {
    /// Reads the names that vLLM and SGLang use; `None` for others.
    #[must_use]
    pub fn parse(name: &[u8]) -> Option<Self> {
        const NAMES: [(&[u8], Medium); 11] = [
            (b"GPU", Medium::Gpu),
            (b"DEVICE", Medium::Gpu),
            (b"CPU", Medium::Cpu),
            (b"CPU_PINNED", Medium::Cpu),
            (b"HOST", Medium::Cpu),
            (b"STORAGE", Medium::Shared),
            (b"FS", Medium::Shared),
            (b"OBJ", Medium::Shared),
            (b"DISK", Medium::Shared),
            (b"EXTERNAL", Medium::Shared),
            (b"NVME", Medium::Shared),
        ];
        NAMES
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, medium)| *medium)
    }
}

/// What kind of cache group an event speaks of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum SpecKind {
    /// Not said, as engines without groups do.
    #[default]
    Unsaid,
    /// Every block of the prefix is kept: full, MLA or sink attention. Positions come from these.
    Full,
    /// Only a window of the newest tokens counts.
    Window,
    /// State at some positions only, encoder or cross attention, or a kind that Cairn doesn't know.
    Other,
}

impl SpecKind {
    /// Reads vLLM's names.
    #[must_use]
    pub fn parse(name: &[u8]) -> Self {
        match name {
            b"full_attention" | b"mla_attention" | b"sink_full_attention" => Self::Full,
            b"sliding_window" | b"sliding_window_mla" | b"chunked_local_attention" => Self::Window,
            _ => Self::Other,
        }
    }
}

/// One entry of a block's `extra_keys`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum ExtraValue {
    /// A bare value: a salt, an adapter's name or a multimodal identity, which the wire doesn't tell apart.
    Bare(Box<str>),
    /// A value in a tuple of its own, as multimodal identities with an offset are.
    Tuple(Box<str>),
}

impl ExtraValue {
    /// The text of either.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Bare(text) | Self::Tuple(text) => text,
        }
    }
}

impl std::fmt::Debug for ExtraValue {
    /// May be a salt: its text never shows.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Bare(_) => "Bare(..)",
            Self::Tuple(_) => "Tuple(..)",
        })
    }
}

/// The `extra_keys` of one block that has any.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockExtra {
    /// Position of the block in the event.
    pub block: u32,
    /// Its values in the engine's order.
    pub values: Vec<ExtraValue>,
}

/// Blocks that an engine now holds.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Stored {
    /// One per block, in chain order.
    pub hashes: Vec<EngineHash>,
    /// The block above the first; `None` at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// All blocks' tokens, flat; empty where the engine leaves them out.
    pub tokens: Vec<Token>,
    /// Tokens in one engine block; 0 where the engine leaves tokens out.
    pub block_size: u32,
    /// Where the copies lie.
    pub medium: Medium,
    /// Adapter name.
    pub adapter: Option<Box<str>>,
    /// Adapter number of engines that don't send its name.
    pub lora_id: Option<i64>,
    /// Blocks with extra keys, in ascending position; blocks without aren't listed.
    pub extra_keys: Vec<BlockExtra>,
    /// Whether the event has extra keys at all: events of outer tiers lack them, and a salt with them.
    pub has_extra_keys: bool,
    /// Cache group.
    pub group: Option<u32>,
    /// Kind of that group.
    pub spec_kind: SpecKind,
    /// Window of that group in tokens.
    pub sliding_window: Option<u32>,
    /// Salt as a field of its own (SGLang).
    pub cache_salt: Option<Box<str>>,
    /// Copies of each block after this event, where the engine says so.
    pub remaining_copies: Option<Vec<u32>>,
}

impl std::fmt::Debug for Stored {
    /// Shapes only: tokens, salts and extra keys never show.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stored")
            .field("hashes", &self.hashes.len())
            .field("tokens", &self.tokens.len())
            .field("block_size", &self.block_size)
            .field("medium", &self.medium)
            .field("group", &self.group)
            .field("spec_kind", &self.spec_kind)
            .finish_non_exhaustive()
    }
}

/// Blocks of which the engine gave up one copy each.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Removed {
    /// Which blocks, in the engine's order.
    pub hashes: Vec<EngineHash>,
    /// From where.
    pub medium: Medium,
    /// Cache group.
    pub group: Option<u32>,
    /// Salt, where the engine gives it: tells apart equal hashes of two namespaces.
    pub cache_salt: Option<Box<str>>,
    /// Copies of each block after this event, where the engine says so.
    pub remaining_copies: Option<Vec<u32>>,
}

impl std::fmt::Debug for Removed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Removed")
            .field("hashes", &self.hashes.len())
            .field("medium", &self.medium)
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

/// One thing that happened in an engine's cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EngineEvent {
    /// Blocks came.
    Stored(Stored),
    /// Copies went.
    Removed(Removed),
    /// Everything went, in every tier of the rank.
    Cleared,
}

/// One message of an engine: everything that one scheduler step changed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EventBatch {
    /// The engine's own counter.
    pub seq: u64,
    /// Hash of the message's bytes: equal bytes at an equal seq mean the same lifetime.
    pub content: u64,
    /// Unix seconds when the engine made it.
    pub ts: f64,
    /// Data-parallel rank that it names; the connection decides whose events they are.
    pub rank: Option<u32>,
    /// In order.
    pub events: Vec<EngineEvent>,
    /// Events that were left out, and why.
    pub refused: Vec<RefusalReason>,
}

impl EventBatch {
    /// Tokens and hashes in it: what it costs to keep.
    #[must_use]
    pub fn weight(&self) -> usize {
        let of = |event: &EngineEvent| match event {
            EngineEvent::Stored(stored) => stored.tokens.len() + 2 * stored.hashes.len(),
            EngineEvent::Removed(removed) => 2 * removed.hashes.len(),
            EngineEvent::Cleared => 1,
        };
        16 + self.events.iter().map(of).sum::<usize>()
    }
}
