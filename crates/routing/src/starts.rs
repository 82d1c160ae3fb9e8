//! Starts of prompts, and what requests have waited for want of another copy of each.
//!
//! Who waits at the only workers that hold a start, while others are idle, pays a rent; computing the start once more is a
//! price paid once. As with hired skis, the best that can be done without knowing what comes is to buy when the rents have
//! reached the price: then no more than twice the least possible is ever paid. A start is known by its key at the depth
//! where a request left what any worker held: that is where prompts part. The table is bounded; what no request went
//! through for longest makes room.

use cairn_blocks::BlockKey;

use crate::draw;
use crate::overlay::STRIDE;

/// A copy is made when the waits have reached this part of what computing the start takes, in percent: a full cache loses
/// something else for each copy. At 120 it doesn't outweigh the price of work on an idle fleet (see [`crate::cost`]), so that
/// copies are earned and not made; at 200 public traces are served a little worse.
pub(crate) const DISPLACED_PERCENT: u64 = 150;

/// Sets of the table and entries in each: some thousand requests' last starts, while a start that is shared is touched by
/// each of its requests and stays.
const SETS: usize = 1_024;
const WAYS: usize = 4;

#[derive(Clone, Copy, Debug, Default)]
struct Start {
    /// `None` while unused.
    key: Option<BlockKey>,
    /// What requests waited for want of a copy, less what copies cost.
    waited_us: u64,
    touched: u64,
}

/// A known start of the request that is being decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Known {
    pub(crate) blocks: u32,
    pub(crate) waited_us: u64,
    set: u32,
    way: u32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Starts {
    sets: Vec<[Start; WAYS]>,
    touches: u64,
}

impl Default for Starts {
    fn default() -> Self {
        Self {
            sets: vec![[Start::default(); WAYS]; SETS],
            touches: 0,
        }
    }
}

fn set_of(key: BlockKey) -> usize {
    (draw::mix(key.0) as usize) % SETS
}

impl Starts {
    /// Finds the known starts among the first `blocks` of a prompt, shortest first.
    pub(crate) fn look_up(&self, keys: &[BlockKey], blocks: u32, out: &mut Vec<Known>) {
        out.clear();
        let stride = STRIDE as usize;
        let end = keys.len().min(blocks as usize);
        for at in (stride - 1..end).step_by(stride) {
            let set = set_of(keys[at]);
            if let Some(way) = self.sets[set].iter().position(|s| s.key == Some(keys[at])) {
                out.push(Known {
                    blocks: at as u32 + 1,
                    waited_us: self.sets[set][way].waited_us,
                    set: set as u32,
                    way: way as u32,
                });
            }
        }
    }

    /// A request that left what workers hold after `blocks` makes its start known, and touches those above.
    pub(crate) fn note(&mut self, keys: &[BlockKey], blocks: u32, known: &[Known]) {
        self.touches += 1;
        for k in known {
            self.sets[k.set as usize][k.way as usize].touched = self.touches;
        }
        let depth = blocks / STRIDE * STRIDE;
        if depth == 0 || depth as usize > keys.len() || known.iter().any(|k| k.blocks == depth) {
            return;
        }
        let key = keys[depth as usize - 1];
        let set = &mut self.sets[set_of(key)];
        if let Some(oldest) = set.iter_mut().min_by_key(|s| s.touched) {
            *oldest = Start {
                key: Some(key),
                waited_us: 0,
                touched: self.touches,
            };
        }
    }

    /// A request waited `us` longer than where this start isn't; no more than `most` is kept.
    pub(crate) fn waited(&mut self, known: Known, us: u64, most: u64) {
        let start = &mut self.sets[known.set as usize][known.way as usize];
        start.waited_us = (start.waited_us + us).min(most.max(start.waited_us));
    }

    /// A copy is made.
    pub(crate) fn pay(&mut self, known: Known, us: u64) {
        let start = &mut self.sets[known.set as usize][known.way as usize];
        start.waited_us = start.waited_us.saturating_sub(us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(family: u64) -> Vec<BlockKey> {
        (0..40)
            .map(|i| BlockKey(if i < 16 { i } else { family << 20 | i }))
            .collect()
    }

    fn known(starts: &Starts, keys: &[BlockKey]) -> Vec<(u32, u64)> {
        let mut out = Vec::new();
        starts.look_up(keys, 40, &mut out);
        out.iter().map(|k| (k.blocks, k.waited_us)).collect()
    }

    #[test]
    fn waits_gather_on_a_start_and_a_copy_takes_its_price() {
        let mut starts = Starts::default();
        starts.note(&keys(1), 19, &[]);
        assert_eq!(
            known(&starts, &keys(2)),
            [(16, 0)],
            "prompts part at 19, a stride ends at 16"
        );
        let mut found = Vec::new();
        starts.look_up(&keys(2), 40, &mut found);
        starts.waited(found[0], 700, 1_000);
        starts.waited(found[0], 700, 1_000);
        assert_eq!(known(&starts, &keys(3)), [(16, 1_000)]);
        starts.pay(found[0], 600);
        assert_eq!(known(&starts, &keys(3)), [(16, 400)]);
    }

    #[test]
    fn a_start_that_requests_go_through_outlives_any_number_of_others() {
        let mut starts = Starts::default();
        starts.note(&keys(0), 16, &[]);
        let mut found = Vec::new();
        for family in 1..200_000 {
            starts.look_up(&keys(family), 40, &mut found);
            assert_eq!(found[0].blocks, 16, "request {family}");
            starts.note(&keys(family), 40, &found);
        }
        assert_eq!(starts.sets.len() * WAYS, 4_096);
        assert_eq!(known(&starts, &keys(199_999)).len(), 2);
        assert_eq!(known(&starts, &keys(3)).len(), 1, "long ago");
    }

    #[test]
    fn less_than_a_stride_is_no_start() {
        let mut starts = Starts::default();
        starts.note(&keys(1), STRIDE - 1, &[]);
        assert!(known(&starts, &keys(1)).is_empty());
    }
}
