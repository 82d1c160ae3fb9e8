//! Runs a measurement in a forked process: every index begins with the same heap, and what it leaves behind goes.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::FromRawFd;

use anyhow::{Context, bail};
use serde_json::Value;

/// Longest time that one measurement may take.
const TIMEOUT_S: u32 = 400;

/// Runs `measure` in a child and returns what it gives.
pub fn run(measure: impl FnOnce() -> Value) -> anyhow::Result<Value> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for the two descriptors.
    if unsafe { libc::pipe(ends.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error()).context("making a pipe");
    }
    // SAFETY: this process has one thread when it measures: threads are only started, and ended, in children.
    let child = unsafe { libc::fork() };
    // SAFETY: both descriptors are ours, and each process closes the end that it doesn't use by dropping it.
    let (mut from, mut to) = unsafe { (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1])) };
    match child {
        -1 => Err(std::io::Error::last_os_error()).context("forking"),
        0 => {
            drop(from);
            // SAFETY: sets a timer that ends this process.
            unsafe { libc::alarm(TIMEOUT_S) };
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(measure));
            let told = outcome.is_ok_and(|value| to.write_all(value.to_string().as_bytes()).is_ok());
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!told)) }
        }
        _ => {
            drop(to);
            let mut text = String::new();
            let read = from.read_to_string(&mut text);
            let mut status = 0;
            // SAFETY: waits for the child that was just started.
            unsafe { libc::waitpid(child, &mut status, 0) };
            read.context("reading from the measuring process")?;
            if status != 0 {
                bail!("the measuring process ended with status {status:#x} (0xe: it took longer than {TIMEOUT_S} s)");
            }
            serde_json::from_str(&text).context("reading what was measured")
        }
    }
}
