//! A bar on standard error, where a person watches and the runs take their time.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Runs shorter than this show no bar.
const SILENT: Duration = Duration::from_secs(2);
/// Pause between two drawings.
const PAUSE: Duration = Duration::from_millis(200);
/// Characters of the bar.
const WIDTH: usize = 40;

/// How far all runs are.
pub struct Progress {
    all: usize,
    done: AtomicUsize,
    started: Instant,
    drawn: Mutex<Option<Instant>>,
    shown: bool,
}

impl Progress {
    /// A bar over `all` requests.
    pub fn new(all: usize) -> Self {
        Self {
            all: all.max(1),
            done: AtomicUsize::new(0),
            started: Instant::now(),
            drawn: Mutex::new(None),
            shown: std::io::stderr().is_terminal(),
        }
    }

    /// `more` requests have come.
    pub fn add(&self, more: usize) {
        let done = self.done.fetch_add(more, Ordering::Relaxed) + more;
        if !self.shown || self.started.elapsed() < SILENT {
            return;
        }
        let Ok(mut drawn) = self.drawn.try_lock() else { return };
        if drawn.is_some_and(|at| at.elapsed() < PAUSE) {
            return;
        }
        *drawn = Some(Instant::now());
        let filled = (done * WIDTH / self.all).min(WIDTH);
        let left = self.started.elapsed().as_secs_f64() * (self.all.saturating_sub(done)) as f64 / done.max(1) as f64;
        let _ = write!(
            std::io::stderr().lock(),
            "\r[{}{}] {:3} %, about {left:.0} s left ",
            "#".repeat(filled),
            " ".repeat(WIDTH - filled),
            done * 100 / self.all
        );
    }

    /// Takes the bar away.
    pub fn end(&self) {
        let drawn = self.drawn.lock().map(|drawn| drawn.is_some()).unwrap_or(false);
        if drawn {
            let _ = write!(std::io::stderr().lock(), "\r{}\r", " ".repeat(WIDTH + 32));
        }
    }
}
