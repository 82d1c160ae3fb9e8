//! Finds slots by engine hash: buckets of one cache line, four bytes a slot, nothing left behind by a removal.

mod bucket;

use super::node::Slot;
use crate::EngineHash;
use crate::fixed_hash::scatter;
use bucket::{Bucket, ENTRIES, GROUPS};

/// Fullest that the table gets, in entries of a hundred buckets: beyond this one lookup in five reads a second line.
const FULLEST: usize = ENTRIES * 84;
/// What is expected is made room for once so small a part of it is there.
pub(super) const EARLY: usize = 16;

/// Slots by engine hash. The hashes themselves are kept by whoever gives out the slots.
#[derive(Debug, Default)]
pub(crate) struct SlotTable {
    buckets: Vec<Bucket>,
    len: usize,
    /// Most slots before it grows.
    most: usize,
    /// Slots that are expected, 0 where unknown.
    expected: usize,
}

/// Where there is room for a hash that isn't in the table.
#[derive(Clone, Copy)]
pub(crate) struct Vacancy {
    bucket: u32,
    at: u32,
}

impl Vacancy {
    /// Not known: the table must grow first.
    const ANYWHERE: Self = Self {
        bucket: u32::MAX,
        at: 0,
    };

    #[inline]
    fn is_known(self) -> bool {
        self.bucket != u32::MAX
    }
}

/// An entry of the table; it is there until something is added or this one is taken.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    /// The slot.
    pub(crate) slot: Slot,
    bucket: u32,
    at: u32,
}

impl Entry {
    /// None, with a slot that no node has.
    pub(crate) const NONE: Self = Self {
        slot: super::node::NONE,
        bucket: 0,
        at: 0,
    };
}

/// Where a hash goes, what of it is kept in the entry, and where it is counted when it passes by.
#[derive(Clone, Copy)]
struct Place {
    bucket: usize,
    tag: u8,
    /// Bits to shift the counts of a bucket by.
    group: u32,
}

impl SlotTable {
    /// Tells how many slots are expected, so that the table grows to that at once.
    pub(crate) fn expect(&mut self, slots: usize) {
        self.expected = slots;
    }

    /// Slots in it.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.len
    }

    /// Bytes that it takes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }

    #[inline]
    fn place(&self, hash: EngineHash) -> Place {
        let spread = scatter(hash.0);
        Place {
            bucket: (((spread >> 32) * self.buckets.len() as u64) >> 32) as usize,
            tag: Bucket::tag(spread as u8),
            group: (spread as u32 >> 8) % GROUPS * 4,
        }
    }

    #[inline]
    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() {
            0
        } else {
            bucket + 1
        }
    }

    /// Reads the line that a hash belongs in: many such reads overlap, so that the lookups after them find it near.
    #[inline]
    pub(crate) fn touch(&self, hash: EngineHash) -> u32 {
        self.buckets.get(self.place(hash).bucket).map_or(0, Bucket::touch)
    }

    /// The first entry in a hash's own line that looks like it.
    #[inline]
    pub(crate) fn guess(&self, hash: EngineHash) -> Entry {
        let Place { bucket, tag, .. } = self.place(hash);
        let line = self.buckets.get(bucket);
        match line.and_then(|line| Some((line, line.alike(tag).lowest()?))) {
            None => Entry::NONE,
            Some((line, at)) => Entry {
                slot: line.slot(at),
                bucket: bucket as u32,
                at: at as u32,
            },
        }
    }

    /// The first entry with this hash whose slot `accept` takes.
    #[inline]
    pub(crate) fn find(&self, hash: EngineHash, accept: impl FnMut(Slot) -> bool) -> Option<Entry> {
        self.look(hash, accept).ok()
    }

    /// The first entry with this hash whose slot `accept` takes, or where one may be added.
    #[inline]
    pub(crate) fn look(&self, hash: EngineHash, mut accept: impl FnMut(Slot) -> bool) -> Result<Entry, Vacancy> {
        if self.buckets.is_empty() {
            return Err(Vacancy::ANYWHERE);
        }
        let Place { mut bucket, tag, group } = self.place(hash);
        let mut vacancy = Vacancy::ANYWHERE;
        for _ in 0..self.buckets.len() {
            let line = &self.buckets[bucket];
            let mut alike = line.alike(tag);
            while let Some(at) = alike.lowest() {
                let slot = line.slot(at);
                if accept(slot) {
                    return Ok(Entry {
                        slot,
                        bucket: bucket as u32,
                        at: at as u32,
                    });
                }
                alike = alike.rest();
            }
            if !vacancy.is_known()
                && let Some(at) = line.vacancy()
            {
                vacancy = Vacancy {
                    bucket: bucket as u32,
                    at: at as u32,
                };
            }
            // What isn't here may still have room further on.
            if line.passed(group) == 0 {
                break;
            }
            bucket = self.after(bucket);
        }
        if self.len >= self.most {
            vacancy = Vacancy::ANYWHERE;
        }
        Err(vacancy)
    }

    /// Adds a slot; `hash_of` tells the hash of any slot in the table.
    #[inline]
    pub(crate) fn insert(&mut self, hash: EngineHash, slot: Slot, hash_of: impl Fn(Slot) -> EngineHash) {
        if self.len >= self.most {
            self.grow(hash_of);
        }
        self.put(hash, slot);
        self.len += 1;
    }

    /// Adds a slot where [`SlotTable::look`], called just before for the same hash, found room.
    #[inline]
    pub(crate) fn fill(
        &mut self,
        vacancy: Vacancy,
        hash: EngineHash,
        slot: Slot,
        hash_of: impl Fn(Slot) -> EngineHash,
    ) {
        if !vacancy.is_known() {
            return self.insert(hash, slot, hash_of);
        }
        let Place { bucket, tag, group } = self.place(hash);
        let mut passing = bucket;
        while passing != vacancy.bucket as usize {
            self.buckets[passing].pass(group);
            passing = self.after(passing);
        }
        self.buckets[passing].put(vacancy.at as usize, tag, slot);
        self.len += 1;
    }

    fn put(&mut self, hash: EngineHash, slot: Slot) {
        let Place { mut bucket, tag, group } = self.place(hash);
        // Ends: there is room, or the table would have grown.
        loop {
            let line = &mut self.buckets[bucket];
            if let Some(at) = line.vacancy() {
                return line.put(at, tag, slot);
            }
            line.pass(group);
            bucket = self.after(bucket);
        }
    }

    /// Takes a slot out.
    #[inline]
    pub(crate) fn remove(&mut self, hash: EngineHash, slot: Slot) {
        if let Some(entry) = self.find(hash, |s| s == slot) {
            self.take(hash, entry);
        }
    }

    /// Takes an entry out that was found for this hash, if it is there still.
    #[inline]
    pub(crate) fn take(&mut self, hash: EngineHash, entry: Entry) {
        let Place { bucket, tag, group } = self.place(hash);
        let at = entry.at as usize;
        let line = &mut self.buckets[entry.bucket as usize];
        if !line.has(at, tag, entry.slot) {
            return;
        }
        line.take(at);
        self.len -= 1;
        // Those that it passed on its way.
        let mut passed = bucket;
        while passed != entry.bucket as usize {
            self.buckets[passed].unpass(group);
            passed = self.after(passed);
        }
    }

    /// Grows by half, or to what is expected once a small part of that is there; beyond it by a quarter.
    #[cold]
    fn grow(&mut self, hash_of: impl Fn(Slot) -> EngineHash) {
        let wanted = match self.expected {
            expected if self.len < expected && self.len * EARLY >= expected => expected,
            expected if self.len >= expected && expected > 0 => self.len + self.len / 4 + 16,
            _ => self.len + 1 + self.len / 2,
        };
        let buckets = (wanted * 100).div_ceil(FULLEST).max(1);
        self.most = buckets * FULLEST / 100;
        let old = std::mem::replace(&mut self.buckets, vec![Bucket::NEW; buckets]);
        for slot in old.iter().flat_map(Bucket::slots) {
            self.put(hash_of(slot), slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// A generator of numbers that look random.
    struct Numbers(u64);

    impl Numbers {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z ^ (z >> 27)
        }
    }

    fn check_against_a_map(expected: usize, hash: impl Fn(u64) -> u64) {
        let mut numbers = Numbers(3);
        let (mut table, mut map) = (SlotTable::default(), HashMap::new());
        let mut hashes: Vec<EngineHash> = Vec::new();
        table.expect(expected);
        for _ in 0..60_000 {
            let n = numbers.next();
            let known = map.len() as u64;
            if known < 500 || n % 100 < 52 {
                let (hash, slot) = (EngineHash(hash(n)), hashes.len() as Slot);
                hashes.push(hash);
                match table.look(hash, |_| false) {
                    Err(vacancy) if n.is_multiple_of(2) => table.fill(vacancy, hash, slot, |s| hashes[s as usize]),
                    Ok(_) | Err(_) => table.insert(hash, slot, |s| hashes[s as usize]),
                }
                map.insert(slot, hash);
            } else {
                let slot = (n % hashes.len() as u64) as Slot;
                if let Some(hash) = map.remove(&slot) {
                    table.remove(hash, slot);
                    assert!(table.find(hash, |s| s == slot).is_none());
                }
            }
            assert_eq!(table.len(), map.len());
        }
        for (slot, hash) in &map {
            assert_eq!(table.find(*hash, |s| s == *slot).map(|e| e.slot), Some(*slot));
        }
        map.iter().for_each(|(slot, hash)| table.remove(*hash, *slot));
        assert_eq!(table.len(), 0);
        // Only counts that were full stay.
        assert!(table.buckets.iter().all(Bucket::is_left_as_new));
    }

    #[test]
    fn slots_are_found_as_in_a_map_through_growth_and_removals() {
        check_against_a_map(0, |n| n);
        check_against_a_map(10_000, |n| n);
    }

    #[test]
    fn hashes_that_collide_are_kept_apart() {
        check_against_a_map(0, |n| n % 300);
    }
}
