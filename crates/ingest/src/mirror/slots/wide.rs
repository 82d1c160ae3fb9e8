//! Compares the tags of a bucket all at once, on vectors that every processor of the platform has.
#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "SSE2 is part of x86-64; the safe ways to it on stable Rust are not inlined"
    )
)]

/// Bytes that are compared at once.
pub(super) const WIDE: usize = 16;

/// Which bytes are equal to one, a bit each.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn equal(bytes: &[u8; WIDE], byte: u8) -> u32 {
    use std::arch::x86_64::{_mm_cmpeq_epi8, _mm_loadu_si128, _mm_movemask_epi8, _mm_set1_epi8};
    // SAFETY: every x86-64 processor has SSE2, and the load is of sixteen bytes that are borrowed, however aligned.
    let equal = unsafe {
        let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
        _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte as i8)))
    };
    equal as u32
}

/// Which bytes are equal to one, a bit each.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub(super) fn equal(bytes: &[u8; WIDE], byte: u8) -> u32 {
    (0..)
        .zip(bytes)
        .fold(0, |equal, (at, b)| equal | u32::from(*b == byte) << at)
}
