//! Raft log, vote and snapshots on disk for openraft.
