//! Asks for memory some time before it is needed, so that whoever needs it doesn't wait.
#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "one instruction that asks for a line of memory that the caller has borrowed; it changes no contents"
    )
)]

/// Asks for the line that a value begins in.
#[inline]
pub(super) fn ask_for<T: Copy>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: the address is that of a borrowed value, and asking for it changes nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) };
    }
    // Reads overlap too where nothing waits for them.
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(*value);
}
