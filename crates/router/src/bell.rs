//! Says whether anything happened to a thing since it was last looked at.
//!
//! A connection wakes whoever polls it, and also does so while it is being polled: each frame that is taken out of its
//! channel makes room there. Passed on to the task, that would run the task a second time for every chunk of a stream; and each
//! time a task is polled for another reason, the connection would be looked through in vain.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// It is being polled, and nothing happened since that began.
const QUIET: u8 = 0;
/// Something happened that nobody looked at yet.
const RUNG: u8 = 1;
/// The task waits and is to be woken.
const WAITING: u8 = 2;

/// What is woken in place of the task.
pub(crate) struct Bell {
    state: AtomicU8,
    task: AtomicWaker,
}

impl Bell {
    /// One that has rung: nobody looked yet.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            state: AtomicU8::new(RUNG),
            task: AtomicWaker::new(),
        })
    }

    /// Polls with `look`, which gets the bell as its waker, but only where the bell has rung since the last time; at its
    /// next ring `cx`'s task is woken.
    pub(crate) fn poll<T>(
        &self,
        rings: &Waker,
        cx: &Context<'_>,
        mut look: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        if self.is_waiting(cx) {
            return Poll::Pending;
        }
        loop {
            self.look();
            let polled = look(&mut Context::from_waker(rings));
            if polled.is_ready() || self.wait(cx) {
                return polled;
            }
        }
    }

    /// From now on `cx`'s task is woken. Returns whether it has to wait still: nothing happened.
    pub(crate) fn is_waiting(&self, cx: &Context<'_>) -> bool {
        if self.state.load(Ordering::Acquire) != WAITING {
            return false;
        }
        self.task.register(cx.waker());
        // It may have rung before the task was known.
        self.state.load(Ordering::Acquire) == WAITING
    }

    /// Someone looks now, so that ringing wakes nobody.
    pub(crate) fn look(&self) {
        self.state.store(QUIET, Ordering::Release);
    }

    /// Nothing was found: `cx`'s task waits. `false` where it has rung since [`Bell::look`], and must be looked again.
    pub(crate) fn wait(&self, cx: &Context<'_>) -> bool {
        self.task.register(cx.waker());
        let (from, to) = (Ordering::AcqRel, Ordering::Acquire);
        self.state.compare_exchange(QUIET, WAITING, from, to).is_ok()
    }

    /// There may be more to find.
    pub(crate) fn look_again(&self) {
        self.state.store(RUNG, Ordering::Release);
    }

    /// Nobody waits any more; whether it has rung stays known.
    pub(crate) fn leave(&self) {
        drop(self.task.take());
    }

    /// Whether nothing happened since [`Bell::look`].
    pub(crate) fn is_quiet(&self) -> bool {
        self.state.load(Ordering::Acquire) == QUIET
    }

    /// What rings it.
    pub(crate) fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.swap(RUNG, Ordering::AcqRel) == WAITING {
            self.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn only_a_task_that_waits_is_woken_and_only_once() {
        let woken = Arc::new(Woken::default());
        let task = Waker::from(Arc::clone(&woken));
        let cx = Context::from_waker(&task);
        let bell = Bell::new();
        let rings = bell.waker();
        assert!(!bell.is_waiting(&cx), "nobody looked yet");
        bell.look();
        rings.wake_by_ref();
        assert!(!bell.wait(&cx), "it rang while it was looked at");
        bell.look();
        assert!(bell.wait(&cx));
        assert!(bell.is_waiting(&cx), "nothing happened");
        assert_eq!(woken.0.load(Ordering::SeqCst), 0);
        rings.wake_by_ref();
        rings.wake_by_ref();
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        assert!(!bell.is_waiting(&cx));
    }
}
