//! Reads chosen samples out of a Prometheus text page as it arrives, in bounded memory.

/// Longest line that is looked at; engines' longest (configuration as labels) are a few KiB.
pub const MAX_LINE_BYTES: usize = 64 << 10;
/// Labels of one sample that are read.
pub const MAX_LABELS: usize = 64;

/// One sample of a wanted metric.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample {
    /// Metric name.
    pub name: String,
    /// Label pairs in page order, unescaped.
    pub labels: Vec<(String, String)>,
    /// Its value.
    pub value: f64,
}

impl Sample {
    /// A label's value.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

/// Takes a page chunk by chunk and hands out the samples of the names it was asked for.
#[derive(Debug)]
pub struct Reader<'a> {
    wanted: &'a [&'a str],
    line: Vec<u8>,
    overlong: bool,
    skipped: u64,
}

impl<'a> Reader<'a> {
    /// Reads only samples whose name is in `wanted`.
    #[must_use]
    pub fn new(wanted: &'a [&'a str]) -> Self {
        Self {
            wanted,
            line: Vec::new(),
            overlong: false,
            skipped: 0,
        }
    }

    /// Takes the next bytes of the page.
    pub fn push(&mut self, mut bytes: &[u8], found: &mut impl FnMut(Sample)) {
        while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
            if self.line.is_empty() && !self.overlong {
                self.take_line(&bytes[..end], found);
            } else {
                self.append(&bytes[..end]);
                let line = std::mem::take(&mut self.line);
                if std::mem::take(&mut self.overlong) {
                    self.skipped += 1;
                } else {
                    self.take_line(&line, found);
                }
            }
            bytes = &bytes[end + 1..];
        }
        self.append(bytes);
    }

    /// Ends the page; returns how many lines were malformed or too long.
    pub fn finish(mut self, found: &mut impl FnMut(Sample)) -> u64 {
        let line = std::mem::take(&mut self.line);
        if self.overlong {
            self.skipped += 1;
        } else {
            self.take_line(&line, found);
        }
        self.skipped
    }

    fn append(&mut self, bytes: &[u8]) {
        if self.overlong || self.line.len() + bytes.len() > MAX_LINE_BYTES {
            self.overlong = true;
            self.line = Vec::new();
        } else {
            self.line.extend_from_slice(bytes);
        }
    }

    fn take_line(&mut self, line: &[u8], found: &mut impl FnMut(Sample)) {
        let name_len = line
            .iter()
            .position(|b| matches!(b, b'{' | b' ' | b'\t'))
            .unwrap_or(line.len());
        let name = &line[..name_len];
        if !self.wanted.iter().any(|w| w.as_bytes() == name) {
            return;
        }
        match parse_sample(line, name_len) {
            Some(sample) => found(sample),
            None => self.skipped += 1,
        }
    }
}

fn parse_sample(line: &[u8], name_len: usize) -> Option<Sample> {
    let line = std::str::from_utf8(line).ok()?;
    let (name, rest) = line.split_at(name_len);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inner) => parse_labels(inner)?,
        None => (Vec::new(), rest),
    };
    // A timestamp may follow the value.
    let value = rest.split_ascii_whitespace().next()?;
    Some(Sample {
        name: name.to_owned(),
        labels,
        value: value.parse().ok()?,
    })
}

fn parse_labels(mut rest: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', ',']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        if labels.len() >= MAX_LABELS {
            return None;
        }
        let (name, after) = rest.split_once('=')?;
        let mut value = String::new();
        let mut characters = after.trim_start().strip_prefix('"')?.char_indices();
        let quoted = after.trim_start().strip_prefix('"')?;
        let end = loop {
            match characters.next()? {
                (at, '"') => break at + 1,
                (_, '\\') => match characters.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, other) => value.push(other),
            }
        };
        labels.push((name.trim().to_owned(), value));
        rest = &quoted[end..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n\
        vllm:num_requests_running{engine=\"0\",model_name=\"a \\\"b\\\" }\"} 3.0\n\
        vllm:num_requests_running{engine=\"1\"} NaN\n\
        other{engine=\"1\"} 7\nprocess_start_time_seconds 1.78e+09 123\nvllm:num_requests_running{bad 1";

    fn read(page: &str, step: usize) -> (Vec<Sample>, u64) {
        let mut samples = Vec::new();
        let mut reader = Reader::new(&["vllm:num_requests_running", "process_start_time_seconds"]);
        for chunk in page.as_bytes().chunks(step) {
            reader.push(chunk, &mut |s| samples.push(s));
        }
        let skipped = reader.finish(&mut |s| samples.push(s));
        (samples, skipped)
    }

    #[test]
    fn wanted_samples_come_out_whatever_the_chunks() {
        for step in [1, 5, 17, 4096] {
            let (samples, skipped) = read(PAGE, step);
            assert_eq!(samples.len(), 3, "{samples:?}");
            assert_eq!(samples[0].label("model_name"), Some("a \"b\" }"));
            assert_eq!(samples[0].label("engine"), Some("0"));
            assert!((samples[0].value - 3.0).abs() < f64::EPSILON);
            assert!(samples[1].value.is_nan());
            assert!((samples[2].value - 1.78e9).abs() < 1.0);
            assert_eq!(skipped, 1);
        }
    }

    #[test]
    fn an_endless_line_takes_no_memory() {
        let mut reader = Reader::new(&["x"]);
        for _ in 0..1000 {
            reader.push(&[b'x'; 4096], &mut |_| panic!("nothing to find"));
            assert!(reader.line.capacity() <= 2 * MAX_LINE_BYTES);
        }
        let mut found = 0;
        reader.push(b"\nx 4\n", &mut |_| found += 1);
        assert_eq!((found, reader.finish(&mut |_| ())), (1, 1));
    }
}
