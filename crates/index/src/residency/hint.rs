//! Asks the processor for cache lines ahead of their use, without waiting for them.
#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "one instruction that changes nothing and never faults, whatever its address"
    )
)]

/// Asks for the line that a value begins in.
#[inline(always)]
pub(super) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that reads nothing the program can see; the address is that of a borrowed value.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast());
    }
    // Elsewhere a plain read starts the wait, which the processor overlaps with what comes next as far as it can.
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(std::ptr::from_ref(value));
}
