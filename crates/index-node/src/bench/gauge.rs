//! CPU and memory of processes, and how busy the machine is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, clock_gettime};

/// Pause between two calibration loops and two looks at memory.
const PAUSE: Duration = Duration::from_millis(25);
/// Turns of the calibration loop: about a millisecond.
const TURNS: u64 = 500_000;

fn clock(id: ClockId) -> Duration {
    let now = clock_gettime(id);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// CPU that all threads of a process have had; nothing where the system doesn't say.
pub(super) fn cpu_of(pid: u32) -> Duration {
    let line = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Fields 14 and 15, user and system time in ticks; the second one, the name, may hold anything and ends with a bracket.
    let fields = line.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    let ticks: u64 = fields
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    Duration::from_secs_f64(ticks as f64 / clock_ticks_per_second() as f64)
}

/// CPU that this thread has had.
pub(super) fn thread_cpu() -> Duration {
    clock(ClockId::ThreadCPUTime)
}

/// How much longer than its CPU time a fixed piece of work takes.
pub(super) struct Slowdown {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<f64>,
}

impl Slowdown {
    pub(super) fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let thread = std::thread::spawn(move || {
            let (mut wall, mut cpu) = (Duration::ZERO, Duration::ZERO);
            while !seen.load(Ordering::Relaxed) {
                let (begun, before) = (Instant::now(), thread_cpu());
                let turned = (0..TURNS).fold(0x9e37_79b9_7f4a_7c15u64, |x, i| {
                    (x ^ i).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(17)
                });
                std::hint::black_box(turned);
                wall += begun.elapsed();
                cpu += thread_cpu().saturating_sub(before);
                std::thread::sleep(PAUSE);
            }
            wall.as_secs_f64() / cpu.as_secs_f64().max(1e-9)
        });
        Self { stop, thread }
    }

    /// The slowdown until now.
    pub(super) fn stop(self) -> f64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or(1.0)
    }
}

/// Bytes of memory of a process, and what its children copied of it; 0 where the system doesn't say.
fn memory_bytes(pid: u32) -> u64 {
    let own = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mut sum = field_kib(&own, "VmRSS:");
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace() {
            let maps = std::fs::read_to_string(format!("/proc/{child}/smaps_rollup")).unwrap_or_default();
            sum += field_kib(&maps, "Private_Dirty:");
        }
    }
    sum << 10
}

fn field_kib(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// The most memory of a process while `work` is done, with what its children copied of it, against before.
pub(super) async fn growth<T>(pid: u32, work: impl Future<Output = T>) -> (T, f64) {
    let before = memory_bytes(pid).max(1);
    let stop = Arc::new(AtomicBool::new(false));
    let seen = stop.clone();
    let watching = tokio::task::spawn_blocking(move || {
        let mut most = before;
        while !seen.load(Ordering::Relaxed) {
            most = most.max(memory_bytes(pid));
            std::thread::sleep(PAUSE);
        }
        most
    });
    let done = work.await;
    stop.store(true, Ordering::Relaxed);
    let most = watching.await.unwrap_or(before);
    (done, most as f64 / before as f64)
}
