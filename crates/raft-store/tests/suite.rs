//! openraft's own storage suite over the log and the state machine.
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;

use cairn_raft_store::testing::{LogStore, Machine, SnapshotDir, TypeConfig};
use cairn_raft_store::{AppliedEntry, DataDir, Observer, SledEngine};
use openraft::StorageError;
use openraft::testing::{StoreBuilder, Suite};

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
