//! A plain engine: a block pool with an LRU of free blocks, a CPU tier, and events as vLLM sends them.

#![allow(dead_code)]

use std::collections::{BTreeMap, VecDeque};

use cairn_blocks::Token;
use cairn_ingest::{EngineEvent, EngineHash, EventBatch, Medium, Removed, Stored};

/// SplitMix64 (Steele et al. 2014).
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// How the CPU tier's events look.
#[derive(Clone, Copy, PartialEq)]
pub enum Offload {
    None,
    /// Hashes only.
    Bare,
    /// Tokens and parents, one event a block, in any order.
    Described,
}

pub struct Engine {
    pub block_size: u32,
    pub capacity: usize,
    pub cpu_capacity: usize,
    pub offload: Offload,
    /// Physical GPU copies, oldest first: each is one block of some hash.
    gpu: VecDeque<u64>,
    cpu: VecDeque<u64>,
    /// Stored on the GPU in the last step, offloaded in the next.
    to_offload: Vec<(u64, Option<u64>, Vec<Token>)>,
    pub seq: u64,
    pub life: u64,
    /// Every message of this life.
    pub log: Vec<EventBatch>,
    /// The tokens up to the end of every block that ever was.
    chains: BTreeMap<u64, Vec<Token>>,
}

impl Engine {
    pub fn new(block_size: u32, capacity: usize, cpu_capacity: usize, offload: Offload) -> Self {
        Self {
            block_size,
            capacity,
            cpu_capacity,
            offload,
            gpu: VecDeque::new(),
            cpu: VecDeque::new(),
            to_offload: Vec::new(),
            seq: 0,
            life: 1,
            log: Vec::new(),
            chains: BTreeMap::new(),
        }
    }

    pub fn restart(&mut self) {
        let life = self.life + 1;
        *self = Self {
            life,
            ..Self::new(self.block_size, self.capacity, self.cpu_capacity, self.offload)
        };
    }

    /// The engine's hash of every block of a prompt.
    pub fn hashes(&self, prompt: &[Token]) -> Vec<u64> {
        let mut above = 0xfeed;
        prompt
            .chunks_exact(self.block_size as usize)
            .map(|block| {
                for token in block {
                    above = Rng(above ^ u64::from(*token)).next();
                }
                above
            })
            .collect()
    }

    fn gpu_holds(&self, hash: u64) -> bool {
        self.gpu.contains(&hash)
    }

    /// Serves a prompt: what happens to the cache goes into one message.
    pub fn serve(&mut self, prompt: &[Token], rng: &mut Rng) -> Option<EventBatch> {
        let size = self.block_size as usize;
        let hashes = self.hashes(prompt);
        for (i, hash) in hashes.iter().enumerate() {
            self.chains
                .entry(*hash)
                .or_insert_with(|| prompt[..(i + 1) * size].to_vec());
        }
        let mut events = self.offload_events(rng);
        let mut hit = hashes.iter().take_while(|h| self.gpu_holds(**h)).count();
        if hit * size == prompt.len() && hit > 0 {
            // The last token is always computed, so the last block is filled once more: a second copy.
            hit -= 1;
        }
        for hash in &hashes[..hit] {
            let at = self.gpu.iter().position(|h| h == hash).unwrap();
            self.gpu.remove(at);
            self.gpu.push_back(*hash);
        }
        let new = hashes.len() - hit;
        if new > 0 && hashes.len() <= self.capacity {
            while self.gpu.len() + new > self.capacity {
                let victim = self.gpu.pop_front().unwrap();
                events.push(removed(&[victim], Medium::Gpu));
            }
            // Tail first is what goes next, so the tail lies nearer to the front.
            for hash in hashes[hit..].iter().rev() {
                self.gpu.push_back(*hash);
            }
            let parent = hit.checked_sub(1).map(|i| EngineHash(hashes[i]));
            events.push(EngineEvent::Stored(Stored {
                hashes: hashes[hit..].iter().map(|h| EngineHash(*h)).collect(),
                parent,
                tokens: prompt[hit * size..hashes.len() * size].to_vec(),
                block_size: self.block_size,
                has_extra_keys: true,
                ..Stored::default()
            }));
            for i in hit..hashes.len() {
                let parent = i.checked_sub(1).map(|p| hashes[p]);
                self.to_offload
                    .push((hashes[i], parent, prompt[i * size..(i + 1) * size].to_vec()));
            }
        }
        self.publish(events)
    }

    /// Copies of what the last step stored, in any order, after room was made.
    fn offload_events(&mut self, rng: &mut Rng) -> Vec<EngineEvent> {
        let mut events = Vec::new();
        let mut fresh = std::mem::take(&mut self.to_offload);
        if self.offload == Offload::None {
            return events;
        }
        fresh.retain(|(hash, ..)| !self.cpu.contains(hash));
        fresh.sort_by_key(|(hash, ..)| *hash);
        fresh.dedup_by_key(|(hash, ..)| *hash);
        let mut victims = Vec::new();
        while self.cpu.len() + fresh.len() > self.cpu_capacity && !self.cpu.is_empty() {
            victims.push(self.cpu.pop_front().unwrap());
        }
        if !victims.is_empty() {
            events.push(removed(&victims, Medium::Cpu));
        }
        fresh.truncate(self.cpu_capacity);
        while !fresh.is_empty() {
            let (hash, parent, tokens) = fresh.swap_remove(rng.below(fresh.len() as u64) as usize);
            self.cpu.push_back(hash);
            let described = self.offload == Offload::Described;
            events.push(EngineEvent::Stored(Stored {
                hashes: vec![EngineHash(hash)],
                parent: parent.filter(|_| described).map(EngineHash),
                tokens: if described { tokens } else { Vec::new() },
                block_size: if described { self.block_size } else { 0 },
                medium: Medium::Cpu,
                ..Stored::default()
            }));
        }
        events
    }

    /// One GPU copy goes for no visible reason, anywhere in a chain.
    pub fn evict_any(&mut self, rng: &mut Rng) -> Option<EventBatch> {
        if self.gpu.is_empty() {
            return None;
        }
        let at = rng.below(self.gpu.len() as u64) as usize;
        let hash = self.gpu.remove(at).unwrap();
        self.publish(vec![removed(&[hash], Medium::Gpu)])
    }

    pub fn clear(&mut self) -> Option<EventBatch> {
        self.gpu.clear();
        self.cpu.clear();
        self.to_offload.clear();
        self.publish(vec![EngineEvent::Cleared])
    }

    fn publish(&mut self, events: Vec<EngineEvent>) -> Option<EventBatch> {
        if events.is_empty() {
            return None;
        }
        let batch = EventBatch {
            seq: self.seq,
            content: Rng(self.life << 32 | self.seq).next(),
            ts: self.life as f64 * 1e6 + self.seq as f64,
            rank: None,
            events,
            refused: Vec::new(),
        };
        self.seq += 1;
        self.log.push(batch.clone());
        Some(batch)
    }

    /// Tokens of a prompt that the GPU has, then that the CPU has beyond them, in canonical blocks: the plain truth.
    ///
    /// A canonical block is there if some block that ends it, and all others of that chain that touch it, are.
    pub fn truth(&self, prompt: &[Token], canonical: u32) -> (u32, u32) {
        let (size, canonical) = (self.block_size as usize, canonical as usize);
        let has = |held: &VecDeque<u64>, block: usize| {
            let (start, end) = (block * canonical, (block + 1) * canonical);
            held.iter().any(|hash| {
                let chain = &self.chains[hash];
                chain.len() >= end
                    && chain.len() - size < end
                    && chain[..end] == prompt[..end]
                    && self.hashes(chain)[start / size..].iter().all(|h| held.contains(h))
            })
        };
        let blocks = prompt.len() / canonical;
        let on_gpu = (0..blocks).take_while(|b| has(&self.gpu, *b)).count();
        let on_cpu = (on_gpu..blocks).take_while(|b| has(&self.cpu, *b)).count();
        ((on_gpu * canonical) as u32, (on_cpu * canonical) as u32)
    }
}

fn removed(list: &[u64], medium: Medium) -> EngineEvent {
    let hashes = list.iter().map(|h| EngineHash(*h)).collect();
    EngineEvent::Removed(Removed {
        hashes,
        medium,
        ..Removed::default()
    })
}

/// Prompts that share beginnings: a tree of a few tokens' width.
pub fn prompt(rng: &mut Rng, longest: u64) -> Vec<Token> {
    let len = 1 + rng.below(longest);
    let mut tokens = Vec::new();
    let mut branch = rng.below(3) as u32;
    while (tokens.len() as u64) < len {
        if tokens.len() % 37 == 36 {
            branch = branch * 2 + rng.below(2) as u32;
        }
        tokens.push(branch.wrapping_mul(1_000) + tokens.len() as u32);
    }
    tokens
}
