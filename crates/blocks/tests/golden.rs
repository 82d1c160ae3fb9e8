//! The exact bytes of block keys: every agent, router and simulator of a cluster must derive the same ones.
//!
//! A change of any key makes all that an index holds unreachable, so it needs a new `KEY_FORMAT_VERSION`. With
//! `CAIRN_BLESS=1` the vectors are written anew; review the difference.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use cairn_blocks::{BlockSize, Chain, ClusterSeed, KEY_FORMAT_VERSION, MediaSpan, Namespace, Token};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Golden {
    key_format_version: u32,
    vectors: Vec<Vector>,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Vector {
    name: String,
    seed: u64,
    pool: String,
    block_size: u32,
    adapter: String,
    salt: String,
    /// Token `i` is `first + i * step`, wrapping.
    tokens: TokenRange,
    media: Vec<Media>,
    root: String,
    keys: Vec<String>,
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone, Copy)]
struct TokenRange {
    first: Token,
    step: Token,
    count: usize,
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
struct Media {
    start: usize,
    len: usize,
    identity: Option<String>,
}

fn vector(name: &str, block_size: u32, adapter: &str, salt: &str, tokens: TokenRange, media: &[Media]) -> Vector {
    let (seed, pool) = (0x5eed_0123_4567_89ab, "llama");
    let size = BlockSize::new(block_size).unwrap();
    let root = Namespace {
        seed: ClusterSeed(seed),
        pool,
        block_size: size,
        adapter,
        salt,
    }
    .root();
    let ids: Vec<Token> = (0..tokens.count as u32)
        .map(|i| tokens.first.wrapping_add(i.wrapping_mul(tokens.step)))
        .collect();
    let spans: Vec<MediaSpan<'_>> = media
        .iter()
        .map(|m| MediaSpan {
            start: m.start,
            len: m.len,
            identity: m.identity.as_deref(),
        })
        .collect();
    let chain = Chain::new(root, size, &ids, &spans);
    Vector {
        name: name.into(),
        seed,
        pool: pool.into(),
        block_size,
        adapter: adapter.into(),
        salt: salt.into(),
        tokens,
        media: media.to_vec(),
        root: format!("{:016x}", root.0),
        keys: chain.keys.iter().map(|k| format!("{:016x}", k.0)).collect(),
    }
}

fn all() -> Golden {
    let mut vectors = Vec::new();
    let tokens = TokenRange {
        first: 100,
        step: 7,
        count: 300,
    };
    let large = TokenRange {
        first: 0xffff_fff0,
        step: 0x0101_0101,
        count: 300,
    };
    let image = Media {
        start: 40,
        len: 30,
        identity: Some("img-5f2c".into()),
    };
    let audio = Media {
        start: 90,
        len: 20,
        identity: Some("aud-77".into()),
    };
    let nameless = Media {
        start: 130,
        len: 10,
        identity: None,
    };
    for block_size in [1, 8, 16, 48, 64, 128, 272] {
        vectors.push(vector("plain", block_size, "", "", tokens, &[]));
        vectors.push(vector("ids over the whole range", block_size, "", "", large, &[]));
        vectors.push(vector("adapter", block_size, "sql-lora", "", tokens, &[]));
        vectors.push(vector("salt", block_size, "", "tenant-a", tokens, &[]));
        vectors.push(vector(
            "adapter and salt",
            block_size,
            "sql-lora",
            "tenant-a",
            tokens,
            &[],
        ));
        vectors.push(vector(
            "image",
            block_size,
            "",
            "",
            tokens,
            std::slice::from_ref(&image),
        ));
        vectors.push(vector(
            "image and audio",
            block_size,
            "",
            "tenant-a",
            tokens,
            &[image.clone(), audio.clone()],
        ));
        vectors.push(vector(
            "media without identity",
            block_size,
            "",
            "",
            tokens,
            &[image.clone(), nameless.clone()],
        ));
    }
    Golden {
        key_format_version: KEY_FORMAT_VERSION,
        vectors,
    }
}

#[test]
fn keys_are_those_written_down() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/keys.json");
    let now = all();
    if std::env::var_os("CAIRN_BLESS").is_some_and(|v| v == "1") {
        std::fs::write(&path, serde_json::to_string_pretty(&now).unwrap() + "\n").unwrap();
    }
    let written: Golden = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(written.key_format_version, now.key_format_version);
    assert_eq!(
        written.vectors.len(),
        now.vectors.len(),
        "vectors were added or taken away"
    );
    for (written, now) in written.vectors.iter().zip(&now.vectors) {
        assert_eq!(written, now, "keys changed: raise KEY_FORMAT_VERSION, then bless");
    }
}

#[test]
fn vectors_differ_wherever_their_fields_do() {
    let golden = all();
    for (i, a) in golden.vectors.iter().enumerate() {
        for b in &golden.vectors[..i] {
            let same_root = (a.block_size, &a.adapter, &a.salt) == (b.block_size, &b.adapter, &b.salt);
            assert_eq!(a.root == b.root, same_root, "{} / {}", a.name, b.name);
        }
    }
}
