//! What the residency refuses, and what its memory does under churn.

#![allow(clippy::unwrap_used)]

use cairn_blocks::{BlockKey, Depth};
use cairn_index::{DEPTH_MAX, HolderId, Removed, Residency, Stored};

const ROOT: BlockKey = BlockKey(1);
const A: HolderId = HolderId(0);
const B: HolderId = HolderId(1);

fn keys(range: std::ops::Range<u64>) -> Vec<BlockKey> {
    range
        .map(|i| BlockKey((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
        .collect()
}

fn with_holders(mut residency: Residency) -> Residency {
    residency.add_holder(A);
    residency.add_holder(B);
    residency
}

fn depths(residency: &Residency, keys: &[BlockKey]) -> Vec<u32> {
    let mut out = Vec::new();
    residency.match_prefix(keys, &mut out);
    out
}

#[test]
fn a_run_that_is_known_elsewhere_is_refused_whole() {
    let mut r = with_holders(Residency::new());
    assert_eq!(
        r.store(A, ROOT, Depth(0), 0, &keys(0..10)),
        Stored::Done { new_blocks: 10 }
    );
    // The same first key below another root, and inside another chain.
    assert_eq!(r.store(B, BlockKey(2), Depth(0), 0, &keys(0..3)), Stored::Refused);
    let mut other = keys(50..55);
    other.extend(keys(0..1));
    r.store(B, ROOT, Depth(0), 0, &keys(50..55));
    assert_eq!(r.store(B, keys(54..55)[0], Depth(5), 0, &keys(0..1)), Stored::Refused);
    assert_eq!(r.store(B, ROOT, Depth(0), 0, &other), Stored::Refused);
    assert_eq!(r.holder_blocks(B), 5);
    assert_eq!(depths(&r, &keys(0..10)), [10, 0]);
}

#[test]
fn unknown_holders_anchors_and_depths_change_nothing() {
    let mut r = with_holders(Residency::new());
    r.store(A, ROOT, Depth(0), 0, &keys(0..10));
    assert_eq!(
        r.store(HolderId(9), ROOT, Depth(0), 0, &keys(0..10)),
        Stored::UnknownHolder
    );
    assert_eq!(
        r.store(A, keys(4..5)[0], Depth(6), 0, &keys(20..22)),
        Stored::UnknownAnchor
    );
    assert_eq!(
        r.store(B, keys(4..5)[0], Depth(5), 0, &keys(20..22)),
        Stored::UnknownAnchor
    );
    assert_eq!(
        r.store_beside(B, &[A], keys(4..5)[0], Depth(5), 0, &keys(20..22)),
        Stored::Done { new_blocks: 2 }
    );
    assert_eq!(
        r.store(A, ROOT, Depth(0), 5, &keys(30..35)),
        Stored::Done { new_blocks: 0 }
    );
    assert_eq!(r.store(A, ROOT, Depth(0), 0, &[]), Stored::Done { new_blocks: 0 });
    assert_eq!(r.remove(A, keys(3..4)[0], Depth(0), 1), Removed { blocks: 0 });
    assert_eq!(r.remove(A, keys(3..4)[0], Depth(5), 1), Removed { blocks: 0 });
    assert_eq!(r.remove(A, keys(9..10)[0], Depth(10), u32::MAX), Removed { blocks: 10 });
    assert_eq!(r.known_blocks(), 7, "ancestors of what the other holds stay");
}

#[test]
fn a_chain_beyond_the_deepest_block_is_refused() {
    let mut r = with_holders(Residency::new());
    let long: Vec<BlockKey> = keys(0..u64::from(DEPTH_MAX) + 1);
    assert_eq!(r.store(A, ROOT, Depth(0), 0, &long), Stored::Full);
    assert_eq!(r.store(A, ROOT, Depth(u32::MAX), 0, &keys(0..1)), Stored::Full);
    assert_eq!(r.known_blocks(), 0);
}

#[test]
fn the_bound_on_bytes_holds_and_removals_make_room() {
    let mut r = with_holders(Residency::with_weight_max(100_000));
    let mut stored = 0u64;
    while r.store(A, ROOT, Depth(0), 0, &keys(stored * 20..stored * 20 + 20)) != Stored::Full {
        stored += 1;
    }
    assert!(r.weight() < 110_000 && r.weight() >= 100_000, "{}", r.weight());
    r.remove(A, keys(19..20)[0], Depth(20), 20);
    assert!(matches!(
        r.store(B, ROOT, Depth(0), 0, &keys(0..20)),
        Stored::Done { .. }
    ));
}

#[test]
fn churn_under_one_system_prompt_takes_no_more_memory() {
    // A fixed live set; a hundred times as many blocks pass through.
    let (live, prompt) = (400u64, keys(0..64));
    let mut r = with_holders(Residency::new());
    let chain = |n: u64| keys(1_000 + n * 50..1_000 + n * 50 + 30 + n % 19);
    let store = |r: &mut Residency, n: u64| {
        let mut whole = prompt.clone();
        whole.extend(chain(n));
        r.store(A, ROOT, Depth(0), 0, &whole);
    };
    (0..live).for_each(|n| store(&mut r, n));
    let (bytes, weight) = (r.memory_bytes(), r.weight());
    for n in live..live * 100 {
        let old = chain(n - live);
        let depth = Depth(64 + old.len() as u32);
        assert_eq!(
            r.remove(A, *old.last().unwrap(), depth, old.len() as u32).blocks,
            old.len() as u32
        );
        store(&mut r, n);
    }
    assert!(r.memory_bytes() <= bytes * 13 / 10, "{} from {bytes}", r.memory_bytes());
    assert!(r.weight() <= weight * 11 / 10, "{} from {weight}", r.weight());
    r.clear(A);
    assert_eq!((r.known_blocks(), r.run_count(), r.weight()), (0, 0, 0));
}

#[test]
fn large_arenas_spread_over_several_segments() {
    // Three million keys: more than one huge page and more than one segment.
    let mut r = with_holders(Residency::new());
    for n in 0..300u64 {
        let chain = keys(n * 10_000..(n + 1) * 10_000);
        assert_eq!(
            r.store(A, ROOT, Depth(0), 0, &chain),
            Stored::Done { new_blocks: 10_000 }
        );
    }
    let copy = r.clone();
    for n in 0..300u64 {
        let chain = keys(n * 10_000..(n + 1) * 10_000);
        assert_eq!(depths(&r, &chain), [10_000, 0]);
        assert_eq!(depths(&copy, &chain), [10_000, 0]);
    }
    assert_eq!(copy.holder_digest(A), r.holder_digest(A));
    assert!(r.memory_bytes() < 3_000_000 * 9);
    r.remove_holder(A);
    assert_eq!(r.known_blocks(), 0);
    assert_eq!(copy.known_blocks(), 3_000_000);
}

#[test]
fn debug_output_shows_no_key() {
    let mut r = with_holders(Residency::new());
    r.store(A, ROOT, Depth(0), 0, &keys(0..3));
    let shown = format!("{r:?}");
    assert!(
        !shown.contains(&keys(0..1)[0].0.to_string()) && shown.contains("blocks: 3"),
        "{shown}"
    );
}
