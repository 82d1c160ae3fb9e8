//! openraft's own storage suite over the log and the state machine, and snapshots of a state that goes on changing.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use cairn_blocks::{BlockKey, BlockSize, Depth};
use cairn_index::{
    Batch, Command, HolderId, HolderSpec, Incarnation, Op, PoolSpec, Reach, Role, Seq, SourceId, SourceSpec, Tier,
    WorkerSpec, codec,
};
use cairn_raft_store::testing::{LogStore, Machine, Payload, SnapshotDir, TypeConfig};
use cairn_raft_store::{AppliedEntry, DataDir, Observer, SledEngine};
use openraft::storage::RaftStateMachine;
use openraft::testing::{StoreBuilder, Suite};
use openraft::{CommittedLeaderId, Entry, EntryPayload, LogId, RaftSnapshotBuilder, StorageError};

struct Nobody;

impl Observer for Nobody {
    fn applied(&self, _entry: &AppliedEntry<'_>) {}
    fn installed(&self, _index: u64, _digest: u64) {}
}

/// Stores whose snapshots are written by a forked process from this weight on.
struct Builder(u64);

impl StoreBuilder<TypeConfig, LogStore, Machine, (tempfile::TempDir, DataDir)> for Builder {
    async fn build(&self) -> Result<((tempfile::TempDir, DataDir), LogStore, Machine), StorageError<u64>> {
        let temporary = tempfile::tempdir().unwrap();
        let directory = DataDir::open(temporary.path(), "c", 1, 7, 0).unwrap();
        let log = LogStore::new(Arc::new(SledEngine::open(&directory.log(), 0).unwrap()));
        let snapshots = SnapshotDir::open(directory.snapshots()).unwrap();
        let machine = Machine::open_forking_from(self.0, snapshots, 1, Arc::new(Nobody)).unwrap();
        Ok(((temporary, directory), log, machine))
    }
}

#[test]
fn openrafts_storage_suite_passes() {
    Suite::test_all(Builder(u64::MAX)).unwrap();
}

#[test]
fn openrafts_storage_suite_passes_where_a_forked_process_writes_snapshots() {
    Suite::test_all(Builder(0)).unwrap();
}

/// Notes the digest after each entry, and where a snapshot put the state.
#[derive(Default)]
struct Notes {
    applied: Mutex<BTreeMap<u64, u64>>,
    installed: Mutex<Vec<(u64, u64)>>,
}

impl Observer for Notes {
    fn applied(&self, entry: &AppliedEntry<'_>) {
        self.applied.lock().unwrap().insert(entry.index, entry.digest);
    }
    fn installed(&self, index: u64, digest: u64) {
        self.installed.lock().unwrap().push((index, digest));
    }
}

fn entry(index: u64, command: &Command) -> Entry<TypeConfig> {
    Entry {
        log_id: LogId::new(CommittedLeaderId::new(1, 1), index),
        payload: EntryPayload::Normal(Payload(codec::encode_command(command).into())),
    }
}

fn registration() -> Command {
    let worker = WorkerSpec {
        engine_url: "http://10.0.0.1:8000".into(),
        rank: 0,
        ranks: 1,
        host: "host".into(),
        role: Role::Both,
        engine_kind: "vllm".into(),
        engine_block_size: 16,
        capacity_blocks: 0,
        max_num_seqs: 0,
        max_batched_tokens: 0,
        adapters: vec![],
        bootstrap: None,
    };
    let pool = PoolSpec {
        name: "p".into(),
        models: vec!["m".into()],
        block_size: BlockSize::new(16).unwrap(),
        max_model_len: None,
        model_root: None,
    };
    let gpu = HolderSpec {
        tier: Tier::Gpu,
        fetch_unit: 16,
        reach: Reach::Worker,
    };
    let spec = SourceSpec {
        name: "http://10.0.0.1:8000#0".into(),
        agent: "agent".into(),
        pool,
        worker,
        holders: vec![gpu],
    };
    Command::RegisterSource { spec, resume: None }
}

/// One more chain, and the one of 2,000 batches before gone.
fn turn(seq: u64) -> Command {
    let key = |seq: u64, block: u64| BlockKey((seq << 8 | block).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let holder = HolderId(0);
    let mut ops = vec![Op::Store {
        holder,
        anchor: BlockKey(7),
        anchor_depth: Depth(0),
        skip: 0,
        keys: (1..=100).map(|block| key(seq, block)).collect(),
    }];
    if let Some(old) = seq.checked_sub(2_000).filter(|old| *old > 0) {
        ops.push(Op::Remove {
            holder,
            key: key(old, 100),
            depth: Depth(100),
            count: 60,
        });
    }
    Command::Batches(vec![Batch {
        source: SourceId(0),
        incarnation: Incarnation(1),
        seq: Seq(seq),
        ops,
    }])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshots_written_by_a_forked_process_are_of_one_instant_while_the_state_changes() {
    let dir = tempfile::tempdir().unwrap();
    let snapshots = || SnapshotDir::open(dir.path().to_owned()).unwrap();
    let notes = Arc::new(Notes::default());
    let mut machine = Machine::open_forking_from(0, snapshots(), 1, notes.clone()).unwrap();
    machine.apply([entry(1, &registration())]).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (mut applying, stopped) = (machine.clone(), stop.clone());
    let writer = tokio::spawn(async move {
        let mut seq = 1;
        while !stopped.load(Ordering::Relaxed) {
            applying.apply([entry(seq + 1, &turn(seq))]).await.unwrap();
            seq += 1;
            tokio::task::yield_now().await;
        }
        seq
    });
    for _ in 0..4 {
        let taken = machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
        let at = taken.meta.last_log_id.unwrap().index;
        let restored = Arc::new(Notes::default());
        Machine::open(snapshots(), 1, restored.clone()).unwrap();
        let expected = notes.applied.lock().unwrap().get(&at).copied().unwrap();
        assert_eq!(*restored.installed.lock().unwrap(), vec![(at, expected)]);
    }
    stop.store(true, Ordering::Relaxed);
    assert!(writer.await.unwrap() > 100, "nothing changed meanwhile");
}
