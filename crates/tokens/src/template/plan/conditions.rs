//! What must hold of every text of a conversation that is rendered from pieces.

use super::super::python::is_space;
use memchr::memmem::Finder;

/// Conditions on each text. An empty text never meets them.
#[derive(Debug, Default)]
pub(in crate::template) struct Conditions {
    /// It holds none of these.
    without: Vec<Finder<'static>>,
    /// None of these at its ends.
    ends: Vec<Ends>,
}

#[derive(Debug, PartialEq, Eq)]
struct Ends {
    /// Which characters; `None` for white space.
    chars: Option<String>,
    start: bool,
    end: bool,
}

impl Conditions {
    /// Texts that hold `part` are not for pieces.
    pub fn without(&mut self, part: &str) {
        if !self.without.iter().any(|known| known.needle() == part.as_bytes()) {
            self.without.push(Finder::new(part).into_owned());
        }
    }

    /// Nor are texts with one of `chars` (`None`: white space) at these ends.
    pub fn without_at_ends(&mut self, chars: Option<String>, start: bool, end: bool) {
        let ends = Ends { chars, start, end };
        if !self.ends.contains(&ends) {
            self.ends.push(ends);
        }
    }

    /// Whether a text meets them.
    pub fn hold(&self, text: &str) -> bool {
        !text.is_empty()
            && self.ends.iter().all(|ends| !ends.strip(text))
            && self.without.iter().all(|part| part.find(text.as_bytes()).is_none())
    }
}

impl Ends {
    /// Whether stripping would take something off.
    fn strip(&self, text: &str) -> bool {
        let gone = |c: char| self.chars.as_ref().map_or_else(|| is_space(c), |set| set.contains(c));
        self.start && text.starts_with(gone) || self.end && text.ends_with(gone)
    }
}
