//! One event's fields, from a positional array or a tagged map of any engine version.

use cairn_ingest::{BlockExtra, EngineEvent, EngineHash, ExtraValue, Medium, RefusalReason, Removed, SpecKind, Stored};
use xxhash_rust::xxh3::xxh3_128;

use super::cursor::{Cursor, Value};

/// Tokens in one message: four prompts of a million tokens.
const MAX_TOKENS: usize = 4 << 20;
/// Hashes in one message: the same prompts at page size 4.
const MAX_HASHES: usize = 1 << 20;
/// Extra keys in one message.
const MAX_EXTRAS: usize = 1 << 16;
/// Longest adapter name, salt or identity in bytes.
const MAX_TEXT: usize = 16 << 10;
/// Largest engine block in tokens; hybrid models pad theirs to some thousands.
const MAX_BLOCK_SIZE: u64 = 1 << 16;

type Read<T> = Result<T, RefusalReason>;

/// What one message may still allocate.
#[derive(Debug)]
pub(super) struct Budget {
    tokens: usize,
    hashes: usize,
    extras: usize,
}

impl Budget {
    pub(super) fn new() -> Self {
        Self {
            tokens: MAX_TOKENS,
            hashes: MAX_HASHES,
            extras: MAX_EXTRAS,
        }
    }
}

fn spend(budget: &mut usize, n: usize) -> Read<()> {
    *budget = budget.checked_sub(n).ok_or(RefusalReason::TooLarge)?;
    Ok(())
}

/// Every field that some version sends and Cairn uses.
#[derive(Default)]
struct Fields<'a> {
    tag: Option<&'a [u8]>,
    hashes: Option<Vec<EngineHash>>,
    parent: Option<EngineHash>,
    tokens: Option<Vec<u32>>,
    block_size: Option<u64>,
    lora_id: Option<i64>,
    medium: Option<&'a [u8]>,
    adapter: Option<Box<str>>,
    extra_keys: Vec<BlockExtra>,
    has_extra_keys: bool,
    group: Option<u32>,
    spec_kind: SpecKind,
    sliding_window: Option<u32>,
    cache_salt: Option<Box<str>>,
    remaining_copies: Option<Vec<u32>>,
}

/// Names of the positions after the tag, as vLLM up to 0.23 sends them.
const STORED_POSITIONS: [&[u8]; 11] = [
    b"block_hashes",
    b"parent_block_hash",
    b"token_ids",
    b"block_size",
    b"lora_id",
    b"medium",
    b"lora_name",
    b"extra_keys",
    b"group_idx",
    b"kv_cache_spec_kind",
    b"kv_cache_spec_sliding_window",
];
const REMOVED_POSITIONS: [&[u8]; 3] = [b"block_hashes", b"medium", b"group_idx"];

/// Reads the event under the cursor.
pub(super) fn read(cursor: &mut Cursor<'_>, budget: &mut Budget) -> Read<EngineEvent> {
    let mut fields = Fields::default();
    match cursor.value()? {
        Value::Map(pairs) => {
            for _ in 0..pairs {
                match cursor.value()? {
                    Value::Text(b"type") => fields.tag = Some(text(cursor)?.ok_or(RefusalReason::MissingField)?),
                    Value::Text(name) => fields.read(name, cursor, budget)?,
                    Value::Unsigned(_) | Value::Negative(_) | Value::Bytes(_) => cursor.skip()?,
                    _ => return Err(RefusalReason::BadField),
                }
            }
        }
        Value::Array(0) => return Err(RefusalReason::MissingField),
        Value::Array(values) => {
            let tag = text(cursor)?.ok_or(RefusalReason::MissingField)?;
            fields.tag = Some(tag);
            let names: &[&[u8]] = match tag {
                b"BlockStored" => &STORED_POSITIONS,
                b"BlockRemoved" => &REMOVED_POSITIONS,
                _ => &[],
            };
            for at in 0..values - 1 {
                match names.get(at) {
                    Some(name) => fields.read(name, cursor, budget)?,
                    None => cursor.skip()?,
                }
            }
        }
        _ => return Err(RefusalReason::BadField),
    }
    fields.event()
}

impl<'a> Fields<'a> {
    fn read(&mut self, name: &[u8], cursor: &mut Cursor<'a>, budget: &mut Budget) -> Read<()> {
        match name {
            b"block_hashes" => self.hashes = hashes(cursor, budget)?,
            b"parent_block_hash" => self.parent = hash(cursor.value()?)?,
            b"token_ids" => self.tokens = tokens(cursor, budget)?,
            b"block_size" => self.block_size = unsigned(cursor)?,
            b"lora_id" => self.lora_id(cursor.value()?)?,
            b"medium" => self.medium = text(cursor)?,
            b"lora_name" => {
                if let Some(name) = short_text(cursor)? {
                    self.adapter = Some(name);
                }
            }
            b"extra_keys" => {
                self.extra_keys = extra_keys(cursor, budget)?;
                self.has_extra_keys = true;
            }
            b"group_idx" => self.group = small(cursor)?,
            b"kv_cache_spec_kind" => self.spec_kind = text(cursor)?.map_or(SpecKind::Unsaid, SpecKind::parse),
            b"kv_cache_spec_sliding_window" => self.sliding_window = small(cursor)?,
            b"cache_salt" => self.cache_salt = short_text(cursor)?,
            b"remaining_copy_counts" => self.remaining_copies = counts(cursor, budget)?,
            _ => cursor.skip()?,
        }
        Ok(())
    }

    /// A number; an engine that sends a name here means the adapter.
    fn lora_id(&mut self, value: Value<'_>) -> Read<()> {
        match value {
            Value::Nil => {}
            Value::Unsigned(n) => self.lora_id = Some(i64::try_from(n).map_err(|_| RefusalReason::BadField)?),
            Value::Negative(n) => self.lora_id = Some(n),
            Value::Text(name) => {
                if self.adapter.is_none() {
                    self.adapter = Some(owned(name)?);
                }
            }
            _ => return Err(RefusalReason::BadField),
        }
        Ok(())
    }

    fn event(self) -> Read<EngineEvent> {
        let medium = match self.medium {
            None => Medium::Gpu,
            Some(name) => Medium::parse(name).ok_or(RefusalReason::UnknownMedium)?,
        };
        match self.tag {
            Some(b"BlockStored") => {
                let block_size = self.block_size.unwrap_or(0);
                if block_size > MAX_BLOCK_SIZE {
                    return Err(RefusalReason::BadField);
                }
                Ok(EngineEvent::Stored(Stored {
                    hashes: self.hashes.ok_or(RefusalReason::MissingField)?,
                    parent: self.parent,
                    tokens: self.tokens.unwrap_or_default(),
                    block_size: u32::try_from(block_size).map_err(|_| RefusalReason::BadField)?,
                    medium,
                    adapter: self.adapter,
                    lora_id: self.lora_id,
                    has_extra_keys: self.has_extra_keys,
                    extra_keys: self.extra_keys,
                    group: self.group,
                    spec_kind: self.spec_kind,
                    sliding_window: self.sliding_window,
                    cache_salt: self.cache_salt,
                    remaining_copies: self.remaining_copies,
                }))
            }
            Some(b"BlockRemoved") => Ok(EngineEvent::Removed(Removed {
                hashes: self.hashes.ok_or(RefusalReason::MissingField)?,
                medium,
                group: self.group,
                cache_salt: self.cache_salt,
                remaining_copies: self.remaining_copies,
            })),
            Some(b"AllBlocksCleared") => Ok(EngineEvent::Cleared),
            Some(_) => Err(RefusalReason::UnknownTag),
            None => Err(RefusalReason::MissingField),
        }
    }
}

fn array(cursor: &mut Cursor<'_>) -> Read<Option<usize>> {
    match cursor.value()? {
        Value::Array(n) => Ok(Some(n)),
        Value::Nil => Ok(None),
        _ => Err(RefusalReason::BadField),
    }
}

fn hashes(cursor: &mut Cursor<'_>, budget: &mut Budget) -> Read<Option<Vec<EngineHash>>> {
    let Some(n) = array(cursor)? else { return Ok(None) };
    spend(&mut budget.hashes, n)?;
    let mut hashes = Vec::with_capacity(n);
    for _ in 0..n {
        hashes.push(hash(cursor.value()?)?.ok_or(RefusalReason::BadField)?);
    }
    Ok(Some(hashes))
}

fn hash(value: Value<'_>) -> Read<Option<EngineHash>> {
    match value {
        Value::Unsigned(n) => Ok(Some(EngineHash(n))),
        Value::Negative(n) => Ok(Some(EngineHash::from_signed(n))),
        Value::Bytes(bytes) | Value::Text(bytes) => Ok(Some(EngineHash::from_bytes(bytes))),
        Value::Nil => Ok(None),
        _ => Err(RefusalReason::BadField),
    }
}

fn tokens(cursor: &mut Cursor<'_>, budget: &mut Budget) -> Read<Option<Vec<u32>>> {
    let Some(n) = array(cursor)? else { return Ok(None) };
    spend(&mut budget.tokens, n)?;
    cursor.tokens(n).map(Some)
}

fn counts(cursor: &mut Cursor<'_>, budget: &mut Budget) -> Read<Option<Vec<u32>>> {
    match cursor.value()? {
        Value::Nil => Ok(None),
        Value::Unsigned(n) => Ok(Some(vec![u32::try_from(n).unwrap_or(u32::MAX)])),
        Value::Array(n) => {
            spend(&mut budget.hashes, n)?;
            cursor.tokens(n).map(Some)
        }
        _ => Err(RefusalReason::BadField),
    }
}

fn unsigned(cursor: &mut Cursor<'_>) -> Read<Option<u64>> {
    match cursor.value()? {
        Value::Unsigned(n) => Ok(Some(n)),
        Value::Nil => Ok(None),
        _ => Err(RefusalReason::BadField),
    }
}

fn small(cursor: &mut Cursor<'_>) -> Read<Option<u32>> {
    unsigned(cursor)?
        .map(|n| u32::try_from(n).map_err(|_| RefusalReason::BadField))
        .transpose()
}

fn text<'a>(cursor: &mut Cursor<'a>) -> Read<Option<&'a [u8]>> {
    match cursor.value()? {
        Value::Text(text) => Ok(Some(text)),
        Value::Nil => Ok(None),
        _ => Err(RefusalReason::BadField),
    }
}

fn short_text(cursor: &mut Cursor<'_>) -> Read<Option<Box<str>>> {
    text(cursor)?.map(owned).transpose()
}

fn owned(text: &[u8]) -> Read<Box<str>> {
    if text.len() > MAX_TEXT {
        return Err(RefusalReason::TooLarge);
    }
    std::str::from_utf8(text)
        .map(Box::from)
        .map_err(|_| RefusalReason::BadField)
}

/// Per block nil or a list; nil for all of them where the field is nil.
fn extra_keys(cursor: &mut Cursor<'_>, budget: &mut Budget) -> Read<Vec<BlockExtra>> {
    let mut extras = Vec::new();
    for block in 0..array(cursor)?.unwrap_or(0) {
        let n = match cursor.value()? {
            Value::Nil | Value::Array(0) => continue,
            Value::Array(n) => n,
            _ => return Err(RefusalReason::BadField),
        };
        spend(&mut budget.extras, n)?;
        let mut values = Vec::with_capacity(n);
        for _ in 0..n {
            if let Some(value) = extra_value(cursor, budget)? {
                values.push(value);
            }
        }
        let block = u32::try_from(block).map_err(|_| RefusalReason::TooLarge)?;
        extras.push(BlockExtra { block, values });
    }
    Ok(extras)
}

fn extra_value(cursor: &mut Cursor<'_>, budget: &mut Budget) -> Read<Option<ExtraValue>> {
    let value = cursor.value()?;
    if let Value::Array(n) = value {
        spend(&mut budget.extras, n)?;
        let mut identity = None;
        for _ in 0..n {
            match cursor.value()? {
                Value::Array(_) | Value::Map(_) => return Err(RefusalReason::TooDeep),
                part => {
                    if identity.is_none() {
                        identity = scalar_text(part)?;
                    }
                }
            }
        }
        return Ok(identity.map(ExtraValue::Tuple));
    }
    // Raw bytes are content by their nature, never a salt or a name.
    let bare = !matches!(value, Value::Bytes(_));
    Ok(scalar_text(value)?.map(if bare { ExtraValue::Bare } else { ExtraValue::Tuple }))
}

/// Text as it is, numbers in decimal, raw bytes (prompt embeddings) by their hash.
fn scalar_text(value: Value<'_>) -> Read<Option<Box<str>>> {
    Ok(match value {
        Value::Text(text) => Some(owned(text)?),
        Value::Bytes(bytes) => Some(format!("bytes:{:032x}", xxh3_128(bytes)).into()),
        Value::Unsigned(n) => Some(n.to_string().into()),
        Value::Negative(n) => Some(n.to_string().into()),
        Value::Nil => None,
        _ => return Err(RefusalReason::BadField),
    })
}
