//! The functions that a request walks through lie side by side in the program (`order.ld`, ADR 10).

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

/// Sizes of an ELF file's sections, by name (ELF-64, little-endian: System V ABI, chapter 4).
fn sections(program: &[u8]) -> HashMap<String, u64> {
    let number = |at: u64, bytes: usize| {
        let at = usize::try_from(at).unwrap();
        program[at..at + bytes]
            .iter()
            .rev()
            .fold(0_u64, |n, byte| n << 8 | u64::from(*byte))
    };
    let (table, entry, count, names) = (number(0x28, 8), number(0x3A, 2), number(0x3C, 2), number(0x3E, 2));
    let names = number(table + names * entry + 0x18, 8);
    let name = |at: u64| {
        let from = usize::try_from(names + at).unwrap();
        let bytes = program[from..].iter().copied().take_while(|byte| *byte != 0);
        String::from_utf8(bytes.collect()).unwrap()
    };
    (0..count)
        .map(|i| table + i * entry)
        .map(|header| (name(number(header, 4)), number(header + 0x20, 8)))
        .collect()
}

#[test]
fn functions_of_a_request_lie_side_by_side() {
    let program = std::fs::read(env!("CARGO_BIN_EXE_cairn")).unwrap();
    let sections = sections(&program);
    let (request, all) = (sections[".text.request"], sections[".text"]);
    // 1.0 MB of 22 when it was written: half of it means that names have changed, three times as much that they say too little.
    assert!(
        (500_000..3_000_000).contains(&request) && all > 5 * request,
        "{request} bytes are in order beside {all}: python3 tests/order/order.py writes the order anew"
    );
}
