//! Instructions that the hot operations take, counted by valgrind: no clock, so a busy machine changes nothing.
//!
//! `instructions.txt` has what each operation took when it was last looked at; `CAIRN_BLESS=1` rewrites it. A count that
//! has grown by more than [`GROWTH`] fails. Another compiler counts a little differently, other processors don't.

#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::print_stdout, missing_docs)]

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::hint::black_box;
use std::process::Command;

use cairn_blocks::{BlockKey, BlockSize, Chain, ClusterSeed, Depth, Token};
use cairn_index::{
    BatchOutcome, HolderId, Incarnation, Overlap, Residency, Seq, SourceId, Stored as Outcome, Tier, WorkerId,
    WorkerOverlap,
};
use cairn_ingest::{
    EngineEvent, EngineHash, EventBatch, Millis, Registration, Removed, ReplayEnd, Source, SourceConfig, Stored,
};
use cairn_routing::{Ending, Micros, RequestFacts, RouterName, Routing, RoutingConfig, WorkerFacts};

/// Growth that is taken for a change of compiler or library.
const GROWTH: f64 = 1.08;
/// Names the operation to the child.
const OPERATION: &str = "CAIRN_COUNTED";
/// Operations and what their counts are divided by.
const OPERATIONS: [&str; 6] = ["keys", "ingest", "random", "mirror", "match", "choose"];

/// Numbers that look random, always the same.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// A chain of `family` that shares its first `shared` keys with all others.
fn chain(family: u64, shared: u64, len: u64) -> Vec<BlockKey> {
    let key = |i: u64| if i < shared { i } else { family << 20 | i };
    (0..len).map(|i| BlockKey(Numbers(key(i) + 1).next())).collect()
}

const ROOT: BlockKey = BlockKey(77);
const HOLDERS: u32 = 64;

/// What runs inside this is counted; gives by how many the count is to be divided.
#[inline(never)]
fn counted_here(counting: impl FnOnce() -> u64) -> u64 {
    black_box(counting())
}

fn residency() -> Residency {
    let mut residency = Residency::new();
    (0..HOLDERS).for_each(|holder| residency.add_holder(HolderId(holder)));
    residency
}

/// Chains come in two pieces and go from their tails, block by block at first.
fn ingest() -> u64 {
    let mut residency = residency();
    let chains: Vec<_> = (0..600).map(|family| chain(family, 40, 120)).collect();
    counted_here(|| {
        let mut blocks = 0;
        let mut held = VecDeque::new();
        for (n, keys) in chains.iter().enumerate() {
            let holder = HolderId(n as u32 % HOLDERS);
            let (start, rest) = keys.split_at(100);
            assert!(matches!(
                residency.store(holder, ROOT, Depth(0), 0, start),
                Outcome::Done { .. }
            ));
            for (i, key) in (100u32..).zip(rest) {
                let stored = residency.store(holder, keys[i as usize - 1], Depth(i), 0, &[*key]);
                assert!(matches!(stored, Outcome::Done { .. }));
            }
            blocks += keys.len() as u64;
            held.push_back((holder, keys));
            if held.len() > 256 {
                let (holder, keys) = held.pop_front().unwrap();
                for depth in (100..=120u32).rev() {
                    blocks += u64::from(
                        residency
                            .remove(holder, keys[depth as usize - 1], Depth(depth), 1)
                            .blocks,
                    );
                }
                blocks += u64::from(residency.remove(holder, keys[98], Depth(99), 99).blocks);
            }
        }
        blocks
    })
}

/// Blocks go anywhere and come again.
fn random() -> u64 {
    let mut residency = residency();
    let chains: Vec<_> = (0..400).map(|family| chain(family, 0, 120)).collect();
    for (n, keys) in chains.iter().enumerate() {
        residency.store(HolderId(n as u32 % 4), ROOT, Depth(0), 0, keys);
    }
    let mut numbers = Numbers(5);
    counted_here(|| {
        let mut blocks = 0;
        for _ in 0..20_000 {
            let n = numbers.below(400) as usize;
            let (keys, depth) = (&chains[n], 2 + numbers.below(119) as u32);
            let holder = HolderId(n as u32 % 4);
            let at = depth as usize;
            blocks += u64::from(residency.remove(holder, keys[at - 1], Depth(depth), 1).blocks);
            if let Outcome::Done { new_blocks } =
                residency.store(holder, keys[at - 2], Depth(depth - 1), 0, &keys[at - 1..at])
            {
                blocks += u64::from(new_blocks);
            }
        }
        blocks
    })
}

fn source() -> Source {
    let config = SourceConfig {
        seed: ClusterSeed(7),
        pool: "counted".into(),
        block_size: BlockSize::DEFAULT,
        tiers: vec![Tier::Gpu],
        capacity_blocks: 8_192,
        multimodal: false,
        replay: false,
        events: true,
    };
    let mut source = Source::new(config, Millis(1));
    let registration = Registration {
        source: SourceId(0),
        incarnation: Incarnation(1),
        holders: vec![HolderId(0)],
        seq: Seq(0),
        resumed: false,
    };
    source.registered(Millis(1), registration);
    source.connected(Millis(1));
    source.replay_ended(Millis(1), ReplayEnd::Complete);
    source
}

/// Messages of an engine whose cache is full: prompts come in one message, answers block by block, tails go.
fn messages() -> (Vec<EventBatch>, u64) {
    let mut out: Vec<EventBatch> = Vec::new();
    let mut held: VecDeque<EngineHash> = VecDeque::new();
    let mut blocks = 0;
    for prompt in 0..200u64 {
        let hash = |i: u64| EngineHash(Numbers(prompt << 20 | i | 1 << 60).next());
        let pieces = std::iter::once((0, 150)).chain((150..170).map(|i| (i, i + 1)));
        for (start, end) in pieces {
            let mut events = Vec::new();
            let gone = (held.len() + (end - start) as usize).saturating_sub(8_192);
            if gone > 0 {
                let hashes: Vec<EngineHash> = held.drain(..gone).collect();
                events.push(EngineEvent::Removed(Removed {
                    hashes,
                    ..Removed::default()
                }));
            }
            let token = |i: u64| (prompt * 31 + i) as Token;
            events.push(EngineEvent::Stored(Stored {
                hashes: (start..end).map(hash).collect(),
                parent: start.checked_sub(1).map(hash),
                tokens: (start * 16..end * 16).map(token).collect(),
                block_size: 16,
                ..Stored::default()
            }));
            blocks += gone as u64 + (end - start);
            let seq = out.len() as u64;
            out.push(EventBatch {
                seq,
                content: seq,
                ts: seq as f64,
                rank: None,
                events,
                refused: Vec::new(),
            });
        }
        held.extend((0..170).rev().map(hash));
    }
    (out, blocks)
}

fn mirror() -> u64 {
    let mut source = source();
    let (messages, blocks) = messages();
    counted_here(|| {
        for message in messages {
            source.live(Millis(1), message);
            while let Some(batch) = source.next_batch(Millis(1)) {
                let (incarnation, seq) = (batch.incarnation, batch.seq);
                let outcome = BatchOutcome::Applied {
                    unknown_anchors: Vec::new(),
                };
                source.acked(Millis(1), incarnation, seq, &outcome);
            }
        }
        blocks
    })
}

/// Keys of a long prompt from its tokens.
fn keys() -> u64 {
    let tokens: Vec<Token> = (0..128_000).collect();
    let mut chain = Chain::default();
    counted_here(|| {
        chain.extend(ROOT, BlockSize::DEFAULT, black_box(&tokens), &[]);
        chain.keys.len() as u64
    })
}

/// Prompts of 500 blocks of which every holder has some.
fn matches() -> u64 {
    let mut residency = residency();
    let prompts: Vec<_> = (0..32).map(|family| chain(family, 60, 500)).collect();
    let mut numbers = Numbers(9);
    for (n, keys) in prompts.iter().enumerate() {
        for holder in (0..HOLDERS).map(HolderId) {
            let held = if (holder.0 + n as u32).is_multiple_of(3) {
                1 + numbers.below(499)
            } else {
                30
            };
            residency.store(holder, ROOT, Depth(0), 0, &keys[..held as usize]);
        }
    }
    let mut out = Vec::with_capacity(HOLDERS as usize);
    counted_here(|| {
        for keys in prompts.iter().cycle().take(1_000) {
            residency.match_prefix(black_box(keys), &mut out);
        }
        1_000
    })
}

/// Decisions over 64 workers with reservation and ending.
fn choose() -> u64 {
    let config = RoutingConfig {
        router: RouterName("counted".into()),
        boot: 1,
        seed: 1,
        identity_seed: 77,
        policies: Vec::new(),
    };
    let mut routing = Routing::new(config).unwrap();
    (0..64).for_each(|w| routing.set_worker(Micros(0), WorkerFacts::new(WorkerId(w), "pool")));
    let prompts: Vec<_> = (0..16).map(|family| chain(family, 20, 500)).collect();
    let overlap = |w: u32| Overlap {
        gpu: w % 7 * 160,
        cpu: 0,
        shared: 0,
    };
    let overlaps: Vec<_> = (0..64)
        .map(|w| WorkerOverlap {
            worker: WorkerId(w),
            overlap: overlap(w),
        })
        .collect();
    let mut held = VecDeque::new();
    counted_here(|| {
        for i in 0..400u64 {
            let now = Micros(i * 2_000);
            let facts = RequestFacts {
                pool: "pool",
                prompt_tokens: 8_010,
                block_tokens: 16,
                expected_output: 100,
                keys: &prompts[i as usize % 16],
                ..RequestFacts::default()
            };
            let choice = routing.decide(now, &facts, &overlaps).unwrap();
            held.push_back(routing.reserve(now, &choice, &facts).unwrap());
            if held.len() > 64 {
                let mut ticket = held.pop_front().unwrap();
                routing.first_token(now, &mut ticket);
                let ending = Ending::Done { cached_tokens: Some(0) };
                routing.finish(now, ticket, ending, None);
            }
        }
        400
    })
}

/// What the child does: the operation that the environment names; tells by how many its count is to be divided.
#[test]
#[ignore = "runs inside the test below"]
fn counted_operation() {
    let operations = match std::env::var(OPERATION).as_deref() {
        Ok("keys") => keys(),
        Ok("ingest") => ingest(),
        Ok("random") => random(),
        Ok("mirror") => mirror(),
        Ok("match") => matches(),
        Ok("choose") => choose(),
        other => panic!("{OPERATION} names no operation: {other:?}"),
    };
    println!("operations: {operations}");
}

/// The number after `label` in a text.
fn number_after(text: &str, label: &str) -> Option<f64> {
    let rest = text.split(label).nth(1)?.trim_start();
    rest.split_whitespace().next()?.replace(',', "").parse().ok()
}

/// Instructions of one operation.
fn count(operation: &str) -> f64 {
    let output = Command::new("valgrind")
        .args([
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            "--toggle-collect=*counted_here*",
        ])
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "counted_operation",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(OPERATION, operation)
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    let of = || format!("{operation}: {}\n{out}\n{err}", output.status);
    let instructions = number_after(&err, "Collected :").unwrap_or_else(|| panic!("no count: {}", of()));
    let operations = number_after(&out, "operations:").unwrap_or_else(|| panic!("no result: {}", of()));
    assert!(instructions > operations, "nothing was counted: {}", of());
    instructions / operations
}

#[test]
fn hot_operations_take_no_more_instructions_than_they_did() {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64"))
        || Command::new("valgrind").arg("--version").output().is_err()
    {
        eprintln!("SKIPPED: hot_operations_take_no_more_instructions_than_they_did: install valgrind, on x86-64 Linux");
        return;
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/instructions.txt");
    let before = std::fs::read_to_string(path).unwrap_or_default();
    let (mut text, mut grown) = (String::new(), String::new());
    for operation in OPERATIONS {
        let now = count(operation);
        println!("{operation}: {now:.1} instructions");
        writeln!(text, "{operation} {now:.1}").unwrap();
        match number_after(&format!("\n{before}"), &format!("\n{operation} ")) {
            Some(before) if now <= before * GROWTH => {}
            other => writeln!(grown, "{operation}: {now:.1}, before {other:?}").unwrap(),
        }
    }
    if std::env::var_os("CAIRN_BLESS").is_some() {
        std::fs::write(path, text).unwrap();
    } else {
        assert!(
            grown.is_empty(),
            "more instructions than {path} says; CAIRN_BLESS=1 rewrites it:\n{grown}"
        );
    }
}
