//! A sample of served encodings, kept for comparison with the reference encoder in the background.

use crate::Token;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

/// One encoding in this many is kept.
const EVERY: u64 = 512;
/// Kept encodings at a time; further ones are passed over until these were compared.
const WAITING_MAX: usize = 8;
/// Longer texts aren't kept: comparing one takes a tenth of a second.
const TEXT_BYTES_MAX: usize = 128 << 10;

/// What comparing has shown since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SampleReport {
    /// Encodings compared.
    pub compared: u64,
    /// Encodings that differed. The first one ends the use of the fast encoder and of the cache.
    pub different: u64,
}

/// The waiting samples.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    served: AtomicU64,
    waiting: Mutex<VecDeque<(String, Vec<Token>)>>,
    compared: AtomicU64,
    different: AtomicU64,
}

impl Samples {
    /// Offers a served encoding.
    pub fn offer(&self, text: &str, ids: &[Token]) {
        let due = self.served.fetch_add(1, Ordering::Relaxed).is_multiple_of(EVERY);
        if !due || text.len() > TEXT_BYTES_MAX {
            return;
        }
        if let Some(mut waiting) = self.waiting.try_lock()
            && waiting.len() < WAITING_MAX
        {
            waiting.push_back((text.to_owned(), ids.to_vec()));
        }
    }

    /// Takes the oldest waiting sample.
    pub fn take(&self) -> Option<(String, Vec<Token>)> {
        self.waiting.lock().pop_front()
    }

    /// Counts a comparison.
    pub fn count(&self, same: bool) {
        self.compared.fetch_add(1, Ordering::Relaxed);
        self.different.fetch_add(u64::from(!same), Ordering::Relaxed);
    }

    pub fn report(&self) -> SampleReport {
        SampleReport {
            compared: self.compared.load(Ordering::Relaxed),
            different: self.different.load(Ordering::Relaxed),
        }
    }
}
