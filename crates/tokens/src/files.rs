//! The files of a model folder that decide its tokens.

use crate::error::LoadError;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use tokenizers::AddedToken;

/// The largest vocabularies in use (256k entries) have 35 MB files.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Configurations and templates.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Named templates beside the default one.
const TEMPLATES_MAX: usize = 32;

/// The names under which templates may ask for special tokens.
const NAMED_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// What was read.
#[derive(Debug, Clone, Default)]
pub(crate) struct Files {
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// Templates by name; a single one is `default`.
    pub templates: BTreeMap<String, String>,
    /// Special tokens by the name under which templates ask for them.
    pub named: Vec<(String, String)>,
    /// All special tokens that the configuration lists, in order.
    pub special: Vec<String>,
    /// Added tokens that the configuration describes, by id.
    pub added: BTreeMap<u32, AddedToken>,
}

impl Files {
    /// Reads a model folder.
    pub fn read(dir: &Path) -> Result<Self, LoadError> {
        let tokenizer = read(&dir.join("tokenizer.json"), TOKENIZER_BYTES_MAX)?;
        let config_path = dir.join("tokenizer_config.json");
        let config = match read_optional(&config_path)? {
            Some(bytes) => parse(&config_path, &bytes)?,
            None => Map::new(),
        };
        let mut files = Self {
            tokenizer,
            ..Self::default()
        };
        files.read_tokens(&config, &config_path)?;
        if files.added.is_empty() {
            let path = dir.join("special_tokens_map.json");
            if let Some(bytes) = read_optional(&path)? {
                files.read_special(&parse(&path, &bytes)?);
            }
        }
        files.read_templates(dir, &config, &config_path)?;
        Ok(files)
    }

    /// The files of a folder given as texts.
    pub fn from_texts(tokenizer: &str, config: &str, template: &str) -> Result<Self, LoadError> {
        let path = Path::new("tokenizer_config.json");
        let config = parse(path, config.as_bytes())?;
        let mut files = Self {
            tokenizer: tokenizer.as_bytes().to_vec(),
            ..Self::default()
        };
        files.read_tokens(&config, path)?;
        files.templates.insert("default".to_owned(), template.to_owned());
        Ok(files)
    }

    fn read_tokens(&mut self, config: &Map<String, Value>, path: &Path) -> Result<(), LoadError> {
        if let Some(Value::Object(listed)) = config.get("added_tokens_decoder") {
            for (id, token) in listed {
                let id = id
                    .parse()
                    .map_err(|_| malformed(path, "added_tokens_decoder has a key that is no id"))?;
                let token =
                    added_token(token).ok_or_else(|| malformed(path, "added_tokens_decoder has a bad token"))?;
                self.added.insert(id, token);
            }
        }
        self.read_special(config);
        Ok(())
    }

    fn read_special(&mut self, config: &Map<String, Value>) {
        let mut extra = Vec::new();
        for (key, value) in config {
            match (key.as_str(), value) {
                ("extra_special_tokens" | "additional_special_tokens", Value::Array(list)) => {
                    extra.extend(list.iter().filter_map(content));
                }
                ("extra_special_tokens", Value::Object(named)) => {
                    for (name, value) in named {
                        self.name(name, content(value));
                    }
                }
                (name, value) if name.ends_with("_token") => self.name(name, content(value)),
                _ => {}
            }
        }
        // Standard names first, as they were declared to the tokenizer.
        self.named.sort_by_key(|(name, _)| {
            NAMED_TOKENS
                .iter()
                .position(|n| n == name)
                .unwrap_or(NAMED_TOKENS.len())
        });
        self.special = Vec::new();
        for token in self.named.iter().map(|(_, token)| token).chain(&extra) {
            if !self.special.contains(token) {
                self.special.push(token.clone());
            }
        }
    }

    fn name(&mut self, name: &str, token: Option<String>) {
        if let Some(token) = token {
            self.named.retain(|(known, _)| known != name);
            self.named.push((name.to_owned(), token));
        }
    }

    fn read_templates(&mut self, dir: &Path, config: &Map<String, Value>, path: &Path) -> Result<(), LoadError> {
        match config.get("chat_template") {
            Some(Value::String(text)) => {
                self.templates.insert("default".to_owned(), text.clone());
            }
            Some(Value::Array(list)) => {
                for named in list.iter().take(TEMPLATES_MAX) {
                    match (named["name"].as_str(), named["template"].as_str()) {
                        (Some(name), Some(text)) => self.templates.insert(name.to_owned(), text.to_owned()),
                        _ => {
                            return Err(malformed(
                                path,
                                "chat_template lists an entry without name and template",
                            ));
                        }
                    };
                }
            }
            _ => {}
        }
        let mut own = BTreeMap::new();
        if let Some(text) = read_text(&dir.join("chat_template.jinja"))? {
            own.insert("default".to_owned(), text);
        }
        for (name, path) in named_templates(&dir.join("additional_chat_templates")) {
            if let Some(text) = read_text(&path)? {
                own.insert(name, text);
            }
        }
        // Files of their own replace what the configuration holds.
        if !own.is_empty() {
            self.templates = own;
        }
        let legacy = dir.join("chat_template.json");
        if !self.templates.contains_key("default")
            && let Some(bytes) = read_optional(&legacy)?
            && let Some(Value::String(text)) = parse(&legacy, &bytes)?.get("chat_template")
        {
            self.templates.insert("default".to_owned(), text.clone());
        }
        Ok(())
    }
}

fn named_templates(dir: &Path) -> Vec<(String, std::path::PathBuf)> {
    let entries = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let jinja = entries.filter(|path| path.extension().is_some_and(|e| e == "jinja"));
    let mut named: Vec<_> = jinja
        .filter_map(|path| Some((path.file_stem()?.to_str()?.to_owned(), path.clone())))
        .collect();
    named.sort();
    named.truncate(TEMPLATES_MAX);
    named
}

/// A token given as a string or as an object with its text.
fn content(value: &Value) -> Option<String> {
    value
        .as_str()
        .or_else(|| value["content"].as_str())
        .filter(|s| !s.is_empty())
        .map(str::to_owned)
}

fn added_token(value: &Value) -> Option<AddedToken> {
    let flag = |name: &str, default: bool| value[name].as_bool().unwrap_or(default);
    let special = flag("special", false);
    Some(
        AddedToken::from(value["content"].as_str()?, special)
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false))
            .single_word(flag("single_word", false))
            .normalized(flag("normalized", !special)),
    )
}

fn read(path: &Path, limit: u64) -> Result<Vec<u8>, LoadError> {
    let failed = |source| LoadError::Read {
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes > limit {
        return Err(LoadError::TooLarge {
            path: path.to_owned(),
            bytes,
            limit,
        });
    }
    let mut out = Vec::with_capacity(usize::try_from(bytes).unwrap_or_default());
    file.take(limit).read_to_end(&mut out).map_err(failed)?;
    Ok(out)
}

fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    match read(path, CONFIG_BYTES_MAX) {
        Err(LoadError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn read_text(path: &Path) -> Result<Option<String>, LoadError> {
    let Some(bytes) = read_optional(path)? else {
        return Ok(None);
    };
    String::from_utf8(bytes)
        .map(Some)
        .map_err(|_| malformed(path, "it is not UTF-8"))
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, LoadError> {
    serde_json::from_slice(bytes).map_err(|e| malformed(path, &e.to_string()))
}

fn malformed(path: &Path, reason: &str) -> LoadError {
    LoadError::Malformed {
        path: path.to_owned(),
        reason: reason.to_owned(),
    }
}
