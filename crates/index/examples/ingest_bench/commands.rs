//! The same events as replicated commands, and a snapshot of what they give.

use cairn_blocks::{BlockSize, Depth};
use cairn_index::codec::{decode_command, decode_snapshot, encode_command, encode_snapshot};
use cairn_index::{
    Batch, Command, HolderId, HolderSpec, Incarnation, IndexState, LogIndex, Op, PoolSpec, Reach, Role, Seq, SourceId,
    SourceSpec, Tier, WorkerSpec,
};

use crate::cpu_ns;
use crate::workload::Event;

/// Time and size of a snapshot of the same events, applied as batches.
pub fn snapshot(events: &[Event], workers: usize) {
    let mut state = IndexState::new();
    let mut commands = Vec::new();
    for n in 0..workers as u32 {
        commands.push(Command::RegisterSource {
            spec: spec(n),
            resume: None,
        });
    }
    let mut seqs = vec![0u64; workers];
    let mut batches = Vec::new();
    for event in events {
        let (holder, op) = match event {
            Event::Store {
                holder,
                anchor,
                depth,
                keys,
            } => {
                let (anchor, anchor_depth) = (*anchor, Depth(*depth));
                (
                    holder,
                    Op::Store {
                        holder: HolderId(*holder),
                        anchor,
                        anchor_depth,
                        skip: 0,
                        keys: keys.clone(),
                    },
                )
            }
            Event::Remove {
                holder,
                key,
                depth,
                count,
            } => (
                holder,
                Op::Remove {
                    holder: HolderId(*holder),
                    key: *key,
                    depth: Depth(*depth),
                    count: *count,
                },
            ),
            Event::Match { .. } => continue,
        };
        seqs[*holder as usize] += 1;
        let incarnation = Incarnation(u64::from(*holder) + 1);
        let (source, seq) = (SourceId(*holder), Seq(seqs[*holder as usize]));
        batches.push(Batch {
            source,
            incarnation,
            seq,
            ops: vec![op],
        });
        if batches.len() == 500 {
            commands.push(Command::Batches(std::mem::take(&mut batches)));
        }
    }
    commands.push(Command::Batches(batches));
    let encoded: Vec<Vec<u8>> = commands.iter().map(encode_command).collect();
    let bytes: usize = encoded.iter().map(Vec::len).sum();
    drop(commands);
    let start = cpu_ns();
    for (at, bytes) in (1..).zip(&encoded) {
        state.apply(LogIndex(at), &decode_command(bytes).unwrap());
    }
    let spent = cpu_ns() - start;
    let counters = state.counters();
    let changes = counters.stored_blocks + counters.removed_blocks;
    println!(
        "as commands: {:.2} B and {:.1} ns a block change, decoded and applied; {counters:?}",
        bytes as f64 / changes as f64,
        spent as f64 / changes as f64
    );
    let start = cpu_ns();
    let mut bytes = Vec::new();
    encode_snapshot(&state, &mut bytes).unwrap();
    let written = cpu_ns() - start;
    let start = cpu_ns();
    let read = decode_snapshot(&bytes[..]).unwrap();
    println!(
        "snapshot: {:.1} MB, written in {:.1} ms, read in {:.1} ms; digest in {:.1} us",
        bytes.len() as f64 / 1e6,
        written as f64 / 1e6,
        (cpu_ns() - start) as f64 / 1e6,
        {
            let start = cpu_ns();
            assert_eq!(read.digest(), state.digest());
            (cpu_ns() - start) as f64 / 2e3
        }
    );
}

fn spec(n: u32) -> SourceSpec {
    SourceSpec {
        name: format!("engine-{n}"),
        agent: "bench".into(),
        pool: PoolSpec {
            name: "bench".into(),
            models: vec!["bench".into()],
            block_size: BlockSize::DEFAULT,
            max_model_len: None,
            model_root: None,
        },
        worker: WorkerSpec {
            engine_url: format!("http://engine-{n}"),
            rank: 0,
            ranks: 1,
            host: String::new(),
            role: Role::Both,
            engine_kind: "vllm".into(),
            engine_block_size: 16,
            capacity_blocks: 0,
            max_num_seqs: 0,
            max_batched_tokens: 0,
            adapters: Vec::new(),
            bootstrap: None,
        },
        holders: vec![HolderSpec {
            tier: Tier::Gpu,
            fetch_unit: 16,
            reach: Reach::Worker,
        }],
    }
}
