//! What an event's adapter, salt and extra keys say: which namespace its chain is in, and which media its blocks hold.

use cairn_blocks::{BlockKey, Namespace};

use super::Mirror;
use crate::{ExtraValue, Stored};

/// Hexadecimal digits of a SHA-256 or BLAKE3 content hash, as engines name media by.
const CONTENT_HASH_DIGITS: usize = 64;

impl Mirror {
    /// Root of the chain that an event without parent starts.
    pub(super) fn root_key(&mut self, stored: &Stored) -> BlockKey {
        if stored.adapter.is_none()
            && stored.lora_id.is_none()
            && stored.cache_salt.is_none()
            && stored.extra_keys.is_empty()
        {
            if let Some(key) = self.plain_root {
                return key;
            }
            let key = self.namespace_root("", "");
            self.plain_root = Some(key);
            return key;
        }
        let numbered = match (&stored.adapter, stored.lora_id) {
            (None, Some(id)) if id != 0 => Some(format!("#{id}")),
            (None | Some(_), _) => None,
        };
        let adapter = stored.adapter.as_deref().or(numbered.as_deref()).unwrap_or("");
        self.namespace_root(adapter, self.salt(stored).unwrap_or(""))
    }

    pub(super) fn namespace_root(&self, adapter: &str, salt: &str) -> BlockKey {
        Namespace {
            seed: self.config.seed,
            pool: &self.config.pool,
            block_size: self.config.block_size,
            adapter,
            salt,
        }
        .root()
    }

    /// The salt of a chain, where this event can show it.
    ///
    /// SGLang has a field for it. vLLM puts it last among the extra keys of a prompt's first block, where nothing tells
    /// it from the identity of a medium that starts there: in a pool without media it is the salt; in a pool with media
    /// it is one unless it looks like a content hash or comes again in the next block.
    fn salt<'a>(&self, stored: &'a Stored) -> Option<&'a str> {
        if let Some(salt) = stored.cache_salt.as_deref() {
            return Some(salt);
        }
        if stored.parent.is_some() {
            return None;
        }
        let first = stored.extra_keys.first().filter(|e| e.block == 0)?;
        let last = first.values.iter().rev().find_map(|value| match value {
            ExtraValue::Bare(text) if stored.adapter.as_deref() != Some(text) => Some(text.as_ref()),
            ExtraValue::Bare(_) | ExtraValue::Tuple(_) => None,
        })?;
        if self.config.multimodal {
            let hashed = last.len() == CONTENT_HASH_DIGITS && last.bytes().all(|b| b.is_ascii_hexdigit());
            let again = stored
                .extra_keys
                .get(1)
                .is_some_and(|e| e.block == 1 && e.values.iter().any(|v| v.text() == last));
            if hashed || again {
                return None;
            }
        }
        Some(last)
    }

    /// The multimodal identities of one block of an event: its extra keys without adapter and salt.
    pub(super) fn identities<'a>(&self, stored: &'a Stored, block: usize) -> Vec<&'a str> {
        let Ok(at) = stored.extra_keys.binary_search_by_key(&block, |e| e.block as usize) else {
            return Vec::new();
        };
        let extra = &stored.extra_keys[at];
        let salt = if block == 0 { self.salt(stored) } else { None };
        extra
            .values
            .iter()
            .filter(|value| match value {
                ExtraValue::Bare(text) => stored.adapter.as_deref() != Some(text) && salt != Some(text.as_ref()),
                ExtraValue::Tuple(_) => true,
            })
            .map(ExtraValue::text)
            .collect()
    }
}
