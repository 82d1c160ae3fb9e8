//! What happened, as one number and, where asked for, as lines.

/// The run's trace.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    hash: u64,
    /// Things that were written down.
    pub entries: u64,
    keep: bool,
    /// The lines, where they are kept.
    pub lines: Vec<String>,
}

/// Lines kept at most: the last ones tell what led to a failure.
const MAX_LINES: usize = 200_000;

impl Trace {
    pub(crate) fn new(keep: bool) -> Self {
        Self {
            keep,
            ..Self::default()
        }
    }

    /// Writes down that `what` happened to `ids`; the words are made only where they are kept.
    pub(crate) fn note(&mut self, now: u64, what: &'static str, ids: &[u64]) {
        self.entries += 1;
        let mut mixed = self.hash ^ now.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for byte in what.bytes() {
            mixed = (mixed ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        for id in ids {
            mixed = (mixed ^ id).wrapping_mul(0x9fb2_1c65_1e98_df25);
            mixed ^= mixed >> 31;
        }
        self.hash = mixed;
        if self.keep && self.lines.len() < MAX_LINES {
            self.lines
                .push(format!("{:>10.3} ms  {what} {ids:?}", now as f64 / 1_000.0));
        }
    }

    /// One number for the whole run.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }
}
