//! Stored and sent bytes of Raft's own things: ids, votes, memberships, log entries and snapshot descriptions.
//!
//! Little-endian fixed-width integers, length-framed bytes; a version byte leads every stored value. Readers take
//! hostile input: every length is checked against what is left before memory is asked for.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use openraft::{CommittedLeaderId, EntryPayload};

use crate::types::{Entry, LogId, Membership, Payload, Peer, SnapshotMeta, StoredMembership, Vote};

/// Version of all encodings of this file.
const VERSION: u8 = 1;
/// Most members, in all configurations together, that a membership may name.
const MEMBERS_MAX: usize = 64;
/// Longest address in bytes.
const ADDRESS_BYTES_MAX: usize = 1024;

const BLANK: u8 = 0;
const NORMAL: u8 = 1;
const MEMBERSHIP: u8 = 2;

/// Bytes that aren't what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The bytes end early.
    #[error("the bytes end inside {0}")]
    Short(&'static str),
    /// Bytes are left over.
    #[error("{0} bytes are left over")]
    Trailing(usize),
    /// Written by another version.
    #[error("version {0} is unknown; upgrade this node")]
    Version(u8),
    /// A value that means nothing.
    #[error("{0} is invalid")]
    Invalid(&'static str),
}

/// Writes fields one after another.
#[derive(Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn versioned() -> Self {
        Self(vec![VERSION])
    }

    /// Makes room for this many bytes more, so that large entries are copied once.
    pub(crate) fn reserve(&mut self, bytes: usize) -> &mut Self {
        self.0.reserve(bytes);
        self
    }

    pub(crate) fn byte(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    pub(crate) fn word(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn bytes(&mut self, value: &[u8]) -> &mut Self {
        self.word(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    pub(crate) fn log_id(&mut self, id: &LogId) -> &mut Self {
        self.word(id.leader_id.term).word(id.leader_id.node_id).word(id.index)
    }

    pub(crate) fn maybe_log_id(&mut self, id: Option<&LogId>) -> &mut Self {
        match id {
            Some(id) => self.byte(1).log_id(id),
            None => self.byte(0),
        }
    }

    pub(crate) fn vote(&mut self, vote: &Vote) -> &mut Self {
        self.word(vote.leader_id.term)
            .word(vote.leader_id.node_id)
            .byte(u8::from(vote.committed))
    }

    pub(crate) fn membership(&mut self, membership: &Membership) -> &mut Self {
        let configs = membership.get_joint_config();
        self.word(configs.len() as u64);
        for config in configs {
            self.word(config.len() as u64);
            for id in config {
                self.word(*id);
            }
        }
        let nodes: Vec<_> = membership.nodes().collect();
        self.word(nodes.len() as u64);
        for (id, peer) in nodes {
            self.word(*id).word(peer.store).bytes(peer.address.as_bytes());
        }
        self
    }

    pub(crate) fn stored_membership(&mut self, membership: &StoredMembership) -> &mut Self {
        self.maybe_log_id(membership.log_id().as_ref())
            .membership(membership.membership())
    }

    pub(crate) fn entry(&mut self, entry: &Entry) -> &mut Self {
        self.reserve(entry_bytes(entry));
        self.log_id(&entry.log_id);
        match &entry.payload {
            EntryPayload::Blank => self.byte(BLANK),
            EntryPayload::Normal(payload) => self.byte(NORMAL).bytes(&payload.0),
            EntryPayload::Membership(membership) => self.byte(MEMBERSHIP).membership(membership),
        }
    }

    pub(crate) fn snapshot_meta(&mut self, meta: &SnapshotMeta) -> &mut Self {
        self.maybe_log_id(meta.last_log_id.as_ref())
            .stored_membership(&meta.last_membership)
            .bytes(meta.snapshot_id.as_bytes())
    }
}

/// Bytes that an entry takes, apart from a membership's.
pub(crate) fn entry_bytes(entry: &Entry) -> usize {
    /// Position, kind and length.
    const FRAME: usize = 3 * 8 + 1 + 8;
    match &entry.payload {
        EntryPayload::Normal(payload) => FRAME + payload.0.len(),
        EntryPayload::Blank | EntryPayload::Membership(_) => FRAME,
    }
}

/// Reads fields one after another; command bytes are sliced, not copied.
pub(crate) struct Reader {
    left: Bytes,
}

impl Reader {
    pub(crate) fn new(bytes: Bytes) -> Self {
        Self { left: bytes }
    }

    pub(crate) fn versioned(bytes: Bytes) -> Result<Self, CodecError> {
        let mut reader = Self::new(bytes);
        match reader.byte("a version")? {
            VERSION => Ok(reader),
            version => Err(CodecError::Version(version)),
        }
    }

    fn take(&mut self, len: usize, what: &'static str) -> Result<Bytes, CodecError> {
        if self.left.len() < len {
            return Err(CodecError::Short(what));
        }
        Ok(self.left.split_to(len))
    }

    pub(crate) fn byte(&mut self, what: &'static str) -> Result<u8, CodecError> {
        Ok(self.take(1, what)?[0])
    }

    pub(crate) fn flag(&mut self, what: &'static str) -> Result<bool, CodecError> {
        match self.byte(what)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(CodecError::Invalid(what)),
        }
    }

    pub(crate) fn word(&mut self, what: &'static str) -> Result<u64, CodecError> {
        let bytes = self.take(8, what)?;
        let mut word = [0u8; 8];
        word.copy_from_slice(&bytes);
        Ok(u64::from_le_bytes(word))
    }

    /// A count of things that take at least `each` bytes.
    pub(crate) fn count(&mut self, each: usize, what: &'static str) -> Result<usize, CodecError> {
        let count = usize::try_from(self.word(what)?).map_err(|_| CodecError::Invalid(what))?;
        if count > self.left.len() / each {
            return Err(CodecError::Short(what));
        }
        Ok(count)
    }

    pub(crate) fn bytes(&mut self, what: &'static str) -> Result<Bytes, CodecError> {
        let len = self.count(1, what)?;
        self.take(len, what)
    }

    pub(crate) fn text(&mut self, max: usize, what: &'static str) -> Result<String, CodecError> {
        let bytes = self.bytes(what)?;
        if bytes.len() > max {
            return Err(CodecError::Invalid(what));
        }
        String::from_utf8(bytes.to_vec()).map_err(|_| CodecError::Invalid(what))
    }

    pub(crate) fn finish(self) -> Result<(), CodecError> {
        match self.left.len() {
            0 => Ok(()),
            left => Err(CodecError::Trailing(left)),
        }
    }

    pub(crate) fn log_id(&mut self) -> Result<LogId, CodecError> {
        let term = self.word("a log id")?;
        let node = self.word("a log id")?;
        Ok(LogId::new(CommittedLeaderId::new(term, node), self.word("a log id")?))
    }

    pub(crate) fn maybe_log_id(&mut self) -> Result<Option<LogId>, CodecError> {
        if self.flag("a log id")? {
            self.log_id().map(Some)
        } else {
            Ok(None)
        }
    }

    pub(crate) fn vote(&mut self) -> Result<Vote, CodecError> {
        let term = self.word("a vote")?;
        let node = self.word("a vote")?;
        let committed = self.flag("a vote")?;
        Ok(if committed {
            Vote::new_committed(term, node)
        } else {
            Vote::new(term, node)
        })
    }

    pub(crate) fn membership(&mut self) -> Result<Membership, CodecError> {
        let mut configs = Vec::new();
        let count = self.count(8, "a membership")?;
        if count > 2 {
            return Err(CodecError::Invalid("a membership"));
        }
        for _ in 0..count {
            let voters = self.count(8, "a membership")?;
            if voters > MEMBERS_MAX {
                return Err(CodecError::Invalid("a membership"));
            }
            let mut config = BTreeSet::new();
            for _ in 0..voters {
                config.insert(self.word("a voter")?);
            }
            configs.push(config);
        }
        let count = self.count(24, "a membership")?;
        if count > MEMBERS_MAX {
            return Err(CodecError::Invalid("a membership"));
        }
        let mut nodes = BTreeMap::new();
        for _ in 0..count {
            let id = self.word("a member")?;
            let store = self.word("a member")?;
            let address = self.text(ADDRESS_BYTES_MAX, "a member's address")?;
            nodes.insert(id, Peer { address, store });
        }
        Ok(Membership::new(configs, nodes))
    }

    pub(crate) fn stored_membership(&mut self) -> Result<StoredMembership, CodecError> {
        let id = self.maybe_log_id()?;
        Ok(StoredMembership::new(id, self.membership()?))
    }

    pub(crate) fn entry(&mut self) -> Result<Entry, CodecError> {
        let log_id = self.log_id()?;
        let payload = match self.byte("an entry")? {
            BLANK => EntryPayload::Blank,
            NORMAL => EntryPayload::Normal(Payload(self.bytes("a command")?)),
            MEMBERSHIP => EntryPayload::Membership(self.membership()?),
            _ => return Err(CodecError::Invalid("an entry's kind")),
        };
        Ok(Entry { log_id, payload })
    }

    pub(crate) fn snapshot_meta(&mut self) -> Result<SnapshotMeta, CodecError> {
        Ok(SnapshotMeta {
            last_log_id: self.maybe_log_id()?,
            last_membership: self.stored_membership()?,
            snapshot_id: self.text(ADDRESS_BYTES_MAX, "a snapshot's id")?,
        })
    }
}
