//! Asks the platform to back large tables by huge pages: a look-up at random then seldom waits for addresses to be translated.
#![expect(
    unsafe_code,
    reason = "one call that advises the kernel about memory that the caller has borrowed; it changes no contents"
)]

/// Bytes of a huge page on x86-64, and on arm64 with 4 KiB pages.
#[cfg(target_os = "linux")]
const PAGE: usize = 2 << 20;

/// Advises huge pages for those that lie wholly within the array; best before it is written.
#[cfg(target_os = "linux")]
pub(super) fn advise<T>(array: &[T]) {
    let start = array.as_ptr().cast::<u8>();
    let skip = start.align_offset(PAGE);
    let bytes = size_of_val(array).saturating_sub(skip) / PAGE * PAGE;
    if bytes == 0 {
        return;
    }
    // SAFETY: the range lies within the borrowed array, and this advice neither moves nor changes what is there. Without
    // huge pages look-ups cost more, answers are the same, so its outcome doesn't matter.
    unsafe { libc::madvise(start.add(skip).cast_mut().cast(), bytes, libc::MADV_HUGEPAGE) };
}

/// Elsewhere the platform decides by itself.
#[cfg(not(target_os = "linux"))]
pub(super) fn advise<T>(_array: &[T]) {}
