//! CPU time of a process, in nanoseconds, from the scheduler's own accounting.

use std::time::Duration;

use anyhow::Context;

/// CPU time that the living threads of `pid` have used, all in all.
pub fn of_process(pid: u32) -> anyhow::Result<Duration> {
    let folder = format!("/proc/{pid}/task");
    let mut total = 0u64;
    for task in std::fs::read_dir(&folder).with_context(|| format!("reading {folder}; is the process gone?"))? {
        // A thread may end between the listing and the reading.
        let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) else {
            continue;
        };
        total += text
            .split_whitespace()
            .next()
            .and_then(|ns| ns.parse::<u64>().ok())
            .unwrap_or(0);
    }
    Ok(Duration::from_nanos(total))
}
