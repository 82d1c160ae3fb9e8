//! Stands between this binary and the disk: keeps a journal of what is written below a directory and of what is synced,
//! and can pretend that the disk is full.
//!
//! It needs no `LD_PRELOAD` and no rights: this binary defines `write`, `pwrite64`, `ftruncate64`, `fsync`, `fdatasync`,
//! `rename` and `unlink` itself, so the linker binds the standard library's and sled's calls to these definitions, which
//! hand on to the kernel by `syscall`. They do nothing else until a child turns them on. Each record of the journal is
//! one appending `write`, so it survives SIGKILL like any other file; [`crate::power_disk`] makes of it what a disk would
//! hold after the power went. `sync_file_range` isn't in the list on purpose: it promises nothing about durability.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io::Write;
use std::os::fd::IntoRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};
use std::sync::{Mutex, OnceLock};

use libc::{c_char, c_int, c_void, off64_t, size_t, ssize_t};

/// Where the child's journal goes.
pub(crate) const JOURNAL: &str = "CAIRN_TEST_ENGINE_JOURNAL";
/// How many bytes the child's disk still takes.
pub(crate) const ROOM: &str = "CAIRN_TEST_ENGINE_ROOM";

/// Kinds of records.
pub(crate) const WRITE: u8 = 1;
pub(crate) const LENGTH: u8 = 2;
pub(crate) const SYNC: u8 = 3;
pub(crate) const RENAME: u8 = 4;
pub(crate) const UNLINK: u8 = 5;

static ROOT: OnceLock<Vec<u8>> = OnceLock::new();
static JOURNAL_FILE: AtomicI32 = AtomicI32::new(-1);
static LEFT: AtomicI64 = AtomicI64::new(i64::MAX);
/// Keeps the journal in the order of what happens.
static GATE: Mutex<()> = Mutex::new(());

/// Turns the shim on where the variables say so.
pub(crate) fn start_as_told(dir: &Path) {
    let (journal, room) = (std::env::var(JOURNAL), std::env::var(ROOM));
    if journal.is_err() && room.is_err() {
        return;
    }
    if let Ok(room) = room {
        LEFT.store(room.parse().unwrap(), Ordering::SeqCst);
    }
    if let Ok(journal) = journal {
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(journal)
            .unwrap();
        JOURNAL_FILE.store(file.into_raw_fd(), Ordering::SeqCst);
    }
    let mut root = std::fs::canonicalize(dir)
        .unwrap()
        .into_os_string()
        .into_encoded_bytes();
    root.push(b'/');
    ROOT.set(root).unwrap();
}

/// The path below the root, where it is there.
fn below(path: &[u8]) -> Option<&[u8]> {
    path.strip_prefix(ROOT.get()?.as_slice())
}

/// The path below the root that an open file has.
fn name_of(fd: c_int) -> Option<Vec<u8>> {
    ROOT.get()?;
    let mut link = [0u8; 32];
    write!(link.as_mut_slice(), "/proc/self/fd/{fd}\0").ok()?;
    let mut path = [0u8; 4096];
    // SAFETY: the name ends in a zero byte, and the buffer is as long as said.
    let len = unsafe { libc::readlink(link.as_ptr().cast(), path.as_mut_ptr().cast(), path.len()) };
    let path = &path[..usize::try_from(len).ok()?];
    let whole = [path, b"/"].concat();
    if ROOT.get().is_some_and(|root| *root == whole) {
        return Some(Vec::new());
    }
    below(path).map(<[u8]>::to_vec)
}

fn note(kind: u8, name: &[u8], at: u64, bytes: &[u8]) {
    let journal = JOURNAL_FILE.load(Ordering::SeqCst);
    if journal < 0 {
        return;
    }
    let mut record = Vec::with_capacity(name.len() + bytes.len() + 25);
    record.push(kind);
    record.extend_from_slice(&(name.len() as u64).to_le_bytes());
    record.extend_from_slice(name);
    record.extend_from_slice(&at.to_le_bytes());
    record.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    record.extend_from_slice(bytes);
    // SAFETY: the record lives as long as the call.
    let written = unsafe { libc::syscall(libc::SYS_write, journal, record.as_ptr(), record.len()) };
    assert_eq!(written, record.len() as i64, "the test's own disk is full");
}

/// How many of `bytes` the pretended disk takes; none for a full one.
fn room(bytes: usize) -> Option<usize> {
    let left = LEFT.load(Ordering::SeqCst);
    let takes = bytes.min(usize::try_from(left).unwrap_or(0));
    if left != i64::MAX {
        LEFT.fetch_sub(takes as i64, Ordering::SeqCst);
    }
    (takes > 0 || bytes == 0).then_some(takes)
}

fn full() -> ssize_t {
    // SAFETY: this thread's own error number.
    unsafe { *libc::__errno_location() = libc::ENOSPC };
    -1
}

/// SAFETY for all below: called as the C library's functions of that name are, with what they ask for.
#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, bytes: *const c_void, count: size_t) -> ssize_t {
    let hand_on = |count: size_t| unsafe { libc::syscall(libc::SYS_write, fd, bytes, count) as ssize_t };
    let Some(name) = name_of(fd) else {
        return hand_on(count);
    };
    let _gate = GATE.lock();
    let Some(count) = room(count) else { return full() };
    // SAFETY: the caller gives `count` bytes.
    let (at, data) = unsafe {
        let at = libc::lseek64(fd, 0, libc::SEEK_CUR);
        (at, std::slice::from_raw_parts(bytes.cast::<u8>(), count))
    };
    note(WRITE, &name, at as u64, data);
    hand_on(count)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pwrite64(fd: c_int, bytes: *const c_void, count: size_t, at: off64_t) -> ssize_t {
    let hand_on = |count: size_t| unsafe { libc::syscall(libc::SYS_pwrite64, fd, bytes, count, at) as ssize_t };
    let Some(name) = name_of(fd) else {
        return hand_on(count);
    };
    let _gate = GATE.lock();
    let Some(count) = room(count) else { return full() };
    // SAFETY: the caller gives `count` bytes.
    let data = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), count) };
    note(WRITE, &name, at as u64, data);
    hand_on(count)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ftruncate64(fd: c_int, len: off64_t) -> c_int {
    let _gate = GATE.lock();
    if let Some(name) = name_of(fd) {
        note(LENGTH, &name, len as u64, &[]);
    }
    unsafe { libc::syscall(libc::SYS_ftruncate, fd, len) as c_int }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fsync(fd: c_int) -> c_int {
    unsafe { sync(fd, libc::SYS_fsync) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fdatasync(fd: c_int) -> c_int {
    unsafe { sync(fd, libc::SYS_fdatasync) }
}

unsafe fn sync(fd: c_int, call: libc::c_long) -> c_int {
    match name_of(fd) {
        Some(name) => {
            // Where the disk is pretended, syncing is too: it costs nothing, and comes after all that was noted before.
            let _gate = GATE.lock();
            note(SYNC, &name, 0, &[]);
            0
        }
        None => unsafe { libc::syscall(call, fd) as c_int },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rename(from: *const c_char, to: *const c_char) -> c_int {
    let _gate = GATE.lock();
    // SAFETY: both are strings.
    let (old, new) = unsafe { (CStr::from_ptr(from).to_bytes(), CStr::from_ptr(to).to_bytes()) };
    if let (Some(old), Some(new)) = (below(old), below(new)) {
        note(RENAME, old, 0, new);
    }
    unsafe { libc::syscall(libc::SYS_renameat2, libc::AT_FDCWD, from, libc::AT_FDCWD, to, 0) as c_int }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn unlink(path: *const c_char) -> c_int {
    let _gate = GATE.lock();
    // SAFETY: a string.
    if let Some(name) = below(unsafe { CStr::from_ptr(path).to_bytes() }) {
        note(UNLINK, name, 0, &[]);
    }
    unsafe { libc::syscall(libc::SYS_unlinkat, libc::AT_FDCWD, path, 0) as c_int }
}
