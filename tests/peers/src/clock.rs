//! CPU time of a thread, the cost of reading a clock, and how slow the machine is just now.

use std::time::Instant;

/// A thread's CPU clock, readable from other threads while it lives.
#[derive(Clone, Copy)]
pub struct CpuClock(libc::clockid_t);

impl CpuClock {
    /// Of the calling thread.
    pub fn this_thread() -> Self {
        let mut id = 0;
        // SAFETY: asks for the clock of the calling thread, which exists.
        let failed = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut id) };
        assert_eq!(failed, 0, "this platform has no CPU clock for threads");
        Self(id)
    }

    /// Nanoseconds on a core so far.
    pub fn ns(self) -> u64 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes to `time` only.
        let failed = unsafe { libc::clock_gettime(self.0, &mut time) };
        assert_eq!(failed, 0, "the thread behind this clock is gone");
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }
}

/// Nanoseconds that reading the wall clock twice takes at least.
pub fn wall_overhead_ns() -> u64 {
    (0..2_000)
        .map(|_| {
            let start = Instant::now();
            start.elapsed().as_nanos() as u64
        })
        .min()
        .unwrap_or(0)
}

/// Wall time of a fixed loop in nanoseconds, the least of a few tries: arithmetic and walks through 4 MiB.
pub fn calibration_ns() -> u64 {
    let mut words = vec![0u64; 512 << 10];
    (0..3)
        .map(|round| {
            let start = Instant::now();
            let mut at: u64 = round;
            for _ in 0..400_000 {
                at = (at.wrapping_mul(6_364_136_223_846_793_005)).wrapping_add(1_442_695_040_888_963_407);
                let place = (at >> 33) as usize % words.len();
                words[place] = words[place].wrapping_add(at);
            }
            std::hint::black_box(&words);
            start.elapsed().as_nanos() as u64
        })
        .min()
        .unwrap_or(0)
}

/// Throws a slice out of this core's caches. Returns whether it could.
pub fn make_cold<T>(slice: &[T]) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_clflush, _mm_mfence};
        let start = slice.as_ptr().cast::<u8>();
        let bytes = std::mem::size_of_val(slice);
        for at in (0..bytes).step_by(64) {
            // SAFETY: the address lies within the slice; flushing changes no contents.
            unsafe { _mm_clflush(start.add(at)) };
        }
        // SAFETY: a fence has no preconditions.
        unsafe { _mm_mfence() };
        true
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = slice;
        false
    }
}

/// Brings a slice into this core's caches, as its making would have.
pub fn make_warm<T>(slice: &[T]) {
    let start = slice.as_ptr().cast::<u8>();
    let bytes = std::mem::size_of_val(slice);
    let mut sum = 0u8;
    for at in (0..bytes).step_by(64) {
        // SAFETY: the address lies within the slice, which is initialised (keys are plain integers).
        sum ^= unsafe { std::ptr::read_volatile(start.add(at)) };
    }
    std::hint::black_box(sum);
}
