//! The ends of many holders' shares of one run side by side, so that a match takes them as vectors.

use super::shares::{HOLES, Share};
use crate::HolderId;

/// Ends by holder id from the first one on, 0 where a holder has no share.
///
/// One allocation: what is known of the row, then the ends.
#[derive(Clone, Debug)]
pub(super) struct Row(Box<[u32]>);

/// The first holder's id.
const FIRST: usize = 0;
/// How many have a share.
const COUNT: usize = 1;
/// How many of them lack something below its cut.
const HOLED: usize = 2;
/// Where the ends begin: at a multiple of 16 bytes.
const ENDS: usize = 4;

/// A row with fewer shares than one for so many ids becomes a list, which is smaller then.
const SPAN_MOST: usize = 4;
/// A row that must grow gets room for a part more, and for so many ids at least.
const GROWTH: usize = 8;
const GROWTH_LEAST: usize = 4;

impl Row {
    /// Of a list by holder, which isn't empty.
    pub(super) fn new(list: &[Share]) -> Self {
        let first = list[0].holder().0;
        let span = (list[list.len() - 1].holder().0 - first) as usize + 1;
        let mut row = Self(vec![0; ENDS + span].into_boxed_slice());
        row.0[FIRST] = first;
        list.iter().for_each(|share| {
            row.set(*share);
        });
        row
    }

    #[inline]
    pub(super) fn first(&self) -> u32 {
        self.0[FIRST]
    }

    pub(super) fn len(&self) -> usize {
        self.0[COUNT] as usize
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.len() * 4
    }

    /// Whether nobody lacks anything below its cut.
    #[inline]
    pub(super) fn is_whole(&self) -> bool {
        self.0[HOLED] == 0
    }

    /// Ends from the first holder on, 0 for none; with [`HOLES`] where the row isn't whole.
    #[inline]
    pub(super) fn ends(&self) -> &[u32] {
        &self.0[ENDS..]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Share> + '_ {
        let ends = (self.first()..).zip(self.ends());
        ends.filter(|(_, end)| **end != 0)
            .map(|(id, end)| Share::of_end(HolderId(id), *end))
    }

    #[inline]
    pub(super) fn find(&self, holder: HolderId) -> Option<Share> {
        let end = *self.ends().get(holder.0.wrapping_sub(self.first()) as usize)?;
        (end != 0).then(|| Share::of_end(holder, end))
    }

    #[inline]
    pub(super) fn longest(&self) -> u32 {
        // As signed numbers, whose larger one is one instruction on more processors; cuts are far below both bounds.
        let most = self
            .ends()
            .iter()
            .fold(0, |most: i32, end| most.max((end & !HOLES) as i32));
        most as u32
    }

    /// Sets a share and gives whether its holder had none; nothing where it lies too far away.
    #[inline]
    pub(super) fn set(&mut self, share: Share) -> Option<bool> {
        let at = share.holder().0.wrapping_sub(self.first()) as usize;
        if at >= self.ends().len() {
            return self.grow(share.holder().0).then(|| self.set(share)).flatten();
        }
        let before = std::mem::replace(&mut self.0[ENDS + at], share.end());
        let new = before == 0;
        self.0[COUNT] += u32::from(new);
        self.0[HOLED] = self.0[HOLED] + u32::from(share.holes()) - u32::from(before & HOLES != 0);
        Some(new)
    }

    /// Takes a share away; gives whether there was one.
    pub(super) fn remove(&mut self, holder: HolderId) -> bool {
        let at = holder.0.wrapping_sub(self.first()) as usize;
        let Some(end) = self.0[ENDS..].get_mut(at) else {
            return false;
        };
        let end = std::mem::take(end);
        self.0[COUNT] -= u32::from(end != 0);
        self.0[HOLED] -= u32::from(end & HOLES != 0);
        end != 0
    }

    #[inline]
    pub(super) fn is_sparse(&self) -> bool {
        self.len() * SPAN_MOST < self.ends().len()
    }

    /// Makes room for a holder; gives whether that is worth it.
    #[cold]
    fn grow(&mut self, id: u32) -> bool {
        let (old_first, old_span) = (self.first() as usize, self.ends().len());
        let (old_end, id) = (old_first + old_span, id as usize);
        let (first, end) = (old_first.min(id), old_end.max(id + 1));
        if (end - first) > (self.len() + 1) * SPAN_MOST {
            return false;
        }
        let more = ((end - first) / GROWTH).max(GROWTH_LEAST);
        let first = if id < old_first {
            first.saturating_sub(more)
        } else {
            first
        };
        let end = if id < old_first { end } else { end + more };
        let mut words = vec![0; ENDS + end - first].into_boxed_slice();
        words[..ENDS].copy_from_slice(&self.0[..ENDS]);
        words[FIRST] = first as u32;
        words[ENDS + old_first - first..][..old_span].copy_from_slice(self.ends());
        self.0 = words;
        true
    }
}
