//! An engine's own load report, and how much of it no reservation explains.

use std::collections::VecDeque;

use crate::Micros;

/// A report older than this says nothing any more; agents read engines every second at the latest.
pub const REPORT_LIFE: Micros = Micros::from_ms(3_000);

/// A report may have been read this much earlier or later than it says, so the reservations around it may explain it.
const SLACK: Micros = Micros::from_ms(100);

/// Changes of the own request count that are remembered to explain a report that arrives later.
const HISTORY: usize = 64;

/// What an engine says about itself.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct LoadReport {
    /// Requests in its batch.
    pub running: u32,
    /// Requests in its queue.
    pub waiting: u32,
    /// Pinned part of its KV capacity, 0 to 1.
    pub kv_usage: f32,
    /// Since the figures were read.
    pub age: Micros,
}

/// What remains of the last report once reservations are taken off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Beyond {
    pub(super) read_at: Micros,
    pub(super) running_beyond: u32,
    pub(super) waiting_beyond: u32,
    pub(super) kv_usage: u32,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Reported {
    last: Option<Beyond>,
    /// (since, own requests), oldest first.
    history: VecDeque<(Micros, u32)>,
}

impl Reported {
    /// Remembers the own request count from now on.
    pub(super) fn on_in_flight(&mut self, now: Micros, requests: u32) {
        match self.history.back_mut() {
            Some((at, count)) if *at == now => *count = (*count).max(requests),
            _ => {
                if self.history.len() == HISTORY {
                    self.history.pop_front();
                }
                self.history.push_back((now, requests));
            }
        }
    }

    /// Takes a report; what own and others' reservations around its reading explain isn't counted again.
    pub(super) fn take(&mut self, now: Micros, report: &LoadReport, others: u32) {
        let read_at = Micros(now.0.saturating_sub(report.age.0));
        if self.last.is_some_and(|last| last.read_at > read_at) {
            return;
        }
        let (from, to) = (Micros(read_at.0.saturating_sub(SLACK.0)), read_at.plus(SLACK));
        let mut before = self.history.front().map_or(0, |&(_, count)| count);
        let mut own = 0;
        for &(at, count) in &self.history {
            if at <= from {
                before = count;
            } else if at <= to {
                own = own.max(count);
            }
        }
        let explained = own.max(before).saturating_add(others);
        // Reservations explain running requests first, since those had the time to be reserved and reported.
        let running_beyond = report.running.saturating_sub(explained);
        let left = explained.saturating_sub(report.running);
        let usage = if report.kv_usage.is_finite() {
            report.kv_usage.clamp(0.0, 1.0)
        } else {
            0.0
        };
        self.last = Some(Beyond {
            read_at,
            running_beyond,
            waiting_beyond: report.waiting.saturating_sub(left),
            kv_usage: (usage * 1024.0) as u32,
        });
    }

    /// The last report while it counts.
    pub(super) fn fresh(&self, now: Micros) -> Option<Beyond> {
        self.last.filter(|last| now.since(last.read_at) <= REPORT_LIFE)
    }

    pub(super) fn waiting_beyond(&self) -> u32 {
        self.last.map_or(0, |last| last.waiting_beyond)
    }
}
