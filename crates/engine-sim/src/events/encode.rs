//! Cache events as the msgpack payload of one engine version.

use std::collections::HashMap;

use cairn_replay::engine_model::{CacheEvent, EngineHash, Medium, hash};
use rmp::encode as mp;
use serde::{Deserialize, Serialize};

use super::wire::Wire;

/// How block hashes are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HashForm {
    /// 64-bit integers.
    #[default]
    Int,
    /// 32 bytes.
    Bytes,
}

/// Writes batches in one version's shape.
pub struct Encoder {
    wire: Wire,
    hashes: HashForm,
    self_describing: bool,
    block_size: u32,
    rank: u32,
    /// Adapter names in the order of their first events; vLLM numbers adapters from 1.
    adapters: Vec<String>,
    /// SGLang's published hashes leave salt and adapter out: ours by the cache's, with the number of copies.
    unsalted: HashMap<EngineHash, (EngineHash, u32)>,
}

/// Marker of a map whose length takes two bytes.
const MAP_16: u8 = 0xde;

/// Writing to a vector can't fail.
const INFALLIBLE: &str = "writing to memory does not fail";

type Out = Vec<u8>;

fn text(out: &mut Out, value: &str) {
    mp::write_str(out, value).expect(INFALLIBLE);
}

fn nil(out: &mut Out) {
    mp::write_nil(out).expect(INFALLIBLE);
}

fn uint(out: &mut Out, value: u64) {
    mp::write_uint(out, value).expect(INFALLIBLE);
}

fn array(out: &mut Out, len: usize) {
    mp::write_array_len(out, len as u32).expect(INFALLIBLE);
}

impl Encoder {
    /// An encoder for one rank.
    #[must_use]
    pub fn new(wire: Wire, hashes: HashForm, self_describing: bool, block_size: u32, rank: u32) -> Self {
        Self {
            wire,
            hashes,
            self_describing,
            block_size,
            rank,
            adapters: Vec::new(),
            unsalted: HashMap::new(),
        }
    }

    /// One batch at `unix_s` seconds.
    pub fn batch(&mut self, unix_s: f64, events: &[CacheEvent]) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + events.len() * 64);
        array(&mut out, 3);
        mp::write_f64(&mut out, unix_s).expect(INFALLIBLE);
        array(&mut out, self.count(events));
        let mut rest = events;
        while let Some((event, after)) = rest.split_first() {
            rest = after;
            match event {
                CacheEvent::Cleared => self.cleared(&mut out),
                CacheEvent::Removed { hashes, medium } => {
                    let mut all = hashes.clone();
                    while let Some((CacheEvent::Removed { hashes, medium: next }, after)) = rest.split_first()
                        && self.wire.is_sglang()
                        && next == medium
                    {
                        all.extend_from_slice(hashes);
                        rest = after;
                    }
                    self.removed(&mut out, &all, *medium);
                }
                CacheEvent::Stored { .. } => self.stored(&mut out, event),
            }
        }
        uint(&mut out, u64::from(self.rank));
        out
    }

    /// Events after merging: SGLang puts neighbouring removals into one.
    fn count(&self, events: &[CacheEvent]) -> usize {
        if !self.wire.is_sglang() {
            return events.len();
        }
        let merged = events.windows(2).filter(|pair| match (&pair[0], &pair[1]) {
            (CacheEvent::Removed { medium: a, .. }, CacheEvent::Removed { medium: b, .. }) => a == b,
            _ => false,
        });
        events.len() - merged.count()
    }

    fn cleared(&mut self, out: &mut Out) {
        self.unsalted.clear();
        if self.wire.is_map() {
            mp::write_map_len(out, 1).expect(INFALLIBLE);
            text(out, "type");
        } else {
            array(out, 1);
        }
        text(out, "AllBlocksCleared");
    }

    fn removed(&mut self, out: &mut Out, hashes: &[EngineHash], medium: Medium) {
        let published: Vec<EngineHash> = hashes.iter().map(|hash| self.forget(*hash)).collect();
        let grouped = self.has_group();
        if !self.wire.is_map() {
            let fields = 2 + usize::from(self.has_medium()) + usize::from(grouped);
            array(out, fields);
            text(out, "BlockRemoved");
            self.hash_list(out, &published);
            if self.has_medium() {
                text(out, self.medium(medium));
            }
            if grouped {
                uint(out, 0);
            }
            return;
        }
        mp::write_map_len(out, 2 + u32::from(self.has_medium()) + u32::from(grouped)).expect(INFALLIBLE);
        text(out, "type");
        text(out, "BlockRemoved");
        text(out, "block_hashes");
        self.hash_list(out, &published);
        if self.has_medium() {
            text(out, "medium");
            text(out, self.medium(medium));
        }
        if grouped {
            text(out, "group_idx");
            uint(out, 0);
        }
    }

    fn stored(&mut self, out: &mut Out, event: &CacheEvent) {
        let CacheEvent::Stored {
            hashes,
            parent,
            tokens,
            medium,
            adapter,
            salt,
        } = event
        else {
            return;
        };
        let placeholder = *medium == Medium::Cpu && !self.self_describing && !self.wire.is_sglang();
        let published = self.remember(hashes, *parent, tokens);
        let parent = parent.filter(|_| !placeholder).map(|hash| self.published(hash));
        let adapter_id = adapter
            .as_deref()
            .filter(|_| *medium == Medium::Gpu)
            .map(|name| self.adapter_id(name));
        let fields = Stored {
            hashes: &published,
            parent,
            tokens: if placeholder { &[] } else { tokens },
            block_size: if placeholder { 0 } else { self.block_size },
            adapter_id,
            adapter: adapter.as_deref().filter(|_| *medium == Medium::Gpu),
            salt: salt.as_deref(),
            medium: *medium,
            placeholder,
        };
        if self.wire.is_map() {
            self.stored_map(out, &fields)
        } else {
            self.stored_array(out, &fields)
        }
    }

    fn stored_array(&self, out: &mut Out, event: &Stored<'_>) {
        let fields = match self.wire {
            Wire::Vllm0_9 => 6,
            Wire::Vllm0_10_2 => 7,
            Wire::Vllm0_14 => 8,
            Wire::Vllm0_17 => 9,
            Wire::Vllm0_20 => 10,
            _ => 12,
        };
        array(out, fields);
        text(out, "BlockStored");
        self.common_fields(out, event, false);
        if fields > 6 {
            text(out, self.medium(event.medium));
        }
        if fields > 7 {
            optional_text(out, event.adapter);
        }
        if fields > 8 {
            self.extra_keys(out, event);
        }
        if fields > 9 {
            uint(out, 0);
        }
        if fields > 10 {
            optional_text(out, (!event.placeholder).then_some("full_attention"));
            nil(out);
        }
    }

    fn stored_map(&self, out: &mut Out, event: &Stored<'_>) {
        let (vllm, dynamo) = (!self.wire.is_sglang(), self.wire == Wire::Dynamo1_6_1);
        let extra = vllm && !dynamo && event.medium == Medium::Gpu;
        let kind = vllm && !dynamo && !event.placeholder;
        let salt = event.salt.filter(|_| !vllm);
        let name = if vllm { !dynamo } else { event.adapter.is_some() };
        let mut fields = 5 + u32::from(vllm) + u32::from(extra) + u32::from(kind);
        fields += u32::from(salt.is_some()) + u32::from(name) + if dynamo { 0 } else { 2 };
        if self.wire == Wire::Vllm0_33 {
            // Its encoder sizes the map for every declared field, of which there are more than 15 by now.
            out.extend_from_slice(&[MAP_16, 0, fields as u8]);
        } else {
            mp::write_map_len(out, fields).expect(INFALLIBLE);
        }
        text(out, "type");
        text(out, "BlockStored");
        self.common_fields(out, event, true);
        if !dynamo {
            text(out, "medium");
            text(out, self.medium(event.medium));
        }
        if let Some(salt) = salt {
            text(out, "cache_salt");
            text(out, salt);
        }
        if name {
            text(out, "lora_name");
            optional_text(out, event.adapter);
        }
        if extra {
            text(out, "extra_keys");
            self.extra_keys(out, event);
        }
        if vllm {
            text(out, "group_idx");
            uint(out, 0);
        }
        if kind {
            text(out, "kv_cache_spec_kind");
            text(out, "full_attention");
        }
    }

    /// Hashes, parent, tokens, block size and adapter id, which every version has in this order.
    fn common_fields(&self, out: &mut Out, event: &Stored<'_>, named: bool) {
        let name = |out: &mut Out, name: &str| {
            if named {
                text(out, name);
            }
        };
        name(out, "block_hashes");
        self.hash_list(out, event.hashes);
        name(out, "parent_block_hash");
        match event.parent {
            Some(parent) => self.hash(out, parent),
            None => nil(out),
        }
        name(out, "token_ids");
        array(out, event.tokens.len());
        for token in event.tokens {
            uint(out, u64::from(*token));
        }
        name(out, "block_size");
        uint(out, u64::from(event.block_size));
        if named && self.wire == Wire::Dynamo1_6_1 {
            return;
        }
        name(out, "lora_id");
        match event.adapter_id {
            Some(id) => uint(out, id),
            None => nil(out),
        }
    }

    /// One entry for each block: nil, or the adapter's name and, in the chain's first block, the salt.
    fn extra_keys(&self, out: &mut Out, event: &Stored<'_>) {
        array(out, event.hashes.len());
        for index in 0..event.hashes.len() {
            let salt = event.salt.filter(|_| index == 0 && event.parent.is_none());
            let keys = usize::from(event.adapter.is_some()) + usize::from(salt.is_some());
            if keys == 0 {
                nil(out);
                continue;
            }
            array(out, keys);
            for key in [event.adapter, salt].into_iter().flatten() {
                text(out, key);
            }
        }
    }

    fn hash_list(&self, out: &mut Out, hashes: &[EngineHash]) {
        array(out, hashes.len());
        for hash in hashes {
            self.hash(out, *hash);
        }
    }

    fn hash(&self, out: &mut Out, hash: EngineHash) {
        match self.hashes {
            HashForm::Bytes => mp::write_bin(out, &hash.to_bytes()).expect(INFALLIBLE),
            HashForm::Int if self.wire.is_sglang() => {
                mp::write_sint(out, i64::from_ne_bytes(hash.0.to_ne_bytes())).expect(INFALLIBLE);
            }
            HashForm::Int => uint(out, hash.0),
        }
    }

    fn has_medium(&self) -> bool {
        self.wire >= Wire::Vllm0_10_2 && self.wire != Wire::Dynamo1_6_1
    }

    fn has_group(&self) -> bool {
        self.wire >= Wire::Vllm0_20 && !self.wire.is_sglang()
    }

    fn medium(&self, medium: Medium) -> &'static str {
        match medium {
            Medium::Gpu => "GPU",
            Medium::Cpu if self.wire.is_sglang() => "CPU_PINNED",
            Medium::Cpu => "CPU",
        }
    }

    fn adapter_id(&mut self, name: &str) -> u64 {
        let at = self.adapters.iter().position(|known| known == name).unwrap_or_else(|| {
            self.adapters.push(name.to_owned());
            self.adapters.len() - 1
        });
        at as u64 + 1
    }

    /// The hash as published; the cache's own except for SGLang.
    fn published(&self, hash: EngineHash) -> EngineHash {
        self.unsalted.get(&hash).map_or(hash, |(published, _)| *published)
    }

    fn remember(&mut self, hashes: &[EngineHash], parent: Option<EngineHash>, tokens: &[u32]) -> Vec<EngineHash> {
        if !self.wire.is_sglang() {
            return hashes.to_vec();
        }
        let mut above = parent.map_or_else(|| hash::root(0), |hash| self.published(hash));
        let mut published = Vec::with_capacity(hashes.len());
        for (own, block) in hashes.iter().zip(tokens.chunks(self.block_size as usize)) {
            above = hash::next(above, block, None, None);
            self.unsalted.entry(*own).or_insert((above, 0)).1 += 1;
            published.push(above);
        }
        published
    }

    fn forget(&mut self, hash: EngineHash) -> EngineHash {
        let Some((published, copies)) = self.unsalted.get_mut(&hash) else {
            return hash;
        };
        let published = *published;
        *copies -= 1;
        if *copies == 0 {
            self.unsalted.remove(&hash);
        }
        published
    }
}

fn optional_text(out: &mut Out, value: Option<&str>) {
    match value {
        Some(value) => text(out, value),
        None => nil(out),
    }
}

/// A stored event as it will be written.
struct Stored<'a> {
    hashes: &'a [EngineHash],
    parent: Option<EngineHash>,
    tokens: &'a [u32],
    block_size: u32,
    adapter_id: Option<u64>,
    adapter: Option<&'a str>,
    salt: Option<&'a str>,
    medium: Medium,
    placeholder: bool,
}
