//! Batches on their way to the index: contiguous, bounded in number, sent again until acknowledged.

use std::collections::VecDeque;

use cairn_index::{Batch, BatchOutcome, Confidence, DegradedReason, HolderId, Incarnation, Op, Seq};

use crate::Registration;
use crate::mirror::{Changes, Mirror};

/// Batches without an answer: at 20 ms a round trip and full batches, 3 M keys/s.
const MAX_WINDOW: usize = 16;

/// What an answer of the index asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// Nothing.
    Done,
    /// The lifetime can't go on: register anew and tell everything.
    Reregister,
    /// Another lifetime is the present one.
    Fenced(Incarnation),
}

/// The stream of batches of one incarnation.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    registration: Option<Registration>,
    window: VecDeque<Box<Changes>>,
    /// Position in the window of the next batch to send.
    unsent: usize,
    built: Seq,
    told_confidence: Option<Confidence>,
    /// An earlier process had written down what it would tell, and that is lost: only all of it makes it good.
    behind: bool,
    /// Anchors that the index didn't know, and full repairs.
    pub(crate) unknown_anchors: u64,
    pub(crate) full_repairs: u64,
    pub(crate) resent: u64,
    pub(crate) window_full: u64,
}

impl Outbox {
    pub(crate) fn registration(&self) -> Option<&Registration> {
        self.registration.as_ref()
    }

    /// Whether a process that goes on from what is known here would lack what is to be told.
    pub(crate) fn is_behind(&self, mirror: &Mirror) -> bool {
        self.behind || !mirror.tape.is_empty()
    }

    /// Whether the index lacks something that only telling everything again makes good.
    pub(crate) fn lost_some(&self) -> bool {
        self.behind
    }

    /// Last batch that was made.
    pub(crate) fn built(&self) -> Seq {
        self.built
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.window.len()
    }

    /// What a checkpoint of an earlier process says of this lifetime.
    pub(crate) fn restore(&mut self, registration: Registration, built: Seq, behind: bool) {
        self.registration = Some(registration);
        self.built = built;
        self.behind = behind;
        self.window.clear();
        self.unsent = 0;
    }

    /// The lifetime is over; nothing is sent until the next registration.
    #[inline(never)]
    pub(crate) fn reset(&mut self, mirror: &mut Mirror) {
        mirror.tape.stop();
        self.registration = None;
        self.window.clear();
        self.unsent = 0;
        self.built = Seq(0);
        self.told_confidence = None;
    }

    /// The index accepted a registration: what it lacks is sent again, all of it where the two don't fit together.
    pub(crate) fn registered(&mut self, registration: Registration, mirror: &mut Mirror) {
        let same = self
            .registration
            .as_ref()
            .is_some_and(|r| r.incarnation == registration.incarnation);
        let first = self.window.front().map_or(self.built.0 + 1, |s| s.batch.seq.0);
        let in_window = registration.seq.0 + 1 >= first && registration.seq <= self.built;
        let behind = std::mem::take(&mut self.behind);
        let fits = registration.resumed && same && in_window && !behind;
        self.told_confidence = None;
        if fits {
            self.drop_up_to(registration.seq, mirror);
            self.unsent = 0;
        } else {
            self.window.clear();
            self.unsent = 0;
            self.built = if registration.resumed { registration.seq } else { Seq(0) };
            mirror.tell_all(registration.resumed);
            if registration.resumed {
                self.full_repairs += 1;
            } else {
                // A fresh lifetime begins as this in the index.
                self.told_confidence = Some(Confidence::Degraded(DegradedReason::Replaying));
            }
        }
        mirror.tape.start(&registration.holders);
        self.registration = Some(registration);
    }

    /// Everything is told again within the lifetime.
    pub(crate) fn repair(&mut self, mirror: &mut Mirror) {
        self.full_repairs += 1;
        mirror.tell_all(true);
    }

    /// The next batch to send.
    pub(crate) fn next_batch(&mut self, mirror: &mut Mirror, confidence: Confidence) -> Option<&Batch> {
        if self.unsent == self.window.len() && !self.build(mirror, confidence) {
            return None;
        }
        self.unsent += 1;
        self.window.get(self.unsent - 1).map(|s| &s.batch)
    }

    /// Makes the next batch, if there is something to tell.
    #[inline]
    fn build(&mut self, mirror: &mut Mirror, confidence: Confidence) -> bool {
        let Some(registration) = &self.registration else {
            return false;
        };
        if self.window.len() >= MAX_WINDOW {
            self.window_full += 1;
            return false;
        }
        let told = self.told_confidence == Some(confidence);
        if told && !mirror.has_changes() {
            return false;
        }
        let mut changes = mirror.next_changes(&registration.holders);
        // Exact only once all that is known has been told.
        if !told && (confidence != Confidence::Exact || mirror.backlog() == 0) {
            changes.push_confidence(confidence);
            self.told_confidence = Some(confidence);
        }
        let batch = &mut changes.batch;
        if batch.ops.is_empty() {
            return false;
        }
        self.built = Seq(self.built.0 + 1);
        (batch.source, batch.incarnation, batch.seq) = (registration.source, registration.incarnation, self.built);
        self.window.push_back(changes);
        true
    }

    /// The index answered for a batch.
    #[inline]
    pub(crate) fn acked(
        &mut self,
        incarnation: Incarnation,
        seq: Seq,
        outcome: &BatchOutcome,
        mirror: &mut Mirror,
    ) -> Answer {
        if self.registration.as_ref().is_none_or(|r| r.incarnation != incarnation) {
            return Answer::Done;
        }
        match outcome {
            BatchOutcome::Applied { unknown_anchors } if unknown_anchors.is_empty() => {
                self.drop_up_to(seq, mirror);
                Answer::Done
            }
            outcome => self.acked_otherwise(seq, outcome, mirror),
        }
    }

    /// The index didn't simply apply a batch.
    #[inline(never)]
    fn acked_otherwise(&mut self, seq: Seq, outcome: &BatchOutcome, mirror: &mut Mirror) -> Answer {
        match outcome {
            BatchOutcome::Applied { unknown_anchors } => {
                self.tell_again(seq, unknown_anchors, mirror);
                self.drop_up_to(seq, mirror);
                Answer::Done
            }
            BatchOutcome::Duplicate => {
                self.drop_up_to(seq, mirror);
                Answer::Done
            }
            BatchOutcome::OutOfOrder { expected } => {
                let first = self.window.front().map_or(self.built.0 + 1, |s| s.batch.seq.0);
                if expected.0 < first || expected.0 > self.built.0 + 1 {
                    return Answer::Reregister;
                }
                self.drop_up_to(Seq(expected.0 - 1), mirror);
                self.resent += self.unsent as u64;
                self.unsent = 0;
                Answer::Done
            }
            BatchOutcome::Fenced { current } => {
                self.reset(mirror);
                Answer::Fenced(*current)
            }
            BatchOutcome::UnknownSource => Answer::Reregister,
        }
    }

    fn tell_again(&mut self, seq: Seq, positions: &[u32], mirror: &mut Mirror) {
        let Some(sent) = self.window.iter().find(|s| s.batch.seq == seq) else {
            return;
        };
        for position in positions {
            self.unknown_anchors += 1;
            let op = sent.batch.ops.get(*position as usize);
            let tail = sent.tails.get(*position as usize);
            if let (Some(Op::Store { keys, .. }), Some(&tail)) = (op, tail)
                && let Some(last) = keys.last()
            {
                mirror.tell_again(tail, *last);
            }
        }
    }

    #[inline(always)]
    fn drop_up_to(&mut self, seq: Seq, mirror: &mut Mirror) {
        while self.window.front().is_some_and(|s| s.batch.seq <= seq) {
            if let Some(sent) = self.window.pop_front() {
                mirror.tape.reuse(sent);
            }
            self.unsent = self.unsent.saturating_sub(1);
        }
    }

    /// The connection broke: everything without an answer is sent again.
    pub(crate) fn connection_lost(&mut self) {
        self.resent += self.unsent as u64;
        self.unsent = 0;
    }

    pub(crate) fn holders(&self) -> &[HolderId] {
        self.registration.as_ref().map_or(&[], |r| &r.holders)
    }
}
