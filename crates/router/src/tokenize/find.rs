//! Where a pool's tokenizer comes from: configuration, the engines' folder, the local model cache.

use std::path::{Path, PathBuf};

use cairn_tokens::{LoadOptions, ModelTokens};

/// Root that engines with the built-in tokenizer name.
pub(super) const EMBEDDED_ROOT: &str = "cairn:embedded";

/// Where a tokenizer comes from, and the tokenizer; or why there is none and what to do.
pub(super) fn find(configured: &str, root: Option<&str>, models: &[String]) -> (String, Result<ModelTokens, String>) {
    let load = |dir: &Path| ModelTokens::load(dir, LoadOptions::default()).map_err(|e| e.to_string());
    if configured == EMBEDDED_ROOT || (configured.is_empty() && root == Some(EMBEDDED_ROOT)) {
        return ("built in".into(), ModelTokens::embedded().map_err(|e| e.to_string()));
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
