//! Why an engine's event, or a part of it, isn't taken: a closed set, counted by reason.

/// Why something was refused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RefusalReason {
    /// The bytes aren't msgpack, or end too early.
    Malformed,
    /// The message's shape isn't `[ts, [events], rank?]`.
    NotABatch,
    /// Nested deeper than any engine does.
    TooDeep,
    /// A message, string or list is longer than the bound.
    TooLarge,
    /// A tag that Cairn doesn't know; skipped alone.
    UnknownTag,
    /// A required field isn't there.
    MissingField,
    /// A field has another type or range than it may have.
    BadField,
    /// A medium that Cairn doesn't know.
    UnknownMedium,
    /// `len(tokens)` isn't `block_size * len(hashes)`.
    Shape,
    /// The same hash twice in one event.
    DuplicateHash,
    /// The parent isn't known: quarantined until it is.
    UnknownParent,
    /// More than one block has the parent's hash.
    AmbiguousParent,
    /// An event without tokens whose hash isn't known yet: kept until it is.
    Unresolved,
    /// A removal of a hash that isn't known.
    UnknownHash,
    /// A removal of a hash that two chains have: both lose a copy.
    AmbiguousRemoval,
    /// A hash that another chain already has on this worker.
    Collision,
    /// The quarantine is full.
    QuarantineFull,
    /// The mirror is full.
    MirrorFull,
    /// A medium for which the source has no holder.
    NoHolder,
    /// The batch was applied before.
    Duplicate,
    /// The buffer of live batches during a replay is full.
    BufferFull,
}

impl RefusalReason {
    /// All of them, for metrics.
    pub const ALL: [Self; 21] = [
        Self::Malformed,
        Self::NotABatch,
        Self::TooDeep,
        Self::TooLarge,
        Self::UnknownTag,
        Self::MissingField,
        Self::BadField,
        Self::UnknownMedium,
        Self::Shape,
        Self::DuplicateHash,
        Self::UnknownParent,
        Self::AmbiguousParent,
        Self::Unresolved,
        Self::UnknownHash,
        Self::AmbiguousRemoval,
        Self::Collision,
        Self::QuarantineFull,
        Self::MirrorFull,
        Self::NoHolder,
        Self::Duplicate,
        Self::BufferFull,
    ];

    /// Label value for metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::NotABatch => "not_a_batch",
            Self::TooDeep => "too_deep",
            Self::TooLarge => "too_large",
            Self::UnknownTag => "unknown_tag",
            Self::MissingField => "missing_field",
            Self::BadField => "bad_field",
            Self::UnknownMedium => "unknown_medium",
            Self::Shape => "shape",
            Self::DuplicateHash => "duplicate_hash",
            Self::UnknownParent => "unknown_parent",
            Self::AmbiguousParent => "ambiguous_parent",
            Self::Unresolved => "unresolved",
            Self::UnknownHash => "unknown_hash",
            Self::AmbiguousRemoval => "ambiguous_removal",
            Self::Collision => "collision",
            Self::QuarantineFull => "quarantine_full",
            Self::MirrorFull => "mirror_full",
            Self::NoHolder => "no_holder",
            Self::Duplicate => "duplicate",
            Self::BufferFull => "buffer_full",
        }
    }

    /// Position in [`RefusalReason::ALL`].
    const fn index(self) -> usize {
        self as usize
    }
}

/// Counts by reason.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RefusalCounts([u64; RefusalReason::ALL.len()]);

impl RefusalCounts {
    /// Counts one more.
    pub fn add(&mut self, reason: RefusalReason) {
        self.add_many(reason, 1);
    }

    /// Counts `n` more.
    pub fn add_many(&mut self, reason: RefusalReason, n: u64) {
        self.0[reason.index()] = self.0[reason.index()].saturating_add(n);
    }

    /// How many so far.
    #[must_use]
    pub fn get(&self, reason: RefusalReason) -> u64 {
        self.0[reason.index()]
    }

    /// Every reason with its count.
    pub fn iter(&self) -> impl Iterator<Item = (RefusalReason, u64)> + '_ {
        RefusalReason::ALL.iter().map(|r| (*r, self.get(*r)))
    }
}
