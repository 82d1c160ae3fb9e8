//! All nodes of a mirror, by slot, by engine hash and, for roots, by key.

use cairn_blocks::BlockKey;
use cairn_index::mix;

use super::ahead::Ahead;
use super::node::{COUNT_MAX, FREE, Link, NONE, Node, ROOT, SIDE, Side, Slot, TWIN};
use super::slots::{EARLY, Entry, Guess, Place, SlotTable};
use super::tape::Going;
use crate::EngineHash;
use crate::fixed_hash::FixedMap;

/// So many blocks of an event are asked for ahead: their lines fit in the nearest cache.
pub(super) const AHEAD: usize = 32;

/// Nodes by slot, by engine hash and, for roots, by key.
#[derive(Debug)]
pub(crate) struct Arena {
    nodes: Vec<Node>,
    /// Slots in no use, the last freed one on top. A list of its own, so that the lines of slots that are about to be
    /// used again can be read ahead.
    free: Vec<Slot>,
    by_hash: SlotTable,
    roots: FixedMap<BlockKey, Slot>,
    pub(crate) sides: FixedMap<Slot, Box<Side>>,
    /// Copies beyond what fits in a node.
    more_copies: FixedMap<(Slot, u8), u32>,
    /// Children beyond what fits in a node.
    more_children: FixedMap<Slot, u32>,
    expected: usize,
}

impl Arena {
    /// An arena for about so many nodes; 0 where nothing is known.
    pub(crate) fn new(expected: usize) -> Self {
        let mut by_hash = SlotTable::default();
        by_hash.expect(expected);
        Self {
            nodes: Vec::new(),
            free: Vec::new(),
            by_hash,
            roots: FixedMap::default(),
            sides: FixedMap::default(),
            more_copies: FixedMap::default(),
            more_children: FixedMap::default(),
            expected,
        }
    }

    /// Tells how many nodes are expected.
    pub(crate) fn expect(&mut self, nodes: usize) {
        self.expected = nodes;
        self.by_hash.expect(nodes);
    }

    /// Nodes in use, roots included.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    #[inline]
    pub(crate) fn get(&self, slot: Slot) -> &Node {
        &self.nodes[slot as usize]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, slot: Slot) -> &mut Node {
        &mut self.nodes[slot as usize]
    }

    /// What is in a slot, in use or not.
    #[inline]
    pub(super) fn node(&self, slot: Slot) -> Option<&Node> {
        self.nodes.get(slot as usize)
    }

    /// The node in a slot that may have been freed since.
    #[inline]
    pub(crate) fn live(&self, slot: Slot) -> Option<&Node> {
        self.nodes.get(slot as usize).filter(|n| !n.has(FREE))
    }

    /// Every slot in use.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        (0..self.nodes.len() as u32).filter(|s| !self.get(*s).has(FREE))
    }

    /// Where up to [`AHEAD`] hashes are found, whose lines are asked for.
    #[inline]
    pub(super) fn approach(&self, hashes: &[EngineHash]) -> [Place; AHEAD] {
        let mut places = [Place::default(); AHEAD];
        for (place, hash) in places.iter_mut().zip(hashes) {
            *place = self.approach_one(*hash);
        }
        places
    }

    /// Where a hash is found, whose line is asked for.
    #[inline]
    pub(super) fn approach_one(&self, hash: EngineHash) -> Place {
        let place = self.by_hash.place(hash);
        self.by_hash.ask_for(place);
        place
    }

    /// Asks for the lines that hashes are found in.
    #[inline]
    pub(super) fn ask_for(&self, hashes: &[EngineHash]) {
        for hash in hashes {
            self.by_hash.ask_for(self.by_hash.place(*hash));
        }
    }

    /// Asks for what the removal of a block will need.
    #[inline]
    pub(super) fn approach_next(&self, slot: Slot) {
        let node = self.get(slot);
        self.ask_for(&[node.hash()]);
        if let Some(above) = self.node(node.parent()) {
            cairn_index::prefetch(above);
        }
    }

    /// What looks like the block of a place, whose node is asked for: it may be another one, or none where there is one.
    #[inline]
    pub(super) fn guess(&self, place: Place) -> Guess {
        let guess = self.by_hash.guess(place);
        if let Some(node) = self.node(guess.slot()) {
            cairn_index::prefetch(node);
        }
        guess
    }

    /// Asks for the node of a block that is there, whose line was asked for.
    #[inline]
    pub(super) fn approach_known(&self, hash: EngineHash) {
        self.guess(self.by_hash.place(hash));
    }

    /// Asks for what [`Arena::insert_link`] will need beyond a hash's own line.
    #[inline]
    pub(super) fn look_ahead(&self, place: Place) {
        if !self.by_hash.is_surely_new(place) {
            self.guess(place);
            self.by_hash.ask_further(place);
        }
    }

    /// What was guessed of a place where it is right, else what is found.
    #[inline]
    pub(super) fn settle(&self, (place, guess): (Place, Guess), hash: EngineHash) -> Entry {
        match self.node(guess.slot()) {
            Some(node) if node.hash() == hash => guess.entry(place),
            Some(_) | None => self.look(hash).unwrap_or(Entry::NONE),
        }
    }

    /// Some node with this hash.
    #[inline]
    pub(crate) fn find(&self, hash: EngineHash) -> Option<Slot> {
        self.look(hash).map(|entry| entry.slot)
    }

    /// All nodes with this hash.
    pub(crate) fn find_all(&self, hash: EngineHash) -> Vec<Slot> {
        let mut all = Vec::new();
        self.by_hash.find(hash, |s| {
            if self.get(s).hash() == hash {
                all.push(s);
            }
            false
        });
        all
    }

    /// Adds a block below its parent.
    #[inline]
    pub(crate) fn insert(&mut self, node: Node) -> Slot {
        let slot = self.place(node);
        let Self { nodes, by_hash, .. } = self;
        by_hash.insert(node.hash(), slot, |s| nodes[s as usize].hash());
        self.adopt(node.parent(), slot);
        slot
    }

    /// The entry of some node with this hash.
    #[inline]
    fn look(&self, hash: EngineHash) -> Option<Entry> {
        self.by_hash.find(hash, |s| self.get(s).hash() == hash)
    }

    /// Adds a block whose hash goes to this place, after [`Arena::make_room`], unless its hash is known: a link of a chain,
    /// whose parent counts it already or is told by [`Arena::join_links`].
    #[inline(always)]
    pub(super) fn insert_link(&mut self, place: Place, node: Node) -> Option<Slot> {
        let slot = self.take_slot();
        let Self { nodes, by_hash, .. } = &mut *self;
        if !by_hash.add_new(place, slot, |s| nodes[s as usize].hash() == node.hash()) {
            self.free.push(slot);
            return None;
        }
        nodes[slot as usize] = node;
        Some(slot)
    }

    /// Adds a block that nothing hangs on below its parent, unless its hash is known.
    #[inline]
    pub(super) fn insert_leaf(&mut self, node: Node) -> Option<Slot> {
        self.make_room(1);
        let slot = self.insert_link(self.by_hash.place(node.hash()), node)?;
        self.adopt(node.parent(), slot);
        Some(slot)
    }

    /// Makes room for so many blocks more in the table of hashes. Returns whether it had to grow: then what was known of
    /// places in it is known no more.
    #[inline]
    pub(super) fn make_room(&mut self, blocks: usize) -> bool {
        let Self { nodes, by_hash, .. } = self;
        by_hash.make_room(blocks, |s| nodes[s as usize].hash())
    }

    /// A chain of links hangs below a parent now, and this is its last one, on which nothing hangs.
    pub(super) fn join_links(&mut self, parent: Slot, last: Slot) {
        // Which child it is matters only to a parent that ends inside a block, and such have no links below them.
        self.adopt(parent, last);
        self.get_mut(last).set_children_low(0);
    }

    /// One more than the highest slot.
    pub(crate) fn slot_bound(&self) -> usize {
        self.nodes.len()
    }

    /// Puts a node of a checkpoint into the next slot; its parent may not be there yet.
    pub(crate) fn place_unlinked(&mut self, mut node: Node, side: Option<Side>) -> Slot {
        node.set(SIDE, side.is_some());
        let slot = self.place(node);
        if let Some(side) = side {
            self.sides.insert(slot, Box::new(side));
        }
        slot
    }

    /// Makes a node of a checkpoint findable and known to its parent, which must be there.
    pub(crate) fn link(&mut self, slot: Slot) {
        let node = *self.get(slot);
        if node.has(ROOT) {
            self.roots.insert(node.key(), slot);
            return;
        }
        for twin in self.find_all(node.hash()) {
            self.get_mut(twin).set(TWIN, true);
            self.get_mut(slot).set(TWIN, true);
        }
        let Self { nodes, by_hash, .. } = self;
        by_hash.insert(node.hash(), slot, |s| nodes[s as usize].hash());
        self.adopt(node.parent(), slot);
    }

    /// A node has one child more.
    #[inline]
    fn adopt(&mut self, parent: Slot, slot: Slot) {
        let node = &mut self.nodes[parent as usize];
        let children = node.children_low();
        if children == COUNT_MAX || node.has(SIDE) {
            return self.adopt_with_care(parent, slot);
        }
        node.add_child();
    }

    /// Like [`Arena::adopt`] where the node has many children, or something in the side table.
    #[inline(never)]
    fn adopt_with_care(&mut self, parent: Slot, slot: Slot) {
        let node = &mut self.nodes[parent as usize];
        let children = node.children_low();
        if children < COUNT_MAX {
            node.set_children_low(children + 1);
        } else {
            *self.more_children.entry(parent).or_default() += 1;
        }
        if node.has(SIDE)
            && let Some(side) = self.sides.get_mut(&parent)
            && !side.tail.is_empty()
        {
            side.children.push(slot);
        }
    }

    /// A node has one child less. Returns whether that leaves it without copies and children.
    #[inline]
    pub(super) fn orphan(&mut self, parent: Slot, slot: Slot) -> bool {
        let node = &mut self.nodes[parent as usize];
        let children = node.children_low();
        if children == COUNT_MAX || node.has(SIDE) {
            self.orphan_with_care(parent, slot);
            return self.get(parent).is_unused();
        }
        node.drop_child();
        node.is_unused()
    }

    /// Like [`Arena::orphan`] where the node has many children, or something in the side table.
    #[inline(never)]
    fn orphan_with_care(&mut self, parent: Slot, slot: Slot) {
        let node = &mut self.nodes[parent as usize];
        let children = node.children_low();
        let more = if children == COUNT_MAX {
            self.more_children.get_mut(&parent)
        } else {
            None
        };
        match more {
            Some(1) => {
                self.more_children.remove(&parent);
            }
            Some(more) => *more -= 1,
            None => node.set_children_low(children - 1),
        }
        if node.has(SIDE)
            && let Some(side) = self.sides.get_mut(&parent)
            && let Some(at) = side.children.iter().position(|c| *c == slot)
        {
            side.children.swap_remove(at);
        }
    }

    #[inline]
    fn place(&mut self, node: Node) -> Slot {
        let slot = self.take_slot();
        *self.get_mut(slot) = node;
        slot
    }

    /// A slot in no use.
    #[inline]
    fn take_slot(&mut self) -> Slot {
        match self.free.pop() {
            Some(slot) => slot,
            None => self.new_slot(),
        }
    }

    #[inline(never)]
    fn new_slot(&mut self) -> Slot {
        if self.nodes.len() == self.nodes.capacity() {
            self.grow();
        }
        self.nodes.push(Node::new(EngineHash(0), BlockKey(0), NONE, 0, FREE));
        self.nodes.len() as u32 - 1
    }

    /// Makes room for a half more, or for what is expected once a small part of that is there; beyond it, for a quarter.
    #[cold]
    fn grow(&mut self) {
        let len = self.nodes.len();
        let more = match self.expected {
            expected if len < expected && len * EARLY >= expected => expected - len,
            expected if len >= expected && expected > 0 => len / 4 + 16,
            _ => len / 2 + 16,
        };
        self.nodes.reserve_exact(more);
    }

    /// The root with this key, made where it isn't there yet.
    pub(crate) fn root(&mut self, key: BlockKey) -> Slot {
        if let Some(slot) = self.roots.get(&key) {
            return *slot;
        }
        let slot = self.place(Node::new(EngineHash(0), key, NONE, 0, ROOT));
        self.roots.insert(key, slot);
        slot
    }

    /// Takes out the block with this hash where it is just such a leaf; its parent must be told, by [`Arena::orphan`].
    #[inline]
    pub(super) fn take_leaf(&mut self, hash: EngineHash, leaf: Link) -> Option<(Slot, Node)> {
        let place = self.by_hash.place(hash);
        let entry = self.settle((place, self.by_hash.guess(place)), hash);
        let node = self.nodes.get_mut(entry.slot as usize).filter(|n| n.is_only(leaf))?;
        let taken = *node;
        node.flags = FREE;
        self.by_hash.take(hash, entry);
        self.free.push(entry.slot);
        Some((entry.slot, taken))
    }

    /// Takes out the next blocks of which each is the parent of the one before: the first where it is just a `leaf`, and
    /// others where they are just `links`. The parent of the last must be told, by [`Arena::orphan`]. Returns what their
    /// keys add to a digest.
    #[inline]
    pub(super) fn take_chain(&mut self, next: &mut Ahead<'_>, (leaf, link): (Link, Link), going: &mut Going) -> u64 {
        let Some(hash) = next.hash() else { return 0 };
        let first = self.settle((next.place(), next.guess()), hash);
        let Some(node) = self.nodes.get_mut(first.slot as usize).filter(|n| n.is_only(leaf)) else {
            return 0;
        };
        let mut digest = mix(node.key());
        (going.slot, going.key, going.end) = (first.slot, node.key(), node.end());
        going.parent = node.parent();
        node.flags = FREE;
        self.by_hash.take(hash, first);
        self.free.push(first.slot);
        going.count = 1;
        next.advance(self);
        while let Some(hash) = next.hash() {
            let slot = going.parent;
            let Some(node) = self.nodes.get_mut(slot as usize) else {
                break;
            };
            if node.hash() != hash || !node.is_only(link) {
                break;
            }
            digest = digest.wrapping_add(mix(node.key()));
            going.parent = node.parent();
            node.flags = FREE;
            let guess = next.guess();
            if guess.slot() == slot {
                self.by_hash.take_guessed(next.place(), guess);
            } else {
                self.by_hash.remove(hash, slot);
            }
            self.free.push(slot);
            going.count += 1;
            next.advance(self);
        }
        digest
    }

    /// Takes a node out; its parent then has one child less.
    #[inline]
    pub(crate) fn remove(&mut self, slot: Slot) {
        let node = *self.get(slot);
        if node.has(ROOT) {
            self.roots.remove(&node.key());
        } else {
            self.by_hash.remove(node.hash(), slot);
            self.orphan(node.parent(), slot);
        }
        if node.has(SIDE) {
            self.sides.remove(&slot);
        }
        self.get_mut(slot).flags = FREE;
        self.free.push(slot);
    }

    #[inline]
    pub(crate) fn side(&self, slot: Slot) -> Option<&Side> {
        if self.get(slot).has(SIDE) {
            self.sides.get(&slot).map(AsRef::as_ref)
        } else {
            None
        }
    }

    #[inline]
    pub(crate) fn copies(&self, slot: Slot, tier: usize) -> u32 {
        match self.get(slot).copies_low(tier) {
            COUNT_MAX => COUNT_MAX + self.more_copies.get(&(slot, tier as u8)).copied().unwrap_or(0),
            n => n,
        }
    }

    #[inline]
    pub(crate) fn set_copies(&mut self, slot: Slot, tier: usize, copies: u32) {
        self.get_mut(slot).set_copies_low(tier, copies.min(COUNT_MAX));
        if copies > COUNT_MAX {
            self.more_copies.insert((slot, tier as u8), copies - COUNT_MAX);
        } else if !self.more_copies.is_empty() {
            self.more_copies.remove(&(slot, tier as u8));
        }
    }

    /// Forgets everything and gives back the memory of a large table.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.expected);
    }

    /// Bytes that the tables take.
    pub(crate) fn memory_bytes(&self) -> usize {
        let sides: usize = self
            .sides
            .values()
            .map(|s| 80 + size_of::<Side>() + s.keys.capacity() * 8 + s.tail.capacity() * 4 + s.children.capacity() * 4)
            .sum();
        let more = self.more_copies.capacity() * 13 + self.more_children.capacity() * 9;
        self.nodes.capacity() * size_of::<Node>()
            + self.free.capacity() * size_of::<Slot>()
            + self.by_hash.memory_bytes()
            + sides
            + more
    }
}
