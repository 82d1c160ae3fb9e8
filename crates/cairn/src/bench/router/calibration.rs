//! A fixed piece of work before each round: a run on a busy machine can be told from one on a quiet machine.

use std::time::Instant;

/// Steps of the loop: a few milliseconds.
const STEPS: u64 = 4_000_000;

/// How long the loop took, each time.
#[derive(Default)]
pub struct Calibration {
    taken_ms: Vec<f64>,
}

impl Calibration {
    /// Runs the loop once.
    pub fn take(&mut self) {
        let begun = Instant::now();
        let mut x = 0x9e37_79b9_7f4a_7c15u64;
        for i in 0..STEPS {
            x = (x ^ i).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(17);
        }
        std::hint::black_box(x);
        self.taken_ms.push(begun.elapsed().as_secs_f64() * 1e3);
    }

    /// The median time of the loop.
    pub fn median_ms(&self) -> f64 {
        super::rows::median(self.taken_ms.clone())
    }

    /// The median against the fastest: 1 on a machine with nothing beside the run.
    pub fn slowdown(&self) -> f64 {
        self.median_ms() / self.taken_ms.iter().copied().fold(f64::INFINITY, f64::min)
    }
}
