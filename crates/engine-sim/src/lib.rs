//! A vLLM-compatible simulated engine over the replay engine model.
