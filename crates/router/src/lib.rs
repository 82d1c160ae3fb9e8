//! Router: turns requests into block keys, chooses a worker and proxies the stream.
