//! Ingest: turns one engine's ordered KV events into gap-free, coalesced batches for the index.
