//! Which cache group gives positions: the first with full attention; others only make the worker hybrid.

use crate::{SpecKind, Stored};

/// What a source's events told of its cache groups.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Groups {
    primary: Option<u32>,
    /// Whether the primary group said that it has full attention.
    sure: bool,
    hybrid: bool,
}

/// What to do with an event by its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// It gives positions.
    Take,
    /// It is of another group.
    Pass,
    /// It gives positions, and what an unnamed group gave before was wrong.
    TakeAfresh,
}

impl Groups {
    pub(crate) fn is_hybrid(&self) -> bool {
        self.hybrid
    }

    /// Decides over a store.
    pub(crate) fn store(&mut self, stored: &Stored) -> Use {
        let named = match stored.spec_kind {
            SpecKind::Window | SpecKind::Other => {
                self.hybrid = true;
                return Use::Pass;
            }
            SpecKind::Full => true,
            SpecKind::Unsaid => false,
        };
        let Some(group) = stored.group else { return Use::Take };
        match self.primary {
            None => {
                self.primary = Some(group);
                self.sure = named;
                Use::Take
            }
            Some(primary) if primary == group => {
                self.sure |= named;
                Use::Take
            }
            Some(_) => {
                self.hybrid = true;
                if named && !self.sure {
                    self.primary = Some(group);
                    self.sure = true;
                    return Use::TakeAfresh;
                }
                Use::Pass
            }
        }
    }

    /// A store of the primary group has another shape than full attention gives: it was no such group, if it never said
    /// so. Returns whether what it gave must go.
    pub(crate) fn misshapen(&mut self, stored: &Stored) -> bool {
        if stored.group.is_none() || self.sure || self.primary != stored.group {
            return false;
        }
        self.primary = None;
        self.hybrid = true;
        true
    }

    /// Whether a removal is for the group that gives positions.
    pub(crate) fn removes(&self, group: Option<u32>) -> bool {
        match (group, self.primary) {
            (Some(group), Some(primary)) => group == primary,
            (None, _) | (Some(_), None) => true,
        }
    }

    pub(crate) fn parts(&self) -> (Option<u32>, bool, bool) {
        (self.primary, self.sure, self.hybrid)
    }

    pub(crate) fn from_parts((primary, sure, hybrid): (Option<u32>, bool, bool)) -> Self {
        Self { primary, sure, hybrid }
    }
}
