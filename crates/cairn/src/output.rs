//! What the commands print: results to standard output, errors to standard error.

use std::io::Write;

/// Prints one line of result.
pub fn line(text: impl AsRef<str>) {
    // A closed pipe (`cairn status | head -1`) is the reader's choice, not an error.
    let _ = writeln!(std::io::stdout().lock(), "{}", text.as_ref());
}

/// Prints a note for people to standard error.
pub fn note(text: impl AsRef<str>) {
    let _ = writeln!(std::io::stderr().lock(), "{}", text.as_ref());
}

/// Prints an error and its causes, each once.
pub fn error(error: &anyhow::Error) {
    let mut text = format!("error: {error}");
    let mut shown = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !shown.contains(&cause) {
            text.push_str("\n  because: ");
            text.push_str(&cause);
            shown = cause;
        }
    }
    note(text);
}

/// Prints rows as aligned columns; the first row is the head.
pub fn table(rows: &[Vec<String>]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|c| {
            rows.iter()
                .filter_map(|r| r.get(c))
                .map(|s| s.chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        line(cells.join("  ").trim_end());
    }
}
