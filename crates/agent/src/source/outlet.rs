//! What goes out to the index: batches with their sampled spans, and the core's figures as metrics.

use cairn_index::{DegradedReason, Incarnation, Seq};
use cairn_ingest::{Millis, Source, SourceStats};
use cairn_telemetry::propagation;
use tokio::sync::mpsc::{self, error::TrySendError};
use tracing::Span;

use super::Surroundings;
use crate::metrics::{Growth, RefusalGrowth, SourceLabel};
use crate::uplink::Outgoing;

pub(super) struct Outlet {
    /// Stream that batches are made for.
    pub(super) stream: u64,
    batches: mpsc::Sender<Outgoing>,
    /// Batches between two spans.
    span_every: u64,
    sent: u64,
    /// The last batch made.
    pub(super) made: Option<(Incarnation, Seq)>,
    /// The batch whose span is open until its acknowledgement.
    traced: Option<(Incarnation, Seq, Span)>,
    grown: Grown,
}

#[derive(Default)]
struct Grown {
    refused: RefusalGrowth,
    messages: Growth,
    events: Growth,
    gaps: Growth,
    restarts: Growth,
    lost: Growth,
    foreign_rank: Growth,
    resent: Growth,
    window_full: Growth,
    purges: Growth,
    suspects_confirmed: Growth,
    suspects_cut: Growth,
    suspects_dropped: Growth,
}

/// At the highest sampling one batch in this many gets a span: a busy source makes hundreds a second.
const SPAN_EVERY_LEAST: u64 = 8;

impl Outlet {
    pub(super) fn new(around: &Surroundings) -> Self {
        let ratio = around.sample_ratio.clamp(0.0, 1.0);
        let span_every = if ratio > 0.0 {
            (SPAN_EVERY_LEAST as f64 / ratio) as u64
        } else {
            0
        };
        Self {
            stream: 0,
            batches: around.uplink.outgoing().clone(),
            span_every,
            sent: 0,
            made: None,
            traced: None,
            grown: Grown::default(),
        }
    }

    /// Sends what the core's window allows and the queue takes; `true` where something was sent.
    pub(super) fn send(&mut self, core: &mut Source, now: Millis) -> bool {
        let mut any = false;
        loop {
            let permit = match self.batches.try_reserve() {
                Ok(permit) => permit,
                // The next tick tries again; the core keeps what it has.
                Err(TrySendError::Full(()) | TrySendError::Closed(())) => return any,
            };
            let Some(batch) = core.next_batch(now) else { return any };
            let batch = batch.clone();
            let traced = (self.span_every > 0 && self.sent.is_multiple_of(self.span_every)).then(|| {
                let name = core.config().pool.as_str();
                tracing::info_span!(
                    "ingest.batch",
                    source = batch.source.0,
                    incarnation = batch.incarnation.0,
                    seq = batch.seq.0,
                    ops = batch.ops.len(),
                    pool = name,
                    outcome = tracing::field::Empty,
                )
            });
            self.sent += 1;
            self.made = self.made.max(Some((batch.incarnation, batch.seq)));
            let traceparent = traced.as_ref().and_then(propagation::of_span).filter(|c| c.sampled);
            let outgoing = Outgoing {
                stream: self.stream,
                traceparent: traceparent
                    .map(propagation::TraceContext::to_header)
                    .unwrap_or_default(),
                batch,
            };
            if let (Some(span), Some(_)) = (traced, traceparent) {
                self.traced = Some((outgoing.batch.incarnation, outgoing.batch.seq, span));
            }
            permit.send(outgoing);
            any = true;
        }
    }

    /// A batch was answered: its span ends.
    pub(super) fn acked(&mut self, incarnation: Incarnation, seq: Seq, outcome: &'static str) {
        let ended = self.traced.take_if(|(i, s, _)| *i == incarnation && *s == seq);
        if let Some((_, _, span)) = ended {
            span.record("outcome", outcome);
        }
    }

    /// The core's figures as metrics.
    pub(super) fn publish(
        &mut self,
        stats: &SourceStats,
        reason: Option<DegradedReason>,
        label: &SourceLabel,
        around: &Surroundings,
    ) {
        let m = &around.metrics;
        self.grown.refused.follow(&label.source, &stats.refused, m);
        self.grown
            .messages
            .follow(stats.messages, &m.messages.get_or_create(label));
        self.grown.events.follow(stats.events, &m.events.get_or_create(label));
        self.grown.gaps.follow(stats.gaps, &m.gaps.get_or_create(label));
        self.grown
            .restarts
            .follow(stats.restarts, &m.restarts.get_or_create(label));
        self.grown.lost.follow(stats.lost_batches, &m.lost.get_or_create(label));
        self.grown
            .foreign_rank
            .follow(stats.foreign_rank, &m.foreign_rank.get_or_create(label));
        self.grown.resent.follow(stats.resent, &m.resent.get_or_create(label));
        self.grown
            .window_full
            .follow(stats.window_full, &m.window_full.get_or_create(label));
        self.grown.purges.follow(stats.purges, &m.purges.get_or_create(label));
        self.grown
            .suspects_confirmed
            .follow(stats.suspects_confirmed, &m.suspects_confirmed.get_or_create(label));
        self.grown
            .suspects_cut
            .follow(stats.suspects_cut, &m.suspects_cut.get_or_create(label));
        self.grown
            .suspects_dropped
            .follow(stats.suspects_dropped, &m.suspects_dropped.get_or_create(label));
        let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        m.suspects.get_or_create(label).set(gauge(stats.suspects));
        m.quarantined.get_or_create(label).set(gauge(stats.quarantined));
        m.mirror_blocks.get_or_create(label).set(gauge(stats.blocks));
        m.outbox.get_or_create(label).set(gauge(stats.outbox));
        m.unacked.get_or_create(label).set(gauge(stats.unacked));
        m.mirror_bytes.get_or_create(label).set(gauge(stats.mirror_bytes));
        m.exact.get_or_create(label).set(i64::from(reason.is_none()));
        m.silent
            .get_or_create(label)
            .set(i64::from(reason == Some(DegradedReason::Silent)));
        m.unrouted.set(gauge(around.hubs.unrouted()));
    }
}
