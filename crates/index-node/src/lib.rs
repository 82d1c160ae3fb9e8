//! Index node: replicates the index through Raft and serves ingest, feed and queries.
