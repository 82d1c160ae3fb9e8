//! The keys of all runs, in chunks of a fixed size that are reused at once.
#![expect(
    unsafe_code,
    reason = "keys live in anonymous mappings so that the platform can back them by huge pages; every access goes \
              through `chunk` and `chunk_mut`, which check the chunk against the segments that exist"
)]

use std::ptr::NonNull;

use cairn_blocks::BlockKey;
use memmap2::{MmapMut, MmapOptions};

use crate::hint::prefetch;

/// Keys in one chunk: two cache lines, so that a run wastes less than that at its end.
pub(super) const CHUNK_KEYS: usize = 16;
/// Keys in a cache line.
const LINE_KEYS: usize = 8;
/// Chunks in a full segment: 2 MiB of keys, one huge page on x86-64 and on arm64 with 4 KiB pages.
const SEGMENT_CHUNKS: usize = (2 << 20) / (CHUNK_KEYS * 8);
/// Keys in a full segment.
const SEGMENT_KEYS: usize = SEGMENT_CHUNKS * CHUNK_KEYS;
/// Bytes in a full segment.
const SEGMENT_BYTES: usize = SEGMENT_KEYS * 8;
/// Segments whose addresses are reserved together; memory is only taken as segments are touched.
const REGION_SEGMENTS: usize = 32;
/// Chunks that the first, small segment begins with.
const FIRST_CHUNKS: usize = 32;

/// Name of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ChunkId(pub u32);

/// Chunks of keys.
pub(super) struct Arena {
    /// Segment 0 while it is smaller than a huge page, so that small indexes stay small.
    first: Vec<BlockKey>,
    /// Where the segments after the first begin.
    bases: Vec<NonNull<BlockKey>>,
    /// Owners of the memory that `bases` point into.
    regions: Vec<MmapMut>,
    /// Chunks ever handed out.
    next: u32,
    free: Vec<ChunkId>,
}

// SAFETY: the pointers lead into mappings that this arena alone owns; shared access only reads.
unsafe impl Send for Arena {}
// SAFETY: as above; writing needs `&mut self`.
unsafe impl Sync for Arena {}

impl Arena {
    pub(super) fn new() -> Self {
        Self {
            first: Vec::new(),
            bases: Vec::new(),
            regions: Vec::new(),
            next: 0,
            free: Vec::new(),
        }
    }

    /// Chunks in use.
    pub(super) fn used(&self) -> usize {
        self.next as usize - self.free.len()
    }

    /// Bytes of mappings that were touched, in whole segments.
    pub(super) fn mapped_bytes(&self) -> usize {
        let chunks = (self.next as usize).saturating_sub(SEGMENT_CHUNKS);
        chunks.div_ceil(SEGMENT_CHUNKS) * SEGMENT_BYTES
    }

    /// Bytes taken from the system.
    pub(super) fn bytes(&self) -> usize {
        self.first.capacity() * 8 + self.mapped_bytes() + self.free.capacity() * 4 + self.bases.capacity() * 8
    }

    /// A chunk with undefined keys.
    pub(super) fn alloc(&mut self) -> ChunkId {
        if let Some(chunk) = self.free.pop() {
            return chunk;
        }
        let chunk = ChunkId(self.next);
        self.next = self
            .next
            .checked_add(1)
            .expect("the bound on bytes is far below 2^32 chunks");
        let (segment, within) = place(chunk);
        if segment == 0 {
            if (within + 1) * CHUNK_KEYS > self.first.len() {
                // By a quarter, in whole chunks: a small index is copied often but wastes little.
                let chunks = (self.first.len() / CHUNK_KEYS * 5 / 4).clamp(FIRST_CHUNKS, SEGMENT_CHUNKS);
                let keys = chunks * CHUNK_KEYS;
                self.first.reserve_exact(keys - self.first.len());
                self.first.resize(keys, BlockKey(0));
            }
        } else if segment > self.bases.len() {
            self.add_segment();
        }
        chunk
    }

    /// Gives a chunk back.
    pub(super) fn release(&mut self, chunk: ChunkId) {
        self.free.push(chunk);
    }

    /// The keys of a chunk.
    #[inline]
    pub(super) fn chunk(&self, chunk: ChunkId) -> &[BlockKey] {
        let (segment, within) = place(chunk);
        let start = within * CHUNK_KEYS;
        if segment == 0 {
            return &self.first[start..start + CHUNK_KEYS];
        }
        let base = self.bases[segment - 1];
        // SAFETY: the segment has SEGMENT_KEYS initialised keys from `base` on, `within` is below SEGMENT_CHUNKS, and
        // the mapping lives as long as the arena.
        unsafe { std::slice::from_raw_parts(base.as_ptr().add(start), CHUNK_KEYS) }
    }

    /// Asks for a chunk.
    #[inline]
    pub(super) fn prefetch(&self, chunk: ChunkId) {
        for line in self.chunk(chunk).chunks(LINE_KEYS) {
            prefetch(&line[0]);
        }
    }

    /// The keys of a chunk, to be written.
    #[inline]
    pub(super) fn chunk_mut(&mut self, chunk: ChunkId) -> &mut [BlockKey] {
        let (segment, within) = place(chunk);
        let start = within * CHUNK_KEYS;
        if segment == 0 {
            return &mut self.first[start..start + CHUNK_KEYS];
        }
        let base = self.bases[segment - 1];
        // SAFETY: as in `chunk`; `&mut self` makes it the only access.
        unsafe { std::slice::from_raw_parts_mut(base.as_ptr().add(start), CHUNK_KEYS) }
    }

    /// Makes the next segment addressable, reserving a new region of addresses where the last one is used up.
    fn add_segment(&mut self) {
        let within = self.bases.len() % REGION_SEGMENTS;
        if within == 0 {
            // One segment more, so that the first can begin on a huge page.
            let bytes = (REGION_SEGMENTS + 1) * SEGMENT_BYTES;
            let region = MmapOptions::new().len(bytes).no_reserve_swap().map_anon();
            let region = region.expect("the system refused address space for keys: out of memory");
            #[cfg(target_os = "linux")]
            {
                // Only advice: without huge pages lookups cost more, answers are the same.
                let _ = region.advise(memmap2::Advice::HugePage);
            }
            self.regions.push(region);
        }
        let region = self.regions.last_mut().expect("pushed above for the first segment");
        let start = region.as_mut_ptr();
        let offset = start.align_offset(SEGMENT_BYTES) + within * SEGMENT_BYTES;
        assert!(
            offset + SEGMENT_BYTES <= region.len(),
            "a region holds REGION_SEGMENTS aligned segments"
        );
        // SAFETY: inside the mapping by the assertion above.
        let base = unsafe { start.add(offset) };
        self.bases
            .push(NonNull::new(base.cast::<BlockKey>()).expect("mappings aren't at address 0"));
    }
}

impl Clone for Arena {
    fn clone(&self) -> Self {
        let mut copy = Self {
            first: self.first.clone(),
            next: self.next,
            free: self.free.clone(),
            ..Self::new()
        };
        for from in &self.bases {
            copy.add_segment();
            let to = copy.bases[copy.bases.len() - 1];
            // SAFETY: both segments have SEGMENT_KEYS initialised keys, and the new one is this copy's alone.
            unsafe { to.as_ptr().copy_from_nonoverlapping(from.as_ptr(), SEGMENT_KEYS) };
        }
        copy
    }
}

/// Segment of a chunk, and its place there.
#[inline]
fn place(chunk: ChunkId) -> (usize, usize) {
    (chunk.0 as usize / SEGMENT_CHUNKS, chunk.0 as usize % SEGMENT_CHUNKS)
}
