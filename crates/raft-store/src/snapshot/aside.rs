//! Writes a state to a file while it goes on changing.

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use cairn_index::IndexState;
use parking_lot::RwLock;

use crate::machine::Replica;

/// States that weigh less are copied under the lock, which takes a few milliseconds: less than a fork is worth.
pub(crate) const FORK_FROM_BYTES: u64 = 8 << 20;

/// Writes the replica as it is at one instant into `file`; gives what `describe` said of that instant, and how long
/// writers of the replica were kept waiting.
///
/// From `fork_from` bytes on the state isn't copied: a forked process writes it. Where the system refuses to fork it is
/// copied all the same, which takes longer and as much memory again.
pub(crate) fn write_aside<T>(
    replica: &RwLock<Replica>,
    fork_from: u64,
    file: &mut File,
    describe: impl FnOnce(&Replica) -> T,
    write: impl Fn(&mut File, &T, &IndexState) -> io::Result<()>,
) -> io::Result<(T, Duration)> {
    let held = replica.read();
    let begun = Instant::now();
    let told = describe(&held);
    #[cfg(target_os = "linux")]
    if held.state.residency().weight() >= fork_from {
        match super::forked::spawn(file, |file| write(file, &told, &held.state)) {
            Ok(writer) => {
                drop(held);
                let stall = begun.elapsed();
                writer.wait()?;
                return Ok((told, stall));
            }
            Err(error) => tracing::warn!(%error, "the system refuses to fork: the state is copied for a snapshot"),
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = fork_from;
    let state = held.state.clone();
    drop(held);
    let stall = begun.elapsed();
    write(file, &told, &state)?;
    Ok((told, stall))
}
