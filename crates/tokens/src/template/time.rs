//! `strftime_now`, with C's format letters.

use chrono::NaiveDateTime;
use minijinja::{Error, ErrorKind};
use std::fmt::Write;

/// Prints a local time as Python's `datetime.now().strftime(format)` does.
pub(super) fn strftime(format: &str, now: &NaiveDateTime) -> Result<String, Error> {
    let mut out = String::new();
    write!(out, "{}", now.format(&adapt(format, now)))
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, "strftime_now got an unknown format"))?;
    Ok(out)
}

/// Rewrites the letters whose meaning differs: a naive time has no zone, and `%f` is microseconds.
fn adapt(format: &str, now: &NaiveDateTime) -> String {
    let mut out = String::with_capacity(format.len());
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Z' | 'z') => {}
            Some('f') => {
                let micros = now.and_utc().timestamp_subsec_micros();
                let _ = write!(out, "{micros:06}");
            }
            Some(letter) => {
                out.push('%');
                out.push(letter);
            }
            None => out.push_str("%%"),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::strftime;
    use chrono::NaiveDate;

    #[test]
    fn formats_print_what_python_prints() {
        let now = NaiveDate::from_ymd_opt(2026, 3, 7)
            .unwrap()
            .and_hms_micro_opt(9, 5, 3, 42)
            .unwrap();
        let check = |format: &str, expect: &str| assert_eq!(strftime(format, &now).unwrap(), expect, "{format}");
        check("%d %b %Y", "07 Mar 2026");
        check("%Y-%m-%d %H:%M:%S", "2026-03-07 09:05:03");
        check("%A, %B %-d, %Y at %I:%M %p", "Saturday, March 7, 2026 at 09:05 AM");
        check("%f|%Z|%z|%j|%%", "000042|||066|%");
        assert!(strftime("%Q", &now).is_err());
    }
}
