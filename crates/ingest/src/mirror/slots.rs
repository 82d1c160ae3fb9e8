//! Finds slots by engine hash: buckets of one cache line, four bytes a slot, nothing left behind by a removal.

mod bucket;
mod wide;

use super::node::Slot;
use crate::EngineHash;
use crate::fixed_hash::scatter;
use bucket::{Bucket, ENTRIES, GROUPS};

/// Fullest that the table gets, in entries of a hundred buckets. Where blocks come and go for long, one lookup in five of
/// a hash that isn't there then reads a second line; at 84 it would be two or three more lines for each.
const FULLEST: usize = ENTRIES * 68;
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
struct Vacancy {
    bucket: u32,
    at: u32,
}

/// No bucket: the table must grow first.
const NOWHERE: u32 = u32::MAX;

/// An entry of the table; it is there until something is added or this one is taken.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    /// The slot.
    pub(crate) slot: Slot,
    bucket: u32,
    at: u16,
    /// It lies in another bucket than its hash belongs in.
    is_away: bool,
}

impl Entry {
    /// None, with a slot that no node has.
    pub(crate) const NONE: Self = Self {
        slot: super::node::NONE,
        bucket: 0,
        at: 0,
        is_away: false,
    };
}

/// An entry of its hash's own line, or none: the slot in the upper three bytes, and where it lies in the line.
#[derive(Clone, Copy)]
pub(crate) struct Guess(u32);

impl Guess {
    /// None, with a slot that no node has.
    pub(crate) const NONE: Self = Self(super::node::NONE << 8);

    #[inline]
    pub(crate) fn slot(self) -> Slot {
        self.0 >> 8
    }

    #[inline]
    fn at(self) -> usize {
        (self.0 & 0xff) as usize
    }

    /// The same, in the line of its place.
    #[inline]
    pub(crate) fn entry(self, place: Place) -> Entry {
        Entry {
            slot: self.slot(),
            bucket: place.bucket(),
            at: self.at() as u16,
            is_away: false,
        }
    }
}

/// Where a hash goes, what of it is kept in the entry, and where it is counted when it passes by: as long as the table
/// doesn't grow. The bucket is in the upper half, the tag in the lowest byte, the group in the next.
#[derive(Clone, Copy, Default)]
pub(crate) struct Place(u64);

impl Place {
    #[inline]
    fn bucket(self) -> u32 {
        (self.0 >> 32) as u32
    }

    #[inline]
    fn tag(self) -> u8 {
        self.0 as u8
    }

    /// Bits to shift the counts of a bucket by.
    #[inline]
    fn group(self) -> u8 {
        ((self.0 >> 8) as u8) % GROUPS as u8 * 4
    }
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

    /// Where a hash goes.
    #[inline]
    pub(crate) fn place(&self, hash: EngineHash) -> Place {
        let spread = scatter(hash.0);
        let bucket = (spread >> 32).wrapping_mul(self.buckets.len() as u64) >> 32;
        Place(bucket << 32 | spread & 0xff00 | u64::from(Bucket::tag(spread as u8)))
    }

    #[inline]
    fn after(&self, bucket: u32) -> u32 {
        if bucket as usize + 1 == self.buckets.len() {
            0
        } else {
            bucket + 1
        }
    }

    /// Asks for the line that a hash belongs in.
    #[inline]
    pub(crate) fn ask_for(&self, place: Place) {
        if let Some(line) = self.buckets.get(place.bucket() as usize) {
            cairn_index::prefetch(line);
        }
    }

    /// Asks for the line after the one that a hash belongs in, where the hash may be in that.
    #[inline]
    pub(crate) fn ask_further(&self, place: Place) {
        if let Some(line) = self.buckets.get(place.bucket() as usize)
            && line.passed(place.group()) > 0
            && let Some(next) = self.buckets.get(self.after(place.bucket()) as usize)
        {
            cairn_index::prefetch(next);
        }
    }

    /// The first entry in a hash's own line that looks like it.
    #[inline]
    pub(crate) fn guess(&self, place: Place) -> Guess {
        let line = self.buckets.get(place.bucket() as usize);
        match line.and_then(|line| Some((line, line.alike(place.tag()).lowest()?))) {
            None => Guess::NONE,
            Some((line, at)) => Guess(line.slot(at) << 8 | at as u32),
        }
    }

    /// Whether a hash's own line alone shows that the hash isn't in the table.
    #[inline]
    pub(crate) fn is_surely_new(&self, place: Place) -> bool {
        self.buckets
            .get(place.bucket() as usize)
            .is_some_and(|line| line.alike(place.tag()).is_nowhere() && line.passed(place.group()) == 0)
    }

    /// The first entry with this hash whose slot `accept` takes.
    #[inline]
    pub(crate) fn find(&self, hash: EngineHash, accept: impl FnMut(Slot) -> bool) -> Option<Entry> {
        let place = self.place(hash);
        if self.is_surely_new(place) {
            return None;
        }
        self.look_through(place, accept).ok()
    }

    /// The first entry of this place whose slot `accept` takes, or where one may be added.
    #[inline(never)]
    fn look_through(&self, place: Place, mut accept: impl FnMut(Slot) -> bool) -> Result<Entry, Vacancy> {
        let mut vacancy = Vacancy { bucket: NOWHERE, at: 0 };
        let mut bucket = place.bucket();
        for _ in 0..self.buckets.len() {
            let line = &self.buckets[bucket as usize];
            let mut alike = line.alike(place.tag());
            while let Some(at) = alike.lowest() {
                let slot = line.slot(at);
                if accept(slot) {
                    return Ok(Entry {
                        slot,
                        bucket,
                        at: at as u16,
                        is_away: bucket != place.bucket(),
                    });
                }
                alike = alike.rest();
            }
            if vacancy.bucket == NOWHERE
                && let Some(at) = line.vacancy()
            {
                (vacancy.bucket, vacancy.at) = (bucket, at as u32);
            }
            // What isn't here may still have room further on.
            if line.passed(place.group()) == 0 {
                break;
            }
            bucket = self.after(bucket);
        }
        Err(vacancy)
    }

    /// Adds a slot; `hash_of` tells the hash of any slot in the table.
    #[inline]
    pub(crate) fn insert(&mut self, hash: EngineHash, slot: Slot, hash_of: impl Fn(Slot) -> EngineHash) {
        self.make_room(1, hash_of);
        self.put(self.place(hash), slot);
        self.len += 1;
    }

    /// Grows where there is no room for so many slots more. Returns whether it did: then what was known of places and
    /// entries is known no more.
    #[inline]
    pub(crate) fn make_room(&mut self, slots: usize, hash_of: impl Fn(Slot) -> EngineHash) -> bool {
        let full = self.len + slots > self.most;
        if full {
            self.grow(slots, hash_of);
        }
        full
    }

    /// Adds a slot, after [`SlotTable::make_room`], unless there is an entry of the same place whose slot `accept` takes.
    /// Returns whether it did.
    #[inline(always)]
    pub(crate) fn add_new(&mut self, place: Place, slot: Slot, accept: impl FnMut(Slot) -> bool) -> bool {
        let line = &mut self.buckets[place.bucket() as usize];
        if !line.alike(place.tag()).is_nowhere() || line.passed(place.group()) > 0 {
            return self.add_if_new(place, slot, accept);
        }
        self.len += 1;
        match line.vacancy() {
            Some(at) => line.put(at, place.tag(), slot),
            None => self.put(place, slot),
        }
        true
    }

    #[inline(never)]
    fn add_if_new(&mut self, place: Place, slot: Slot, accept: impl FnMut(Slot) -> bool) -> bool {
        let Err(vacancy) = self.look_through(place, accept) else {
            return false;
        };
        self.len += 1;
        if vacancy.bucket == place.bucket() {
            self.buckets[vacancy.bucket as usize].put(vacancy.at as usize, place.tag(), slot);
        } else {
            self.put(place, slot);
        }
        true
    }

    #[inline(never)]
    fn put(&mut self, place: Place, slot: Slot) {
        let mut bucket = place.bucket();
        // Ends: there is room, or the table would have grown.
        loop {
            let line = &mut self.buckets[bucket as usize];
            if let Some(at) = line.vacancy() {
                return line.put(at, place.tag(), slot);
            }
            line.pass(place.group());
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

    /// Takes an entry out that was found for this hash; nothing was added since, and it wasn't taken.
    #[inline]
    pub(crate) fn take(&mut self, hash: EngineHash, entry: Entry) {
        let line = &mut self.buckets[entry.bucket as usize];
        debug_assert!(line.slots().any(|slot| slot == entry.slot), "taken twice");
        line.take(usize::from(entry.at));
        self.len -= 1;
        if entry.is_away {
            self.unpass(hash, entry.bucket);
        }
    }

    /// Like [`SlotTable::take`], for the entry of a place that [`SlotTable::guess`] gave.
    #[inline(always)]
    pub(crate) fn take_guessed(&mut self, place: Place, guess: Guess) {
        self.buckets[place.bucket() as usize].take(guess.at());
        self.len -= 1;
    }

    /// A hash that passed by buckets on its way to one is gone.
    #[inline(never)]
    fn unpass(&mut self, hash: EngineHash, to: u32) {
        let place = self.place(hash);
        let mut bucket = place.bucket();
        while bucket != to {
            self.buckets[bucket as usize].unpass(place.group());
            bucket = self.after(bucket);
        }
    }

    /// Grows by half, or to what is expected once a small part of that is there; beyond it by a quarter. There is room
    /// for `more` then.
    #[cold]
    fn grow(&mut self, more: usize, hash_of: impl Fn(Slot) -> EngineHash) {
        let wanted = match self.expected {
            expected if self.len < expected && self.len * EARLY >= expected => expected,
            expected if self.len >= expected && expected > 0 => self.len + self.len / 4 + 16,
            _ => self.len + 1 + self.len / 2,
        };
        let wanted = wanted.max(self.len + more);
        let buckets = (wanted * 100).div_ceil(FULLEST).max(1);
        self.most = buckets * FULLEST / 100;
        let old = std::mem::replace(&mut self.buckets, vec![Bucket::NEW; buckets]);
        for slot in old.iter().flat_map(Bucket::slots) {
            self.put(self.place(hash_of(slot)), slot);
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
                table.make_room((n % 40) as usize, |s| hashes[s as usize]);
                if n % 40 > 20 {
                    assert!(table.add_new(table.place(hash), slot, |_| false));
                } else {
                    table.insert(hash, slot, |s| hashes[s as usize]);
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
