//! Agent: follows the local engines' KV events and load and reports them to the index.

pub mod wire;
