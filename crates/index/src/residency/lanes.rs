//! Loops over the ends of a run's many holders, on wide vectors where the processor has them.
#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "functions compiled for AVX2 are called just after the processor was asked for it"
    )
)]

/// Adds to `out` how many of the first `common` keys each holder has, whose shares end at `ends`.
#[inline]
pub(super) fn begin(ends: &[u32], common: u32, out: &mut Vec<u32>) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { wide::begin(ends, common, out) };
    }
    any::begin(ends, common, out);
}

/// [`step`] for holders beside each other; gives whether one of them has all.
#[inline]
pub(super) fn deepen(ends: &[u32], base: u32, common: u32, depths: &mut [u32]) -> bool {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { wide::deepen(ends, base, common, depths) };
    }
    any::deepen(ends, base, common, depths)
}

/// Moves a holder that has all blocks down to `base` on by what it has, `held`, of the next `common`; gives whether it
/// has all of them.
///
/// Without branches: whether a holder came this far is hard to guess where many share a run.
#[inline(always)]
pub(super) fn step(depth: &mut u32, held: u32, base: u32, common: u32) -> bool {
    let more = if *depth == base { least(held, common) } else { 0 };
    *depth += more;
    more == common
}

/// The smaller one of two numbers of blocks.
///
/// As signed numbers, which more processors compare as vectors; both are far below 2^31.
#[inline(always)]
fn least(a: u32, b: u32) -> u32 {
    (a as i32).min(b as i32) as u32
}

/// For any processor.
mod any {
    #[inline(always)]
    pub(super) fn begin(ends: &[u32], common: u32, out: &mut Vec<u32>) {
        out.extend(ends.iter().map(|&end| super::least(end, common)));
    }

    #[inline(always)]
    pub(super) fn deepen(ends: &[u32], base: u32, common: u32, depths: &mut [u32]) -> bool {
        let mut all = 0;
        for (depth, &end) in depths.iter_mut().zip(ends) {
            all |= u32::from(super::step(depth, end, base, common));
        }
        all != 0
    }
}

/// The same, eight holders at a time.
#[cfg(target_arch = "x86_64")]
mod wide {
    #[target_feature(enable = "avx2")]
    pub(super) fn begin(ends: &[u32], common: u32, out: &mut Vec<u32>) {
        super::any::begin(ends, common, out);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn deepen(ends: &[u32], base: u32, common: u32, depths: &mut [u32]) -> bool {
        super::any::deepen(ends, base, common, depths)
    }
}
