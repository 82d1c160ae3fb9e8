//! Coarse alarms that cost a waiting request next to nothing.
//!
//! Arming a timer that is due before all others wakes the thread that sleeps until them: a system call for every
//! request whose answer is expected soon. Here all alarms of a router share one timer, which is set anew only where the
//! next one is due clearly earlier.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Alarms ring up to this much late.
const COARSE: Duration = Duration::from_millis(10);
/// Entries below which taken-back ones aren't looked for.
const FORGET_LEAST: usize = 4_096;

/// All alarms of a router.
#[derive(Default)]
pub(crate) struct Alarms {
    set: Mutex<Set>,
    sooner: Notify,
}

#[derive(Default)]
struct Set {
    /// Taken-back ones stay until they are due or outnumber the others: there are at most [`FORGET_LEAST`], or twice as
    /// many as requests were in flight.
    due: BinaryHeap<Reverse<Due>>,
    /// Alarms that were left when taken-back ones were last forgotten.
    left: usize,
    /// What the shared timer is set to; `None` while it isn't.
    armed: Option<Instant>,
}

struct Due {
    at: Instant,
    alarm: Weak<Notify>,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl Alarms {
    /// Rings `after` from now; dropping it takes it back.
    pub(crate) fn after(&self, after: Duration) -> Arc<Notify> {
        let alarm = Arc::new(Notify::new());
        let Some(at) = Instant::now().checked_add(after) else {
            return alarm;
        };
        let mut set = self.set.lock();
        if set.due.len() >= FORGET_LEAST.max(set.left * 2) {
            set.due.retain(|Reverse(due)| due.alarm.strong_count() > 0);
            set.left = set.due.len();
        }
        set.due.push(Reverse(Due {
            at,
            alarm: Arc::downgrade(&alarm),
        }));
        let sooner = set.armed.is_none_or(|armed| at + COARSE <= armed);
        drop(set);
        if sooner {
            self.sooner.notify_one();
        }
        alarm
    }

    /// Rings alarms for as long as the router lives.
    pub(crate) async fn ring(&self) {
        loop {
            let next = self.take_due(Instant::now());
            let sooner = self.sooner.notified();
            match next {
                Some(at) => {
                    // Either way the next round looks at what is due.
                    let _ = tokio::time::timeout_at((at + COARSE).into(), sooner).await;
                }
                None => sooner.await,
            }
        }
    }

    /// Rings what is due, and says when the next one is.
    fn take_due(&self, now: Instant) -> Option<Instant> {
        let mut set = self.set.lock();
        while let Some(Reverse(first)) = set.due.peek() {
            match first.alarm.upgrade() {
                Some(_) if first.at > now => break,
                Some(alarm) => alarm.notify_one(),
                None => {}
            }
            set.due.pop();
        }
        set.armed = set.due.peek().map(|Reverse(first)| first.at);
        set.armed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn alarms_ring_once_they_are_due_and_taken_back_ones_are_forgotten() {
        let alarms = Arc::new(Alarms::default());
        let ringing = Arc::clone(&alarms);
        let task = tokio::spawn(async move { ringing.ring().await });
        let begun = Instant::now();
        let late = alarms.after(Duration::from_secs(3_600));
        let soon = alarms.after(Duration::from_millis(30));
        drop(alarms.after(Duration::from_millis(20)));
        tokio::time::timeout(Duration::from_secs(10), soon.notified())
            .await
            .expect("it rings");
        assert!(begun.elapsed() >= Duration::from_millis(30));
        assert_eq!(alarms.set.lock().due.len(), 1, "only the late one is left");
        drop(late);
        task.abort();
    }

    #[test]
    fn taken_back_alarms_dont_pile_up_however_late_they_are_due() {
        let alarms = Alarms::default();
        let kept: Vec<_> = (0..100).map(|_| alarms.after(Duration::from_secs(3_600))).collect();
        for _ in 0..100_000 {
            drop(alarms.after(Duration::from_secs(3_600)));
        }
        assert!(alarms.set.lock().due.len() <= FORGET_LEAST);
        assert!(
            kept.iter().all(|alarm| Arc::weak_count(alarm) == 1),
            "those that are waited for are still set"
        );
    }

    #[test]
    fn an_alarm_that_isnt_clearly_sooner_sets_no_timer() {
        let alarms = Alarms::default();
        let _first = alarms.after(Duration::from_millis(100));
        let now = Instant::now();
        let armed = alarms.take_due(now).unwrap();
        for _ in 0..100 {
            let _ = alarms.after(Duration::from_millis(150));
        }
        assert_eq!(alarms.set.lock().armed, Some(armed));
        assert_eq!(
            alarms.take_due(now + Duration::from_millis(200)),
            None,
            "the first is rung, the others were taken back"
        );
    }
}
