//! What a disk holds after the power went: made of the journal that [`crate::power_shim`] keeps.
//!
//! A sync makes durable what was written to that file before it, and every name given or taken before it, as journalling
//! file systems do. Of the rest anything may be there: each later write whole, in 512-byte sectors, or not at all; of
//! later changes of names a first part.

use std::collections::BTreeMap;
use std::path::Path;

use rand::Rng;
use rand::rngs::SmallRng;

use crate::power_shim::{LENGTH, RENAME, SYNC, UNLINK, WRITE};

/// What a disk writes as a whole.
const SECTOR: usize = 512;

/// A change of one file that isn't durable.
enum Change {
    Write(usize, Vec<u8>),
    Length(usize),
}

#[derive(Default)]
struct File {
    durable: Vec<u8>,
    pending: Vec<Change>,
}

/// A change of names that isn't durable.
enum Naming {
    Make(Vec<u8>, usize),
    Rename(Vec<u8>, Vec<u8>),
    Unlink(Vec<u8>),
}

/// What is lost of what wasn't synced.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Loss {
    /// All of it.
    Everything,
    /// Each write, as the seed says.
    Writes,
    /// Each sector, as the seed says.
    Sectors,
}

/// Files by number, and the names they have durably and by now.
#[derive(Default)]
pub(crate) struct Disk {
    files: Vec<File>,
    durable: BTreeMap<Vec<u8>, usize>,
    now: BTreeMap<Vec<u8>, usize>,
    naming: Vec<Naming>,
    /// Syncs do nothing, as on a disk that lies.
    pub(crate) lies: bool,
}

fn change(bytes: &mut Vec<u8>, at: usize, written: &[u8]) {
    if bytes.len() < at + written.len() {
        bytes.resize(at + written.len(), 0);
    }
    bytes[at..at + written.len()].copy_from_slice(written);
}

fn rename(names: &mut BTreeMap<Vec<u8>, usize>, naming: Naming) {
    match naming {
        Naming::Make(name, file) => {
            names.insert(name, file);
        }
        Naming::Rename(old, new) => {
            if let Some(file) = names.remove(&old) {
                names.insert(new, file);
            }
        }
        Naming::Unlink(name) => {
            names.remove(&name);
        }
    }
}

impl Disk {
    /// A disk that holds a directory durably.
    pub(crate) fn of(dir: &Path) -> Self {
        let mut disk = Self::default();
        for entry in std::fs::read_dir(dir).into_iter().flatten() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() {
                let name = entry.file_name().into_encoded_bytes();
                disk.durable.insert(name, disk.files.len());
                disk.files.push(File {
                    durable: std::fs::read(entry.path()).unwrap(),
                    pending: Vec::new(),
                });
            }
        }
        disk.now = disk.durable.clone();
        disk
    }

    fn file(&mut self, name: &[u8]) -> usize {
        if let Some(file) = self.now.get(name) {
            return *file;
        }
        let file = self.files.len();
        self.files.push(File::default());
        self.now.insert(name.to_vec(), file);
        self.naming.push(Naming::Make(name.to_vec(), file));
        file
    }

    fn name(&mut self, both: impl Fn() -> Naming) {
        rename(&mut self.now, both());
        self.naming.push(both());
    }

    /// Takes what the journal says; its last record may be cut short.
    pub(crate) fn replay(&mut self, mut journal: &[u8]) {
        while let Some((kind, name, at, bytes)) = next(&mut journal) {
            let at = usize::try_from(at).unwrap();
            match kind {
                WRITE => {
                    let file = self.file(name);
                    self.files[file].pending.push(Change::Write(at, bytes.to_vec()));
                }
                LENGTH => {
                    let file = self.file(name);
                    self.files[file].pending.push(Change::Length(at));
                }
                SYNC if self.lies => {}
                SYNC => {
                    if let Some(file) = self.now.get(name) {
                        let file = &mut self.files[*file];
                        for pending in file.pending.drain(..) {
                            match pending {
                                Change::Write(at, bytes) => change(&mut file.durable, at, &bytes),
                                Change::Length(len) => file.durable.resize(len, 0),
                            }
                        }
                    }
                    for naming in self.naming.drain(..) {
                        rename(&mut self.durable, naming);
                    }
                }
                RENAME => self.name(|| Naming::Rename(name.to_vec(), bytes.to_vec())),
                UNLINK => self.name(|| Naming::Unlink(name.to_vec())),
                other => panic!("the journal holds a record of kind {other}"),
            }
        }
    }

    /// Bytes that were written and never synced.
    pub(crate) fn unsynced(&self) -> usize {
        let pending = self.files.iter().flat_map(|file| &file.pending);
        pending
            .map(|pending| match pending {
                Change::Write(_, bytes) => bytes.len(),
                Change::Length(_) => 0,
            })
            .sum()
    }

    /// The power goes: fills an empty directory with what is left.
    pub(crate) fn cut(mut self, rng: &mut SmallRng, loss: Loss, dir: &Path) {
        let kept = match loss {
            Loss::Everything => 0,
            Loss::Writes | Loss::Sectors => rng.random_range(0..=self.naming.len()),
        };
        for naming in self.naming.drain(..).take(kept) {
            rename(&mut self.durable, naming);
        }
        for (name, file) in &self.durable {
            let file = &mut self.files[*file];
            for pending in file.pending.drain(..) {
                let whole = matches!(loss, Loss::Writes) && rng.random();
                match pending {
                    Change::Length(len) if whole => file.durable.resize(len, 0),
                    Change::Write(at, bytes) if whole => change(&mut file.durable, at, &bytes),
                    Change::Write(at, bytes) if matches!(loss, Loss::Sectors) => {
                        for (n, sector) in bytes.chunks(SECTOR).enumerate() {
                            if rng.random() {
                                change(&mut file.durable, at + n * SECTOR, sector);
                            }
                        }
                    }
                    Change::Length(_) | Change::Write(..) => {}
                }
            }
            let name = std::str::from_utf8(name).unwrap();
            let path = dir.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, &file.durable).unwrap();
        }
    }
}

/// Kind, name, place and bytes of the next record.
fn next<'a>(journal: &mut &'a [u8]) -> Option<(u8, &'a [u8], u64, &'a [u8])> {
    let (kind, rest) = journal.split_first()?;
    let (len, rest) = rest.split_first_chunk::<8>()?;
    let (name, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    let (at, rest) = rest.split_first_chunk::<8>()?;
    let (len, rest) = rest.split_first_chunk::<8>()?;
    let (bytes, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    *journal = rest;
    Some((*kind, name, u64::from_le_bytes(*at), bytes))
}
