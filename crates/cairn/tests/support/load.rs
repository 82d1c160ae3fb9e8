//! A steady open load of chat requests over all routers, by clients that retry another router when one can't be reached.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::{chat, prose};

/// Shared starts that requests draw from.
pub const STARTS: u64 = 40;
/// Words in a shared start, about 1.6 tokens each.
const START_WORDS: usize = 320;
/// Threads that send; enough for the rate at a second per answer.
const SENDERS: u64 = 64;

#[derive(Default)]
struct Counts {
    sent: AtomicU64,
    answered: AtomicU64,
    retried: AtomicU64,
    failures: Mutex<Vec<String>>,
}

/// A running load.
pub struct Load {
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
    senders: Vec<JoinHandle<()>>,
}

/// What came of it.
#[derive(Debug)]
pub struct Tally {
    pub sent: u64,
    pub answered: u64,
    pub retried: u64,
    pub failures: Vec<String>,
}

impl Load {
    /// Sends `rate` requests a second over `routers` until stopped.
    pub fn start(routers: Vec<String>, rate: u64) -> Self {
        let counts = Arc::new(Counts::default());
        let stop = Arc::new(AtomicBool::new(false));
        let begun = Instant::now();
        let gap = Duration::from_secs(1) / u32::try_from(rate).unwrap();
        let senders = (0..SENDERS)
            .map(|s| {
                let (counts, stop, routers) = (counts.clone(), stop.clone(), routers.clone());
                std::thread::spawn(move || {
                    for turn in 0.. {
                        let n = turn * SENDERS + s;
                        let due = begun + gap * u32::try_from(n).unwrap();
                        while Instant::now() < due && !stop.load(Ordering::Relaxed) {
                            std::thread::sleep(
                                due.saturating_duration_since(Instant::now())
                                    .min(Duration::from_millis(50)),
                            );
                        }
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        send(&routers, n, &counts);
                    }
                })
            })
            .collect();
        Self { counts, stop, senders }
    }

    pub fn answered(&self) -> u64 {
        self.counts.answered.load(Ordering::Relaxed)
    }

    /// Ends the load, waits for running requests, and says what came of all.
    pub fn end(self) -> Tally {
        self.stop.store(true, Ordering::Relaxed);
        for sender in self.senders {
            sender.join().unwrap();
        }
        Tally {
            sent: self.counts.sent.load(Ordering::Relaxed),
            answered: self.counts.answered.load(Ordering::Relaxed),
            retried: self.counts.retried.load(Ordering::Relaxed),
            failures: std::mem::take(&mut self.counts.failures.lock().unwrap()),
        }
    }
}

fn send(routers: &[String], n: u64, counts: &Counts) {
    counts.sent.fetch_add(1, Ordering::Relaxed);
    let streamed = n.is_multiple_of(4);
    let start = prose(n.wrapping_mul(2_654_435_761) % STARTS + 1_000, START_WORDS);
    let body = chat(&start, &format!("request {n}"), streamed);
    let mut failure = String::new();
    for attempt in 0..routers.len() * 2 {
        let router = &routers[(n as usize + attempt) % routers.len()];
        match try_once(router, &body, streamed) {
            Ok(()) => {
                counts.answered.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Err(Failed::Router(why)) => {
                counts.retried.fetch_add(1, Ordering::Relaxed);
                failure = why;
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(Failed::Answer(why)) => {
                failure = why;
                break;
            }
        }
    }
    counts.failures.lock().unwrap().push(format!("request {n}: {failure}"));
}

enum Failed {
    /// The router couldn't be reached, or its connection broke: its client tries another one.
    Router(String),
    /// A live router answered badly.
    Answer(String),
}

fn try_once(router: &str, body: &serde_json::Value, streamed: bool) -> Result<(), Failed> {
    let agent = crate::support::agent();
    let response = agent.post(format!("{router}/v1/chat/completions")).send_json(body);
    let response = response.map_err(|e| Failed::Router(format!("{router}: {e}")))?;
    let status = response.status();
    let mut text = String::new();
    let read = response.into_body().into_reader().read_to_string(&mut text);
    read.map_err(|e| Failed::Router(format!("{router}: the answer broke: {e}")))?;
    if status != 200 {
        return Err(Failed::Answer(format!("{router} answered {status}: {text}")));
    }
    if streamed && !text.trim_end().ends_with("data: [DONE]") {
        return Err(Failed::Answer(format!(
            "{router}: the stream ended without [DONE]: {}",
            &text[text.len().saturating_sub(300)..]
        )));
    }
    Ok(())
}
