//! Tokens: Hugging Face tokenizers and chat templates giving exactly the ids the engine computes.
