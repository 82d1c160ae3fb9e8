//! Replay: engine model and traces in virtual time.
