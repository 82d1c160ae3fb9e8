//! Where a pool's tokenizer comes from: configuration, the engines' folder, the local model cache.

use std::io::Read;
use std::path::{Path, PathBuf};

use cairn_tokens::{LoadOptions, ModelTokens};

use crate::config::PoolConfig;

/// Root that engines with the built-in tokenizer name.
pub(super) const EMBEDDED_ROOT: &str = "cairn:embedded";

/// Largest chat template that is read; the longest in use have tens of KiB.
const TEMPLATE_BYTES_MAX: u64 = 4 << 20;

/// Where a tokenizer comes from, and the tokenizer; or why there is none and what to do.
pub(super) fn find(
    configured: &str,
    root: Option<&str>,
    models: &[String],
    options: &LoadOptions,
) -> (String, Result<ModelTokens, String>) {
    let load = |dir: &Path| ModelTokens::load(dir, options.clone()).map_err(|e| e.to_string());
    if configured == EMBEDDED_ROOT || (configured.is_empty() && root == Some(EMBEDDED_ROOT)) {
        let embedded = ModelTokens::embedded_with(options.clone());
        return ("built in".into(), embedded.map_err(|e| e.to_string()));
    }
    if !configured.is_empty() {
        return (format!("configured folder {configured}"), load(Path::new(configured)));
    }
    if let Some(dir) = root.map(Path::new).filter(|dir| dir.join("tokenizer.json").is_file()) {
        return (format!("the engine's folder {}", dir.display()), load(dir));
    }
    for name in root.into_iter().chain(models.iter().map(String::as_str)) {
        if let Some(dir) = cached_snapshot(name) {
            return (format!("local model cache {}", dir.display()), load(&dir));
        }
    }
    let why = "no tokenizer was found for this pool; name its folder as `tokenizer` under [[pool]]".to_string();
    (String::new(), Err(why))
}

/// Loads as the pool's engines were started; the error names the field at fault.
pub(super) fn options_of(pool: &PoolConfig) -> Result<LoadOptions, String> {
    let chat_template = match pool.chat_template.as_str() {
        "" => None,
        path => Some(read_template(path).map_err(|why| format!("chat_template {path:?} {why}"))?),
    };
    Ok(LoadOptions {
        chat_template,
        trust_request_chat_template: pool.trust_request_chat_template,
        default_chat_template_kwargs: pool.default_chat_template_kwargs.clone(),
        ..LoadOptions::default()
    })
}

/// As engines read it: Python's text files have one kind of line ends.
fn read_template(path: &str) -> Result<String, String> {
    let unreadable = |error: std::io::Error| format!("can't be read: {error}");
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut text = String::new();
    let read = file.take(TEMPLATE_BYTES_MAX + 1).read_to_string(&mut text);
    if read.map_err(unreadable)? as u64 > TEMPLATE_BYTES_MAX {
        return Err(format!(
            "has more than {TEMPLATE_BYTES_MAX} bytes; is it the right file?"
        ));
    }
    Ok(text.replace("\r\n", "\n").replace('\r', "\n"))
}

/// The snapshot of `org/name` in Hugging Face's local cache.
fn cached_snapshot(name: &str) -> Option<PathBuf> {
    if name.split('/').count() > 2 || name.contains("..") || name.starts_with('/') {
        return None;
    }
    let hub = std::env::var_os("HF_HUB_CACHE")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HF_HOME").map(|home| PathBuf::from(home).join("hub")))
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache/huggingface/hub")))?;
    let repository = hub.join(format!("models--{}", name.replace('/', "--")));
    let revision = std::fs::read_to_string(repository.join("refs/main")).ok()?;
    let dir = repository.join("snapshots").join(revision.trim());
    dir.join("tokenizer.json").is_file().then_some(dir)
}
