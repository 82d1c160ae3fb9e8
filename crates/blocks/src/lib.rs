//! Block keys: the chained 64-bit identity of KV blocks, computed equally by agents, routers and the simulator.
//!
//! Engines disagree on block hashes (seeds, algorithms, widths, block sizes), so Cairn names blocks itself, from
//! token ids. A key fixes its whole history: two equal keys mean equal prefixes. The exact bytes that are hashed
//! are held by the golden vectors in `tests/golden/keys.json`.

mod chain;
mod key;
mod namespace;

pub use chain::{Chain, MediaSpan};
pub use key::{BlockKey, next_key};
pub use namespace::{BlockSize, ClusterSeed, InvalidBlockSize, KEY_FORMAT_VERSION, Namespace};

/// A token id as engines and tokenizers number them.
pub type Token = u32;

/// How many blocks of one chain, counted from its root: the first block has depth 1, the root depth 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Depth(pub u32);
