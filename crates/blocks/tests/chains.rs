//! What block keys promise about chains.

#![allow(clippy::unwrap_used)]

use cairn_blocks::{BlockKey, BlockSize, Chain, ClusterSeed, MediaSpan, Namespace, Token, next_key};
use proptest::prelude::*;

fn size(tokens: u32) -> BlockSize {
    BlockSize::new(tokens).unwrap()
}

fn common_blocks(a: &[Token], b: &[Token], size: usize) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count() / size
}

proptest! {
    #[test]
    fn equal_prefixes_and_only_they_have_equal_keys(
        tokens in prop::collection::vec(any::<Token>(), 0..200),
        change in any::<(prop::sample::Index, Token)>(),
        block in 1u32..40,
    ) {
        let mut other = tokens.clone();
        if !other.is_empty() {
            *change.0.get_mut(&mut other) = change.1;
        }
        let a = Chain::new(BlockKey(1), size(block), &tokens, &[]);
        let b = Chain::new(BlockKey(1), size(block), &other, &[]);
        let common = common_blocks(&tokens, &other, block as usize);
        let equal = a.keys.iter().zip(&b.keys).take_while(|(a, b)| a == b).count();
        prop_assert_eq!(equal, common);
        // A key fixes its history: past the first difference none is equal again.
        prop_assert!(a.keys.iter().zip(&b.keys).skip(common).all(|(a, b)| a != b));
    }

    #[test]
    fn a_chain_has_every_full_block_and_no_other(
        tokens in prop::collection::vec(any::<Token>(), 0..300),
        block in 1u32..70,
    ) {
        let chain = Chain::new(BlockKey(9), size(block), &tokens, &[]);
        prop_assert_eq!(chain.keys.len(), tokens.len() / block as usize);
        let mut parent = BlockKey(9);
        for (key, block) in chain.keys.iter().zip(tokens.chunks_exact(block as usize)) {
            prop_assert_eq!(*key, next_key(parent, block, &[]));
            parent = *key;
        }
    }

    #[test]
    fn a_longer_prompt_extends_the_chain(
        tokens in prop::collection::vec(any::<Token>(), 0..200),
        more in prop::collection::vec(any::<Token>(), 0..100),
    ) {
        let short = Chain::new(BlockKey(3), size(16), &tokens, &[]);
        let long: Vec<Token> = tokens.iter().chain(&more).copied().collect();
        let long = Chain::new(BlockKey(3), size(16), &long, &[]);
        prop_assert_eq!(&long.keys[..short.keys.len()], &short.keys[..]);
    }

    #[test]
    fn text_before_media_matches_across_media(start in 0usize..180, len in 1usize..60) {
        let tokens: Vec<Token> = (0..240).collect();
        let with = |identity| {
            Chain::new(BlockKey(5), size(16), &tokens, &[MediaSpan { start, len, identity }]).keys
        };
        let (a, b, none) = (with(Some("a")), with(Some("b")), with(None));
        let before = start / 16;
        prop_assert_eq!(&a[..before], &b[..before]);
        prop_assert!(a[before..].iter().zip(&b[before..]).all(|(a, b)| a != b));
        prop_assert_eq!(&none[..], &a[..before]);
    }

    #[test]
    fn a_reused_buffer_gives_the_same_chain(
        first in prop::collection::vec(any::<Token>(), 0..100),
        second in prop::collection::vec(any::<Token>(), 0..100),
    ) {
        let mut chain = Chain::new(BlockKey(1), size(8), &first, &[]);
        chain.extend(BlockKey(2), size(8), &second, &[]);
        prop_assert_eq!(chain, Chain::new(BlockKey(2), size(8), &second, &[]));
    }
}

#[test]
fn every_field_of_a_namespace_separates() {
    let base = Namespace {
        seed: ClusterSeed(1),
        pool: "p",
        block_size: size(16),
        adapter: "",
        salt: "",
    };
    let others = [
        Namespace {
            seed: ClusterSeed(2),
            ..base
        },
        Namespace { pool: "q", ..base },
        Namespace {
            block_size: size(32),
            ..base
        },
        Namespace { adapter: "a", ..base },
        Namespace { salt: "a", ..base },
        Namespace { pool: "pa", ..base },
        Namespace {
            adapter: "a",
            salt: "a",
            ..base
        },
    ];
    let mut roots: Vec<BlockKey> = others.iter().chain([&base]).map(Namespace::root).collect();
    roots.sort();
    roots.dedup();
    assert_eq!(roots.len(), others.len() + 1);
}

#[test]
fn media_identities_are_framed() {
    let tokens = [1, 2, 3, 4];
    let key = |extra: &[&str]| next_key(BlockKey(7), &tokens, extra);
    assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
    assert_ne!(key(&["ab"]), key(&["a", "b"]));
    assert_ne!(key(&[]), key(&[""]));
}

#[test]
fn debug_output_never_shows_a_whole_key() {
    let key = BlockKey(0x0123_4567_89ab_cdef);
    let shown = format!("{key:?} {:?}", Chain { keys: vec![key] });
    assert!(shown.contains("cdef"));
    for part in ["0123", "4567", "89ab", "81985529216486895"] {
        assert!(!shown.contains(part), "{shown}");
    }
}

#[test]
fn block_sizes_outside_the_bound_are_refused_with_the_remedy() {
    for wrong in [0, BlockSize::MAX + 1, u32::MAX] {
        let error = BlockSize::new(wrong).unwrap_err().to_string();
        assert!(
            error.contains("1..=4096") && error.contains(&wrong.to_string()),
            "{error}"
        );
    }
    assert_eq!(BlockSize::DEFAULT.tokens(), 16);
}
