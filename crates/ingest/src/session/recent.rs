//! The contents of the last applied batches, to tell a repeated batch from a new life's.

/// How many are kept: more than any reordering or overlap of replay and live messages.
const MAX_RECENT: usize = 256;

/// Seq and content hash of the last applied batches.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recent {
    /// Ascending from `oldest` on, and before it.
    batches: Vec<(u64, u64)>,
    /// Which one the next takes the place of, once there are so many.
    oldest: usize,
}

impl Recent {
    #[inline]
    pub(crate) fn push(&mut self, seq: u64, content: u64) {
        if self.batches.len() < MAX_RECENT {
            return self.add(seq, content);
        }
        self.batches[self.oldest] = (seq, content);
        self.oldest = (self.oldest + 1) % MAX_RECENT;
    }

    #[inline(never)]
    fn add(&mut self, seq: u64, content: u64) {
        self.batches.push((seq, content));
    }

    /// Content of the batch with this seq, if it is among the last.
    pub(crate) fn content(&self, seq: u64) -> Option<u64> {
        let batch = self.batches.iter().find(|(s, _)| *s == seq)?;
        Some(batch.1)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.batches.len()
    }

    /// Seq and content, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let (later, earlier) = self.batches.split_at(self.oldest);
        earlier.iter().chain(later).copied()
    }
}
