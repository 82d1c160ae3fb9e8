//! The members of a POSIX tar archive, one after the other.

use std::io::{BufRead, BufReader, Read};

use super::read::{TraceError, bad};

const RECORD: usize = 512;

/// Whether a stream begins as an archive does.
pub(super) fn is_archive(start: &[u8]) -> bool {
    start.len() >= RECORD && &start[257..262] == b"ustar"
}

/// Hands over each plain file whose name ends in `.json` or `.jsonl`.
pub(super) fn each_member(
    mut input: impl BufRead,
    mut take: impl FnMut(&str, BufReader<&mut dyn Read>) -> Result<(), TraceError>,
) -> Result<(), TraceError> {
    let failed = |source| TraceError::Read { line: 0, source };
    loop {
        let mut head = [0u8; RECORD];
        if input.fill_buf().map_err(failed)?.is_empty() {
            return Ok(());
        }
        input.read_exact(&mut head).map_err(failed)?;
        if head.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let text = |from: usize, to: usize| {
            let field = &head[from..to];
            let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
            String::from_utf8_lossy(&field[..end]).trim().to_owned()
        };
        let name = text(0, 100);
        let size = u64::from_str_radix(&text(124, 136), 8)
            .map_err(|_| bad(0, "the archive", format!("has a broken head before {name:?}")))?;
        let plain = matches!(head[156], b'0' | 0);
        let mut content = (&mut input).take(size.div_ceil(RECORD as u64) * RECORD as u64);
        if plain && (name.ends_with(".json") || name.ends_with(".jsonl")) {
            let mut file = (&mut content as &mut dyn Read).take(size);
            take(&name, BufReader::new(&mut file))?;
        }
        std::io::copy(&mut content, &mut std::io::sink()).map_err(failed)?;
    }
}
