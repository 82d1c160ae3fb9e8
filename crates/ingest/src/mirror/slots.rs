//! Finds slots by engine hash: buckets of one cache line, four bytes a slot, nothing left behind by a removal.

use super::node::Slot;
use crate::EngineHash;
use crate::fixed_hash::scatter;

/// Entries in a bucket: a cache line with the count beside them.
const ENTRIES: usize = 15;
/// An entry that is in use nowhere: the slot that stands for none.
const EMPTY: u32 = SLOT;
/// The part of an entry that names a slot; the rest is eight bits of the hash.
const SLOT: u32 = (1 << 24) - 1;
/// Fullest that the table gets, in entries of a hundred buckets: beyond this one lookup in five reads a second line.
const FULLEST: usize = ENTRIES * 84;

/// Groups of hashes that a bucket counts apart.
const GROUPS: u32 = 7;
/// The largest count of a bucket.
const COUNT: u32 = 15;

/// What is expected is made room for once so small a part of it is there.
pub(super) const EARLY: usize = 16;

/// Fifteen entries that belong here, or passed by a full bucket before, those in use first; then a word that counts
/// them, and how many of each of seven groups of hashes passed by this one and lie in a later one: four bits each. A hash
/// that isn't in the table is so seldom looked for beyond its own line. One array, so that a search compares whole
/// vectors.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Bucket([u32; ENTRIES + 1]);

const NEW: Bucket = {
    let mut words = [EMPTY; ENTRIES + 1];
    words[ENTRIES] = 0;
    Bucket(words)
};

/// Slots by engine hash. The hashes themselves are kept by whoever gives out the slots.
#[derive(Debug, Default)]
pub(crate) struct SlotTable {
    buckets: Vec<Bucket>,
    len: usize,
    /// Slots that are expected, 0 where unknown.
    expected: usize,
}

/// Where there is room for a hash that isn't in the table.
#[derive(Clone, Copy)]
pub(crate) struct Vacancy {
    home: u32,
    bucket: u32,
}

impl Vacancy {
    /// Not known: the table must grow first.
    const ANYWHERE: Self = Self {
        home: 0,
        bucket: u32::MAX,
    };

    #[inline]
    fn is_known(self) -> bool {
        self.bucket != u32::MAX
    }
}

/// Where a hash goes, what of it is kept in the entry, and where it is counted when it passes by.
#[derive(Clone, Copy)]
struct Place {
    bucket: usize,
    tag: u32,
    /// Bits to shift the last word of a bucket by.
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
            tag: (spread as u32) << 24,
            group: 4 + 4 * (((spread as u32 >> 8 & 0xffff) * GROUPS) >> 16),
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
        self.buckets
            .get(self.place(hash).bucket)
            .map_or(0, |line| line.0[ENTRIES])
    }

    /// The first slot in a hash's own line that looks like it; the slot that stands for none where there is none.
    #[inline]
    pub(crate) fn guess(&self, hash: EngineHash) -> Slot {
        let Place { bucket, tag, .. } = self.place(hash);
        let Some(line) = self.buckets.get(bucket) else {
            return EMPTY;
        };
        match line.alike(tag) {
            0 => EMPTY,
            alike => line.0[alike.trailing_zeros() as usize % ENTRIES] & SLOT,
        }
    }

    /// The first slot with this hash that `accept` takes.
    #[inline]
    pub(crate) fn find(&self, hash: EngineHash, accept: impl FnMut(Slot) -> bool) -> Option<Slot> {
        self.look(hash, accept).ok()
    }

    /// The first slot with this hash that `accept` takes, or where one may be added.
    #[inline]
    pub(crate) fn look(&self, hash: EngineHash, mut accept: impl FnMut(Slot) -> bool) -> Result<Slot, Vacancy> {
        if self.buckets.is_empty() {
            return Err(Vacancy::ANYWHERE);
        }
        let Place {
            bucket: home,
            tag,
            group,
        } = self.place(hash);
        let mut bucket = home;
        let mut vacancy = Vacancy::ANYWHERE;
        for _ in 0..self.buckets.len() {
            let line = &self.buckets[bucket];
            let mut alike = line.alike(tag);
            while alike != 0 {
                let slot = line.0[alike.trailing_zeros() as usize] & SLOT;
                if slot != EMPTY && accept(slot) {
                    return Ok(slot);
                }
                alike &= alike - 1;
            }
            if !vacancy.is_known() && line.len() < ENTRIES {
                vacancy = Vacancy {
                    home: home as u32,
                    bucket: bucket as u32,
                };
            }
            // What isn't here may still have room further on.
            if line.passed(group) == 0 {
                break;
            }
            bucket = self.after(bucket);
        }
        if self.is_full() {
            vacancy = Vacancy::ANYWHERE;
        }
        Err(vacancy)
    }

    /// Whether one more makes it grow.
    #[inline]
    fn is_full(&self) -> bool {
        (self.len + 1) * 100 > self.buckets.len() * FULLEST
    }

    /// Adds a slot; `hash_of` tells the hash of any slot in the table.
    #[inline]
    pub(crate) fn insert(&mut self, hash: EngineHash, slot: Slot, hash_of: impl Fn(Slot) -> EngineHash) {
        if self.is_full() {
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
        let Place { tag, group, .. } = self.place(hash);
        let mut at = vacancy.home as usize;
        while at != vacancy.bucket as usize {
            self.buckets[at].pass(group);
            at = self.after(at);
        }
        self.buckets[at].add(tag | slot);
        self.len += 1;
    }

    #[inline]
    fn put(&mut self, hash: EngineHash, slot: Slot) {
        let Place { mut bucket, tag, group } = self.place(hash);
        // Ends: there is room, or the table would have grown.
        while self.buckets[bucket].len() == ENTRIES {
            self.buckets[bucket].pass(group);
            bucket = self.after(bucket);
        }
        self.buckets[bucket].add(tag | slot);
    }

    /// Takes a slot out.
    #[inline]
    pub(crate) fn remove(&mut self, hash: EngineHash, slot: Slot) {
        if self.buckets.is_empty() {
            return;
        }
        let Place {
            bucket: home,
            tag,
            group,
        } = self.place(hash);
        let mut bucket = home;
        for _ in 0..self.buckets.len() {
            let line = &mut self.buckets[bucket];
            if let Some(at) = line.0[..ENTRIES].iter().position(|entry| *entry == tag | slot) {
                line.take(at);
                self.len -= 1;
                // Those that it passed on its way.
                let mut at = home;
                while at != bucket {
                    self.buckets[at].unpass(group);
                    at = self.after(at);
                }
                return;
            }
            if line.passed(group) == 0 {
                return;
            }
            bucket = self.after(bucket);
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
        let old = std::mem::replace(&mut self.buckets, vec![NEW; buckets]);
        for entry in old.iter().flat_map(|b| &b.0[..ENTRIES]) {
            let slot = entry & SLOT;
            if slot != EMPTY {
                self.put(hash_of(slot), slot);
            }
        }
    }
}

impl Bucket {
    /// Entries in use.
    #[inline]
    fn len(&self) -> usize {
        (self.0[ENTRIES] & COUNT) as usize
    }

    /// How many of a group passed by; [`COUNT`] stands for that many or more.
    #[inline]
    fn passed(&self, group: u32) -> u32 {
        self.0[ENTRIES] >> group & COUNT
    }

    /// One of a group passes by. A count that is full stays so: then more is looked through than need be.
    #[inline]
    fn pass(&mut self, group: u32) {
        self.0[ENTRIES] += u32::from(self.passed(group) < COUNT) << group;
    }

    #[inline]
    fn unpass(&mut self, group: u32) {
        self.0[ENTRIES] -= u32::from(self.passed(group) < COUNT) << group;
    }

    /// Adds an entry where there is room.
    #[inline]
    fn add(&mut self, entry: u32) {
        let at = self.len();
        self.0[at] = entry;
        self.0[ENTRIES] += 1;
    }

    /// Takes an entry out.
    #[inline]
    fn take(&mut self, at: usize) {
        let last = self.len() - 1;
        self.0[at] = self.0[last];
        self.0[last] = EMPTY;
        self.0[ENTRIES] -= 1;
    }

    /// A bit for each entry with this part of a hash; some may be empty.
    #[inline]
    fn alike(&self, tag: u32) -> u32 {
        // Mostly none is, which is found faster than which.
        let is_alike = |word: &u32| word & !SLOT == tag;
        if !self.0.iter().fold(false, |any, word| any | is_alike(word)) {
            return 0;
        }
        let bits = self
            .0
            .iter()
            .enumerate()
            .fold(0, |bits, (i, word)| bits | u32::from(is_alike(word)) << i);
        bits & ((1 << ENTRIES) - 1)
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
                    assert_eq!(table.find(hash, |s| s == slot), None);
                }
            }
            assert_eq!(table.len(), map.len());
        }
        for (slot, hash) in &map {
            assert_eq!(table.find(*hash, |s| s == *slot), Some(*slot));
        }
        let passed = table.buckets.iter().filter(|b| b.0[ENTRIES] > COUNT).count();
        map.iter().for_each(|(slot, hash)| table.remove(*hash, *slot));
        assert_eq!(table.len(), 0);
        assert!(table.buckets.iter().all(|b| b.len() == 0));
        // Only counts that were full stay.
        let stay = |b: &Bucket| (0..GROUPS).all(|g| matches!(b.passed(4 + 4 * g), 0 | COUNT));
        assert!(table.buckets.iter().all(stay), "{passed} buckets with passes before");
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
