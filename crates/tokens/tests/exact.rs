//! Cached, cut and fast encoding gives the ids of the reference crate, on every kind of tokenizer file.
#![allow(clippy::unwrap_used, missing_docs)]

use cairn_tokens::{LoadOptions, ModelTokens, Pipeline};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;
use tokenizers::Tokenizer;

const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn embedded_file() -> Value {
    serde_json::from_str(include_str!("../assets/tokenizer.json")).unwrap()
}

fn split(pattern: &str) -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]})
}

fn added(file: &mut Value, id: u32, content: &str, flags: &[&str]) {
    let flag = |name: &str| flags.contains(&name);
    let token = json!({"id": id, "content": content, "single_word": flag("single_word"), "lstrip": flag("lstrip"),
        "rstrip": flag("rstrip"), "normalized": flag("normalized"), "special": flag("special")});
    file["added_tokens"].as_array_mut().unwrap().push(token);
}

/// Every kind of file whose flags change what may be cut.
fn files() -> Vec<(&'static str, Value)> {
    let base = embedded_file();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut file = base.clone();
        change(&mut file);
        file
    };
    vec![
        ("qwen", base.clone()),
        ("llama 3", with(&|f| f["pre_tokenizer"] = split(LLAMA_3))),
        ("o200k", with(&|f| f["pre_tokenizer"] = split(O200K))),
        ("tekken", with(&|f| f["pre_tokenizer"] = split(TEKKEN))),
        (
            "gpt-2",
            with(&|f| {
                f["pre_tokenizer"] =
                    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
            }),
        ),
        (
            "gpt-2 with a prefix space",
            with(&|f| {
                f["pre_tokenizer"] =
                    json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
            }),
        ),
        ("nfc", with(&|f| f["normalizer"] = json!({"type": "NFC"}))),
        ("nfkc", with(&|f| f["normalizer"] = json!({"type": "NFKC"}))),
        ("lowercase", with(&|f| f["normalizer"] = json!({"type": "Lowercase"}))),
        (
            "prepend",
            with(&|f| {
                f["normalizer"] = json!({"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "_"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]});
                f["pre_tokenizer"] = Value::Null;
            }),
        ),
        (
            "metaspace first",
            with(&|f| {
                f["pre_tokenizer"] =
                    json!({"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": false});
            }),
        ),
        (
            "metaspace always",
            with(&|f| {
                f["pre_tokenizer"] =
                    json!({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": true});
            }),
        ),
        (
            "a token that strips on the right",
            with(&|f| added(f, 4096, "<|end|>", &["rstrip", "special"])),
        ),
        (
            "a token that strips on the left",
            with(&|f| added(f, 4096, "<|end|>", &["lstrip", "special"])),
        ),
        (
            "a token of whole words",
            with(&|f| added(f, 4096, "word", &["single_word"])),
        ),
        (
            "a normalized token",
            with(&|f| added(f, 4096, "<tag>", &["normalized"])),
        ),
        (
            "a normalized token under nfc",
            with(&|f| {
                f["normalizer"] = json!({"type": "NFC"});
                added(f, 4096, "caf\u{e9}", &["normalized"]);
            }),
        ),
        (
            "normalized tokens inside others",
            with(&|f| {
                added(f, 4096, "im_", &["normalized"]);
                added(f, 4097, "<tag>", &[]);
            }),
        ),
        (
            "tokens that overlap",
            with(&|f| {
                added(f, 4096, "aba", &["special"]);
                added(f, 4097, "bab", &["special"]);
            }),
        ),
        (
            "tokens with spaces",
            with(&|f| {
                added(f, 4096, "a  b", &["special"]);
                added(f, 4097, "\n\n\n", &["special"]);
            }),
        ),
        ("a gap in the ids", with(&|f| added(f, 5000, "<|far|>", &["special"]))),
        (
            "digits apart",
            with(&|f| {
                f["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": true},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]});
            }),
        ),
    ]
}

fn load(file: &Value) -> (ModelTokens, Tokenizer) {
    let dir = tempfile::tempdir().unwrap();
    let bytes = serde_json::to_vec(file).unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), &bytes).unwrap();
    (
        ModelTokens::load(dir.path(), LoadOptions::default()).unwrap(),
        Tokenizer::from_bytes(&bytes).unwrap(),
    )
}

/// Fragments that meet in ways tokenizers care about.
fn fragment() -> impl Strategy<Value = String> {
    let fixed = prop::sample::select(vec![
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\n\n\n",
        "\r\n",
        "\t",
        " \n",
        "\n ",
        "\u{a0}",
        "\u{3000}",
        "\u{200b}",
        "\u{85}",
        "\u{1c}",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "start|>",
        "<think>",
        "</think>",
        "<|end|>",
        "<tag>",
        "<|far|>",
        "word",
        "aba",
        "bab",
        "ab",
        "a  b",
        "'s",
        "'LL",
        "\u{2019}t",
        "_",
        "caf\u{e9}",
        "cafe\u{301}",
        "\u{301}",
        "\u{212b}",
        "\u{fb01}",
        "A\u{30a}",
        "\u{4f60}\u{597d}",
        "\u{3053}\u{3093}",
        "\u{627}\u{644}",
        "\u{928}\u{94d}",
        "\u{1100}\u{1161}",
        "\u{1f642}",
        "\u{1f468}\u{200d}\u{1f469}",
        "\u{d7}",
        "123",
        "4567",
        "3.14",
        "\u{661}",
        "\u{bd}",
        "!",
        "?!",
        "/",
        "//\n",
        "...",
        "\"",
        "{\"a\": 1}",
        "(x)",
        "=",
        "\u{0}",
        "\u{fffd}",
        "\u{10ffff}",
    ]);
    prop_oneof![
        6 => fixed.prop_map(str::to_owned),
        6 => "[a-z]{1,9}".prop_map(|w| format!(" {w}")),
        2 => "[A-Z][a-z]{0,7}[,.;]?".prop_map(|w| w),
        1 => "\\PC{1,6}".prop_map(|w| w),
        1 => ("[a-z ]{1,5}", 100..700usize).prop_map(|(w, n)| w.repeat(n / 3)),
    ]
}

#[test]
fn cached_and_cut_encoding_equals_the_reference_on_every_kind_of_file() {
    for (name, file) in files() {
        let (ours, reference) = load(&file);
        let check = |text: &str| {
            let expect = reference.encode(text, false).unwrap().get_ids().to_vec();
            assert_eq!(
                ours.encode_prompt(text, false).unwrap(),
                expect,
                "{name}, cold: {text:?}"
            );
            assert_eq!(
                ours.encode_prompt(text, false).unwrap(),
                expect,
                "{name}, known: {text:?}"
            );
        };
        let config = ProptestConfig {
            cases: 12,
            failure_persistence: None,
            ..ProptestConfig::default()
        };
        let mut runner = proptest::test_runner::TestRunner::new_with_rng(
            config,
            proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
        );
        let texts = (
            prop::collection::vec(fragment(), 0..160),
            prop::collection::vec(fragment(), 0..40),
        );
        runner
            .run(&texts, |(shared, tail)| {
                let shared = shared.concat();
                check(&shared);
                check(&format!("{shared}{}", tail.concat()));
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn space_cuts_hold_around_every_pair_of_characters() {
    // Each cut lies between some character and a space; what follows the space matters too.
    let around: Vec<char> =
        "aZ9.!'/\"-_(\u{e9}\u{301}\u{4f60}\u{1f642}\u{bd}\u{661}\u{928}\u{94d}\u{200d}\u{ad}\u{fffd}"
            .chars()
            .collect();
    let after = [
        "x", " x", "\n", "\t", "'s", "!", "12", "\u{301}", "\u{4f60}", "\u{a0}", "  \n y",
    ];
    for (name, file) in files().into_iter().take(5) {
        let (ours, reference) = load(&file);
        let filler = "lorem ipsum ".repeat(43);
        for c in &around {
            for next in after {
                let text = format!("{}{c} {next} end", &filler[..511]);
                let expect = reference.encode(text.as_str(), false).unwrap().get_ids().to_vec();
                assert_eq!(
                    ours.encode_prompt(&text, false).unwrap(),
                    expect,
                    "{name}: {c:?} {next:?}"
                );
            }
        }
    }
}

#[test]
fn the_fast_encoder_is_refused_where_added_ids_have_gaps() {
    let mut file = embedded_file();
    added(&mut file, 5000, "<|far|>", &["special"]);
    let (ours, _) = load(&file);
    match ours.pipeline() {
        Pipeline::Reference { why } => assert!(why.contains("gaps"), "{why}"),
        Pipeline::Fast => panic!("fast was taken"),
    }
}

#[test]
fn every_boundary_of_a_prompt_is_kept_so_a_shared_start_costs_nothing_again() {
    let tokens = ModelTokens::embedded().unwrap();
    let system = "You are a careful assistant who reads all of the rules first. ".repeat(500);
    let chat = |user: &str| format!("<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n");
    tokens.encode_prompt(&chat("first question"), false).unwrap();
    let before = tokens.cache_stats();
    tokens.encode_prompt(&chat("something else entirely"), false).unwrap();
    let after = tokens.cache_stats();
    assert!(after.hits - before.hits > 50, "{before:?} {after:?}");
    assert!(
        after.misses - before.misses <= 1,
        "the shared part was computed again: {before:?} {after:?}"
    );
    // Also where two prompts part in the middle of a long text.
    let half = &system[..system.len() / 2];
    tokens
        .encode_prompt(&format!("{half} And now for something different."), false)
        .unwrap();
    let parted = tokens.cache_stats();
    let again = format!("{half} And now for a third thing.");
    tokens.encode_prompt(&again, false).unwrap();
    assert!(tokens.cache_stats().misses - parted.misses <= 1);
}

#[test]
fn a_budget_stops_the_work_between_pieces_and_keeps_what_is_done() {
    let tokens = ModelTokens::embedded().unwrap();
    let text: String = (0..20_000).map(|n| format!("word{n} ")).collect();
    let mut asked = 0;
    let mut stop = |_done: usize| {
        asked += 1;
        asked <= 10
    };
    let part = tokens.encode_prompt_within(&text, false, &mut stop).unwrap();
    assert_eq!(part.end, cairn_tokens::PromptEnd::Budget);
    let whole = tokens.encode_prompt(&text, false).unwrap();
    assert!(
        part.ids.len() > 500 && whole.starts_with(&part.ids),
        "{} of {}",
        part.ids.len(),
        whole.len()
    );
}

#[test]
fn texts_beyond_the_limits_are_refused_by_their_length_alone() {
    let options = LoadOptions {
        text_bytes_max: 1 << 20,
        ..LoadOptions::default()
    };
    let tokens = ModelTokens::embedded_with(options).unwrap();
    let text = "x".repeat((1 << 20) + 1);
    let refused = tokens.encode_prompt(&text, true).unwrap_err().to_string();
    assert!(refused.contains("1048577") && refused.contains("1048576"), "{refused}");
    let limit = tokens.chars_max(100);
    assert!(tokens.surely_longer_than(&"\u{4f60}".repeat(limit + 1), 100));
    assert!(!tokens.surely_longer_than(&"\u{4f60}".repeat(limit), 100));
}

#[test]
fn samples_of_served_prompts_agree_with_the_reference() {
    let tokens = ModelTokens::embedded().unwrap();
    for n in 0..2_000 {
        tokens
            .encode_prompt(&format!("<|im_start|>user\nquestion {n} caf\u{e9}<|im_end|>"), true)
            .unwrap();
    }
    let report = tokens.run_samples();
    assert!(report.compared >= 3 && report.different == 0, "{report:?}");
    assert_eq!(tokens.pipeline(), Pipeline::Fast);
}

#[test]
fn a_missing_or_broken_folder_is_named_with_its_remedy() {
    let missing = ModelTokens::load(Path::new("/nonexistent/model"), LoadOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        missing.contains("/nonexistent/model/tokenizer.json") && missing.contains("give the folder"),
        "{missing}"
    );
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), "{\"version\": 1}").unwrap();
    let broken = ModelTokens::load(dir.path(), LoadOptions::default())
        .unwrap_err()
        .to_string();
    assert!(broken.contains("tokenizer.json"), "{broken}");
    std::fs::write(
        dir.path().join("tokenizer.json"),
        include_str!("../assets/tokenizer.json"),
    )
    .unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), "[]").unwrap();
    let config = ModelTokens::load(dir.path(), LoadOptions::default())
        .unwrap_err()
        .to_string();
    assert!(config.contains("tokenizer_config.json"), "{config}");
}
