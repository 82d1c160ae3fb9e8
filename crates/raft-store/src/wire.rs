//! Messages between index nodes: an envelope that says who speaks to whom, and Raft's requests and answers in it.
//!
//! The envelope makes crossed wires harmless: a node refuses messages of another cluster, for another id, or for an
//! earlier life of its data directory.

use bytes::Bytes;
use openraft::raft::{AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse};

use crate::codec::{CodecError, Reader, Writer, entry_bytes};
use crate::types::{SnapshotMeta, TypeConfig, Vote};

/// Most entries of one append message; the leader sends at most [`crate::consensus::PAYLOAD_ENTRIES_MAX`].
const ENTRIES_MAX: usize = 4096;
/// Smallest encoded entry.
const ENTRY_BYTES_MIN: usize = 25;

/// Who speaks to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Envelope {
    /// Hash of the cluster's name.
    pub(crate) cluster: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// The target's data directory.
    pub(crate) store: u64,
    /// How long ago the sender knew of a quorum, in milliseconds.
    pub(crate) quorum_age_ms: u64,
}

impl Envelope {
    pub(crate) fn open(self) -> Writer {
        let mut writer = Writer::versioned();
        writer
            .word(self.cluster)
            .word(self.from)
            .word(self.to)
            .word(self.store)
            .word(self.quorum_age_ms);
        writer
    }

    pub(crate) fn read(bytes: Bytes) -> Result<(Self, Reader), CodecError> {
        let mut reader = Reader::versioned(bytes)?;
        let envelope = Self {
            cluster: reader.word("an envelope")?,
            from: reader.word("an envelope")?,
            to: reader.word("an envelope")?,
            store: reader.word("an envelope")?,
            quorum_age_ms: reader.word("an envelope")?,
        };
        Ok((envelope, reader))
    }
}

/// A number that tells cluster names apart in envelopes (FNV-1a; not a secret).
pub(crate) fn cluster_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

pub(crate) fn put_append(mut writer: Writer, request: &AppendEntriesRequest<TypeConfig>) -> Bytes {
    writer
        .vote(&request.vote)
        .maybe_log_id(request.prev_log_id.as_ref())
        .maybe_log_id(request.leader_commit.as_ref())
        .word(request.entries.len() as u64);
    writer.reserve(request.entries.iter().map(entry_bytes).sum());
    for entry in &request.entries {
        writer.entry(entry);
    }
    writer.0.into()
}

pub(crate) fn append(mut reader: Reader) -> Result<AppendEntriesRequest<TypeConfig>, CodecError> {
    let vote = reader.vote()?;
    let prev_log_id = reader.maybe_log_id()?;
    let leader_commit = reader.maybe_log_id()?;
    let count = reader.count(ENTRY_BYTES_MIN, "the number of entries")?;
    if count > ENTRIES_MAX {
        return Err(CodecError::Invalid("the number of entries"));
    }
    let entries = (0..count).map(|_| reader.entry()).collect::<Result<_, _>>()?;
    reader.finish()?;
    Ok(AppendEntriesRequest {
        vote,
        prev_log_id,
        entries,
        leader_commit,
    })
}

const SUCCESS: u8 = 0;
const PARTIAL: u8 = 1;
const CONFLICT: u8 = 2;
const HIGHER_VOTE: u8 = 3;

pub(crate) fn put_append_reply(reply: &AppendEntriesResponse<u64>) -> Bytes {
    let mut writer = Writer::versioned();
    match reply {
        AppendEntriesResponse::Success => writer.byte(SUCCESS),
        AppendEntriesResponse::PartialSuccess(matching) => writer.byte(PARTIAL).maybe_log_id(matching.as_ref()),
        AppendEntriesResponse::Conflict => writer.byte(CONFLICT),
        AppendEntriesResponse::HigherVote(vote) => writer.byte(HIGHER_VOTE).vote(vote),
    };
    writer.0.into()
}

pub(crate) fn append_reply(bytes: Bytes) -> Result<AppendEntriesResponse<u64>, CodecError> {
    let mut reader = Reader::versioned(bytes)?;
    let reply = match reader.byte("an answer")? {
        SUCCESS => AppendEntriesResponse::Success,
        PARTIAL => AppendEntriesResponse::PartialSuccess(reader.maybe_log_id()?),
        CONFLICT => AppendEntriesResponse::Conflict,
        HIGHER_VOTE => AppendEntriesResponse::HigherVote(reader.vote()?),
        _ => return Err(CodecError::Invalid("an answer")),
    };
    reader.finish()?;
    Ok(reply)
}

pub(crate) fn put_vote(mut writer: Writer, request: &VoteRequest<u64>) -> Bytes {
    writer.vote(&request.vote).maybe_log_id(request.last_log_id.as_ref());
    writer.0.into()
}

pub(crate) fn vote(mut reader: Reader) -> Result<VoteRequest<u64>, CodecError> {
    let request = VoteRequest {
        vote: reader.vote()?,
        last_log_id: reader.maybe_log_id()?,
    };
    reader.finish()?;
    Ok(request)
}

pub(crate) fn put_vote_reply(reply: &VoteResponse<u64>) -> Bytes {
    let mut writer = Writer::versioned();
    writer
        .vote(&reply.vote)
        .byte(u8::from(reply.vote_granted))
        .maybe_log_id(reply.last_log_id.as_ref());
    writer.0.into()
}

pub(crate) fn vote_reply(bytes: Bytes) -> Result<VoteResponse<u64>, CodecError> {
    let mut reader = Reader::versioned(bytes)?;
    let reply = VoteResponse {
        vote: reader.vote()?,
        vote_granted: reader.flag("a vote's answer")?,
        last_log_id: reader.maybe_log_id()?,
    };
    reader.finish()?;
    Ok(reply)
}

/// First message of a snapshot stream; the file's bytes follow raw.
pub(crate) fn put_snapshot_head(mut writer: Writer, vote: &Vote, meta: &SnapshotMeta, bytes: u64) -> Bytes {
    writer.vote(vote).word(bytes).snapshot_meta(meta);
    writer.0.into()
}

pub(crate) fn snapshot_head(mut reader: Reader) -> Result<(Vote, u64, SnapshotMeta), CodecError> {
    let vote = reader.vote()?;
    let bytes = reader.word("a snapshot's size")?;
    let meta = reader.snapshot_meta()?;
    reader.finish()?;
    Ok((vote, bytes, meta))
}

pub(crate) fn put_snapshot_reply(reply: &SnapshotResponse<u64>) -> Bytes {
    let mut writer = Writer::versioned();
    writer.vote(&reply.vote);
    writer.0.into()
}

pub(crate) fn snapshot_reply(bytes: Bytes) -> Result<SnapshotResponse<u64>, CodecError> {
    let mut reader = Reader::versioned(bytes)?;
    let reply = SnapshotResponse { vote: reader.vote()? };
    reader.finish()?;
    Ok(reply)
}
