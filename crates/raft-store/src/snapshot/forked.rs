//! A file written by a forked copy of this process, which sees memory as it was at one instant while this one goes on.
//!
//! Pages are shared until this process changes them, so what it costs is a copy of the page tables and of the pages
//! that change until the file is written. The writer has no thread but one, keeps no file open but the one it writes,
//! takes no signal, and dies with this process.
#![expect(
    unsafe_code,
    reason = "fork and what must follow it have no safe form; the copy touches only its own memory and one file, and ends \
              by `_exit`. Its allocations are sound since glibc, musl and jemalloc make their locks whole again after a \
              fork"
)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// A writer that takes longer is ended: a hundred million memberships take about ten seconds on a slow disk.
const PATIENCE: Duration = Duration::from_secs(300);
/// First and longest pause between two looks at the writer.
const LOOK_FIRST: Duration = Duration::from_millis(1);
const LOOK_LAST: Duration = Duration::from_millis(20);
/// Number of the file in the writer.
const FILE: libc::c_int = 3;
/// System errors up to here are exit codes of the writer.
const ERRORS_MAX: i32 = 200;
/// Exit codes of failures without a system error, and of a panic.
const OTHER: i32 = 201;
const PANICKED: i32 = 202;

/// A writer at work; ended when it is dropped unheard.
pub(super) struct Writer {
    pid: libc::pid_t,
    ended: bool,
}

/// Forks a writer of `file`; `write` runs in it alone, and sees everything as it is now.
pub(super) fn spawn(file: &File, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<Writer> {
    let parent = std::process::id();
    let number = file.as_raw_fd();
    // SAFETY: the sets are initialised by sigfillset and pthread_sigmask before they are read. All signals are held back
    // over the fork, so that no handler of this process runs in the copy.
    let before = unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    // SAFETY: the copy runs `child` only, which never returns.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        child(parent, number, write);
    }
    let failed = io::Error::last_os_error();
    // SAFETY: `before` is what this thread had.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    match pid {
        -1 => Err(failed),
        pid => Ok(Writer { pid, ended: false }),
    }
}

fn child(parent: u32, number: libc::c_int, write: impl FnOnce(&mut File) -> io::Result<()>) -> ! {
    // SAFETY: plain system calls. Nothing of this process's memory that owns a file is used or dropped any more, so
    // closing them all, and taking FILE over, is sound; locks on them stay with the parent.
    let file = unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid().unsigned_abs() != parent {
            libc::_exit(OTHER);
        }
        if number != FILE && libc::dup2(number, FILE) != FILE {
            libc::_exit(OTHER);
        }
        libc::syscall(libc::SYS_close_range, FILE + 1, libc::c_int::MAX, 0);
        File::from_raw_fd(FILE)
    };
    let mut file = std::mem::ManuallyDrop::new(file);
    let code = match catch_unwind(AssertUnwindSafe(|| write(&mut file))) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => match error.raw_os_error() {
            Some(code @ 1..=ERRORS_MAX) => code,
            Some(_) | None => OTHER,
        },
        Err(_) => PANICKED,
    };
    // SAFETY: ends the copy without running anything else of it.
    unsafe { libc::_exit(code) }
}

impl Writer {
    /// Waits until the file is written.
    pub(super) fn wait(mut self) -> io::Result<()> {
        let begun = Instant::now();
        let mut pause = LOOK_FIRST;
        let status = loop {
            match self.look(libc::WNOHANG)? {
                Some(status) => break status,
                None if begun.elapsed() > PATIENCE => {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!("its writer wasn't done after {} s", PATIENCE.as_secs()),
                    ));
                }
                None => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(LOOK_LAST);
                }
            }
        };
        if libc::WIFSIGNALED(status) {
            let signal = libc::WTERMSIG(status);
            return Err(io::Error::other(format!(
                "its writer was ended by signal {signal}; 9 without an operator's doing means that memory ran out"
            )));
        }
        match libc::WEXITSTATUS(status) {
            0 => Ok(()),
            code @ 1..=ERRORS_MAX => Err(io::Error::from_raw_os_error(code)),
            PANICKED => Err(io::Error::other("its writer panicked")),
            code => Err(io::Error::other(format!("its writer ended with {code}"))),
        }
    }

    /// The writer's status, where it has ended.
    fn look(&mut self, options: libc::c_int) -> io::Result<Option<libc::c_int>> {
        let mut status = 0;
        loop {
            // SAFETY: `status` is ours; the process is a child that nobody else waits for.
            let found = unsafe { libc::waitpid(self.pid, &raw mut status, options) };
            if found == self.pid {
                self.ended = true;
                return Ok(Some(status));
            }
            if found == 0 {
                return Ok(None);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                // Nobody to wait for: it isn't ours to end either.
                self.ended = true;
                return Err(error);
            }
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.ended {
            // SAFETY: a child that wasn't waited for keeps its number.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            let _ = self.look(0);
        }
    }
}
