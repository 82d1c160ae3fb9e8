//! The contents of the last applied batches, to tell a repeated batch from a new life's.

use std::collections::VecDeque;

/// How many are kept: more than any reordering or overlap of replay and live messages.
const MAX_RECENT: usize = 256;

/// Seq and content hash of the last applied batches, ascending.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Recent(VecDeque<(u64, u64)>);

impl Recent {
    pub(crate) fn push(&mut self, seq: u64, content: u64) {
        if self.0.len() == MAX_RECENT {
            self.0.pop_front();
        }
        self.0.push_back((seq, content));
    }

    /// Content of the batch with this seq, if it is among the last.
    pub(crate) fn content(&self, seq: u64) -> Option<u64> {
        self.0
            .binary_search_by_key(&seq, |(s, _)| *s)
            .ok()
            .map(|at| self.0[at].1)
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = (u64, u64)> + '_ {
        self.0.iter().copied()
    }
}
