//! Lanes: one single-threaded runtime per core, each with its own connections to clients and to engines.
//!
//! A request lives on the lane of its client's connection from its first byte to its last: no lock is contended, no
//! other thread is woken and no cache line moves to another core on its way.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

thread_local! {
    static LANE: Cell<usize> = const { Cell::new(0) };
}

/// Lanes that a configuration may ask for, at most.
pub(crate) const LANES_MAX: usize = 256;

/// Time between two beats: less than a client has for a request's head.
const BEAT: Duration = Duration::from_secs(2);

/// Keeps a timer that is due before those of requests' heads. Whoever arms a timer that is due before all others wakes the
/// runtime's thread by a system call, even from that thread itself: each request's head would cost one.
async fn beat() {
    let mut beats = tokio::time::interval(BEAT);
    loop {
        beats.tick().await;
    }
}

/// The lane that the current thread runs; 0 where it runs none.
pub(crate) fn current() -> usize {
    LANE.get()
}

/// The running lanes; they end when this is dropped.
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    end: CancellationToken,
}

struct Lane {
    handle: Handle,
    connections: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

/// A connection's place on a lane.
pub(crate) struct Seat {
    connections: Arc<AtomicUsize>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How many lanes `asked` for gives; 0 asks for one per core.
pub(crate) fn count(asked: usize) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if asked == 0 { cores().min(LANES_MAX) } else { asked }
}

impl Lanes {
    /// Starts `count` lanes.
    ///
    /// # Errors
    /// Where the system gives no more threads or descriptors.
    pub(crate) fn start(count: usize) -> std::io::Result<Self> {
        let end = CancellationToken::new();
        let mut lanes = Vec::with_capacity(count);
        // Lane 0 stands for every other thread.
        for number in 1..=count {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let handle = runtime.handle().clone();
            let until = end.clone();
            let thread = std::thread::Builder::new()
                .name(format!("lane-{number}"))
                .spawn(move || {
                    LANE.set(number);
                    runtime.spawn(beat());
                    runtime.block_on(until.cancelled());
                    // Encodes that run beside a lane aren't waited for.
                    runtime.shutdown_background();
                })?;
            lanes.push(Lane {
                handle,
                connections: Arc::new(AtomicUsize::new(0)),
                thread: Some(thread),
            });
        }
        Ok(Self { lanes, end })
    }

    /// The lane with the fewest connections, and a seat on it.
    pub(crate) fn seat(&self) -> (&Handle, Seat) {
        let lane = self
            .lanes
            .iter()
            .min_by_key(|lane| lane.connections.load(Ordering::Relaxed))
            .expect("there is at least one lane");
        lane.connections.fetch_add(1, Ordering::Relaxed);
        let seat = Seat {
            connections: Arc::clone(&lane.connections),
        };
        (&lane.handle, seat)
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.end.cancel();
        for lane in &mut self.lanes {
            if let Some(thread) = lane.thread.take() {
                // A lane never blocks, so this ends at once; a panic of its own has been reported already.
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_spread_over_lanes_and_stay_on_theirs() {
        let lanes = Lanes::start(3).unwrap();
        let mut seats = Vec::new();
        let mut seen = Vec::new();
        for _ in 0..6 {
            let (handle, seat) = lanes.seat();
            seats.push(seat);
            seen.push(
                handle
                    .spawn(async { (current(), tokio::spawn(async { current() }).await.unwrap()) })
                    .await
                    .unwrap(),
            );
        }
        assert!(seen.iter().all(|(here, spawned)| here == spawned && *here > 0));
        let mut counts = [0; 4];
        seen.iter().for_each(|(here, _)| counts[*here] += 1);
        assert_eq!(counts, [0, 2, 2, 2]);
        seats.remove(1);
        let (handle, _seat) = lanes.seat();
        assert_eq!(handle.spawn(async { current() }).await.unwrap(), seen[1].0);
        assert_eq!(current(), 0);
    }
}
