//! Order of one engine's messages: strict by seq, gaps repaired by replay, restarts told from reordering.

mod recent;

use std::collections::BTreeMap;

use crate::{EventBatch, Millis, RefusalReason, ReplayEnd};
pub(crate) use recent::Recent;

/// Live batches kept while a replay runs: the engine's own replay buffer holds 10,000.
const MAX_BUFFERED: usize = 16 << 10;
/// Tokens in them, 32 MiB.
const MAX_BUFFERED_TOKENS: usize = 8 << 20;
/// A lost tail shows no gap, so an idle stream asks this often whether there is one.
const IDLE_POLL_MS: u64 = 1_000;
/// Replays that are tried for one gap: a batch may be published between the replay and the live message.
const MAX_ATTEMPTS: u32 = 3;
/// Replays that may fail before the stream goes on without: a restarting engine's sockets come up one by one.
const MAX_FAILURES: u32 = 4;
/// Between a replay that failed and the next.
const RETRY_PAUSE_MS: u64 = 250;
/// A replay that gives no answer for this long has failed, whatever the shell says.
const REPLAY_TIMEOUT_MS: u64 = 15_000;

/// What the session found, in order.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Step {
    /// The next batch.
    Apply(EventBatch),
    /// The engine began a new life: forget the old one before anything else.
    NewLife,
    /// Batches before the next are lost for good, or may be.
    Gap {
        /// How many that are known of.
        lost: u64,
        /// Nobody can show any more that it is none.
        firm: bool,
    },
    /// The gap before that wasn't firm was none.
    NoGap,
    /// Ask for a replay.
    RequestReplay {
        /// First wanted seq.
        from: u64,
    },
    /// Something was left out.
    Refused(RefusalReason),
}

/// Whether live batches are applied as they come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// No subscription.
    Away,
    /// They are.
    Live,
    /// They wait for a replay.
    Replaying {
        /// The batch before `next` must come again with equal bytes.
        verify: bool,
        attempts: u32,
        since: Millis,
        /// The last request failed; the next goes out then.
        retry_at: Option<Millis>,
    },
}

/// The state of one stream.
#[derive(Debug)]
pub(crate) struct Session {
    replay: bool,
    phase: Phase,
    /// The next seq to apply.
    next: u64,
    recent: Recent,
    /// Engine time of the last applied batch.
    last_ts: f64,
    buffer: BTreeMap<u64, EventBatch>,
    buffered_tokens: usize,
    /// Replay requests whose end hasn't come; only the last one's end counts.
    outstanding: u32,
    /// Some batch came in answer to the replay that runs.
    answered: bool,
    /// Nobody has shown since the last reconnect that the engine is still the same.
    unverified: bool,
    last_activity: Millis,
    process_start: Option<u64>,
    out: Vec<Step>,
}

impl Session {
    pub(crate) fn new(replay: bool, now: Millis) -> Self {
        Self::resume(replay, now, 0, Recent::default(), 0.0, None)
    }

    pub(crate) fn resume(
        replay: bool,
        now: Millis,
        next: u64,
        recent: Recent,
        last_ts: f64,
        process_start: Option<u64>,
    ) -> Self {
        Self {
            replay,
            phase: Phase::Away,
            next,
            recent,
            last_ts,
            buffer: BTreeMap::new(),
            buffered_tokens: 0,
            outstanding: 0,
            answered: false,
            unverified: false,
            last_activity: now,
            process_start,
            out: Vec::new(),
        }
    }

    /// Swaps what was found, in order, against an empty list.
    pub(crate) fn take_steps(&mut self, into: &mut Vec<Step>) {
        std::mem::swap(&mut self.out, into);
    }

    pub(crate) fn is_replaying(&self) -> bool {
        matches!(self.phase, Phase::Replaying { .. })
    }

    pub(crate) fn is_away(&self) -> bool {
        self.phase == Phase::Away
    }

    pub(crate) fn buffered(&self) -> usize {
        self.buffer.len()
    }

    pub(crate) fn cursor(&self) -> (u64, &Recent, f64, Option<u64>) {
        (self.next, &self.recent, self.last_ts, self.process_start)
    }

    /// The subscription is up: the last applied batch is asked for again, to see whether the engine is still the same.
    pub(crate) fn connected(&mut self, now: Millis) {
        self.forget_buffer();
        self.outstanding = 0;
        self.last_activity = now;
        self.unverified = self.next > 0;
        if self.replay {
            self.start_replay(now, self.unverified);
        } else {
            self.phase = Phase::Live;
        }
    }

    pub(crate) fn disconnected(&mut self) {
        self.forget_buffer();
        self.outstanding = 0;
        self.phase = Phase::Away;
    }

    /// A live message that is to be applied at once, as nearly all are; any other must be given to [`Session::live`].
    #[inline]
    pub(crate) fn takes_next(&mut self, now: Millis, batch: &EventBatch) -> bool {
        let next = self.phase == Phase::Live
            && batch.seq == self.next
            && !(self.replay && self.unverified)
            && self.out.is_empty();
        if next {
            self.last_activity = now;
            self.note(batch);
        }
        next
    }

    /// A live message.
    pub(crate) fn live(&mut self, now: Millis, batch: EventBatch) {
        self.last_activity = now;
        match self.phase {
            Phase::Away => {
                // A message before the shell said so: the subscription is up all the same.
                self.connected(now);
                self.live(now, batch);
            }
            Phase::Replaying { .. } => self.keep(batch),
            Phase::Live if batch.seq < self.next => self.old(now, batch),
            Phase::Live if self.replay && (batch.seq > self.next || self.unverified) => {
                self.keep(batch);
                self.start_replay(now, self.unverified);
            }
            Phase::Live if batch.seq == self.next => self.apply(batch),
            Phase::Live => {
                self.lose_up_to(batch.seq);
                self.apply(batch);
            }
        }
    }

    /// A batch from the replay socket.
    pub(crate) fn replayed(&mut self, now: Millis, batch: EventBatch) {
        self.last_activity = now;
        self.answered = true;
        if let Phase::Replaying { since, .. } = &mut self.phase {
            *since = now;
        }
        if batch.seq < self.next {
            return self.old(now, batch);
        }
        if batch.seq == self.next {
            self.verified();
            self.apply(batch);
        } else if self.outstanding > 1 {
            // An answer to an older request; the newer one will bring what is missing before it.
            self.keep(batch);
        } else {
            self.lose_up_to(batch.seq);
            self.unverified = false;
            self.apply(batch);
        }
        self.drain_buffer();
    }

    /// The replay came to its end.
    pub(crate) fn replay_ended(&mut self, now: Millis, end: ReplayEnd) {
        self.last_activity = now;
        self.outstanding = match end {
            ReplayEnd::Complete => self.outstanding.saturating_sub(1),
            ReplayEnd::Failed => 0,
        };
        if self.outstanding > 0 {
            return;
        }
        let complete = end == ReplayEnd::Complete;
        if complete && self.unverified && !self.answered && self.phase != Phase::Away {
            // The same engine always has its last batch: this one is younger than that.
            return self.new_life(now);
        }
        let Phase::Replaying { verify, attempts, .. } = self.phase else {
            return;
        };
        if !complete && attempts < MAX_FAILURES {
            let retry_at = Some(now.after(RETRY_PAUSE_MS));
            self.phase = Phase::Replaying {
                verify,
                attempts,
                since: now,
                retry_at,
            };
            return;
        }
        if complete {
            self.drain_buffer();
        }
        if !self.buffer.is_empty() && complete && attempts < MAX_ATTEMPTS {
            self.request(now, false, attempts + 1);
        } else {
            if !complete {
                // Whether a tail was lost, or the engine is still the same, can't be known. Without newer batches the
                // idle poll may still find out; with them it is too late.
                let firm = !self.buffer.is_empty();
                if self.unverified || !firm {
                    self.out.push(Step::Gap { lost: 0, firm });
                }
                self.unverified &= !firm;
            }
            self.give_up_gap();
            self.phase = Phase::Live;
        }
    }

    /// The engine's process start time, in any unit.
    pub(crate) fn process_started(&mut self, now: Millis, start: u64) {
        match self.process_start.replace(start) {
            Some(before) if before != start => {
                self.new_life(now);
                self.process_start = Some(start);
            }
            Some(_) | None => {}
        }
    }

    pub(crate) fn tick(&mut self, now: Millis) {
        match self.phase {
            Phase::Away => {}
            Phase::Live => {
                if self.replay && self.outstanding == 0 && now.since(self.last_activity) >= IDLE_POLL_MS {
                    self.last_activity = now;
                    self.ask(self.unverified);
                } else if self.outstanding > 0 && now.since(self.last_activity) >= REPLAY_TIMEOUT_MS {
                    self.outstanding = 0;
                }
            }
            Phase::Replaying {
                verify,
                attempts,
                retry_at: Some(at),
                ..
            } => {
                if now >= at {
                    self.request(now, verify, attempts + 1);
                }
            }
            Phase::Replaying {
                since, retry_at: None, ..
            } => {
                if now.since(since) >= REPLAY_TIMEOUT_MS {
                    self.replay_ended(now, ReplayEnd::Failed);
                }
            }
        }
    }

    /// Starts a replay from the gap, or, to verify, from the last applied batch.
    fn start_replay(&mut self, now: Millis, verify: bool) {
        self.request(now, verify, 1);
    }

    fn request(&mut self, now: Millis, verify: bool, attempts: u32) {
        self.phase = Phase::Replaying {
            verify,
            attempts,
            since: now,
            retry_at: None,
        };
        self.ask(verify);
    }

    /// Asks for everything from the next batch on, or, to verify, from the last applied one.
    fn ask(&mut self, verify: bool) {
        self.answered = false;
        self.outstanding += 1;
        let from = if verify { self.next.saturating_sub(1) } else { self.next };
        self.out.push(Step::RequestReplay { from });
    }

    fn verified(&mut self) {
        if std::mem::take(&mut self.unverified) {
            self.out.push(Step::NoGap);
        }
        if let Phase::Replaying { verify, .. } = &mut self.phase {
            *verify = false;
        }
    }

    /// A batch whose seq was applied before: a duplicate, a late one, or the sign of a new life.
    fn old(&mut self, now: Millis, batch: EventBatch) {
        match self.recent.content(batch.seq) {
            Some(content) if content == batch.content => {
                let expected = self.unverified || self.is_replaying();
                self.verified();
                // An idle poll or a verification asks for a batch that is known: no refusal.
                if !expected {
                    self.out.push(Step::Refused(RefusalReason::Duplicate));
                }
            }
            Some(_) => self.new_life_from(now, batch),
            // Too old to compare: made later than the last one it can only be of a new life.
            None if batch.ts > self.last_ts && self.next > 0 => self.new_life_from(now, batch),
            None => self.out.push(Step::Refused(RefusalReason::Duplicate)),
        }
    }

    fn new_life_from(&mut self, now: Millis, batch: EventBatch) {
        self.new_life(now);
        match self.phase {
            Phase::Replaying { .. } => self.keep(batch),
            Phase::Away | Phase::Live => {
                self.lose_up_to(batch.seq);
                self.apply(batch);
            }
        }
    }

    /// Forgets the old life. With a replay socket everything of the new one is asked for.
    fn new_life(&mut self, now: Millis) {
        self.out.push(Step::NewLife);
        self.next = 0;
        self.recent = Recent::default();
        self.last_ts = 0.0;
        self.process_start = None;
        self.unverified = false;
        if self.phase != Phase::Away {
            if self.replay {
                self.start_replay(now, false);
            } else {
                self.phase = Phase::Live;
            }
        }
    }

    fn lose_up_to(&mut self, seq: u64) {
        if seq > self.next {
            self.out.push(Step::Gap {
                lost: seq - self.next,
                firm: true,
            });
            self.next = seq;
        }
    }

    fn apply(&mut self, batch: EventBatch) {
        self.note(&batch);
        self.out.push(Step::Apply(batch));
    }

    /// A batch is the last that was applied.
    #[inline]
    fn note(&mut self, batch: &EventBatch) {
        self.next = batch.seq.saturating_add(1);
        self.recent.push(batch.seq, batch.content);
        self.last_ts = batch.ts;
    }

    /// Keeps a live batch until the replay has brought what comes before it.
    fn keep(&mut self, batch: EventBatch) {
        let tokens = batch.weight();
        if self.buffer.len() >= MAX_BUFFERED || self.buffered_tokens + tokens > MAX_BUFFERED_TOKENS {
            self.out.push(Step::Refused(RefusalReason::BufferFull));
            return;
        }
        self.buffered_tokens += tokens;
        if let Some(before) = self.buffer.insert(batch.seq, batch) {
            self.buffered_tokens -= before.weight();
        }
    }

    /// Applies what follows directly.
    fn drain_buffer(&mut self) {
        while let Some(entry) = self.buffer.first_entry() {
            if *entry.key() > self.next {
                return;
            }
            let batch = entry.remove();
            self.buffered_tokens -= batch.weight();
            if batch.seq == self.next {
                self.apply(batch);
            }
        }
    }

    /// No replay brings what is missing: go on without it.
    fn give_up_gap(&mut self) {
        while let Some((&seq, _)) = self.buffer.first_key_value() {
            self.lose_up_to(seq);
            self.drain_buffer();
        }
    }

    fn forget_buffer(&mut self) {
        self.buffer = BTreeMap::new();
        self.buffered_tokens = 0;
    }
}
