//! The tokenizer that comes with the program, for the simulated engines and for trying things out.
//!
//! `examples/train_embedded.rs` writes the files; the corpus is generated there.

use crate::error::LoadError;
use crate::files::Files;

pub(crate) fn files() -> Result<Files, LoadError> {
    Files::from_texts(
        include_str!("../assets/tokenizer.json"),
        include_str!("../assets/tokenizer_config.json"),
        include_str!("../assets/chat_template.jinja"),
    )
}
