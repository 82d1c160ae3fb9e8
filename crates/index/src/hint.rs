//! Asks the processor for cache lines ahead of their use, without waiting for them.
#![cfg_attr(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    expect(
        unsafe_code,
        reason = "one instruction that changes nothing and never faults, whatever its address"
    )
)]

/// Asks for the line that a value begins in.
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    let place = std::ptr::from_ref(value);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint whose effect the program can't see; the address is that of a borrowed value.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(place.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{place}]", place = in(reg) place, options(nostack, preserves_flags, readonly));
    }
    // Other processors read when they must.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = place;
}
