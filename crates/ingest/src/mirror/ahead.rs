//! Blocks of a list of hashes, looked for some time before their turn.

use super::arena::{AHEAD, Arena};
use super::slots::{Guess, Place};
use crate::EngineHash;

/// A list of hashes of which the next ones are looked for: their lines of the table are asked for [`AHEAD`] blocks ahead, and
/// half as many ahead their nodes.
pub(super) struct Ahead<'a> {
    hashes: &'a [EngineHash],
    done: usize,
    /// Each where its number is a multiple of [`AHEAD`] and what is left; so are the guesses.
    places: [Place; AHEAD],
    guesses: [Guess; AHEAD],
}

impl<'a> Ahead<'a> {
    const NEAR: usize = AHEAD / 2;

    #[inline]
    pub(super) fn new(arena: &Arena, hashes: &'a [EngineHash]) -> Self {
        let places = arena.approach(hashes);
        let mut guesses = [Guess::NONE; AHEAD];
        for (guess, place) in guesses.iter_mut().zip(&places).take(Self::NEAR.min(hashes.len())) {
            *guess = arena.guess(*place);
        }
        Self {
            hashes,
            done: 0,
            places,
            guesses,
        }
    }

    /// How many are done.
    #[inline]
    pub(super) fn done(&self) -> usize {
        self.done
    }

    /// The next one.
    #[inline]
    pub(super) fn hash(&self) -> Option<EngineHash> {
        self.hashes.get(self.done).copied()
    }

    /// What [`Arena::guess`] found of it.
    #[inline]
    pub(super) fn guess(&self) -> Guess {
        self.guesses[self.done % AHEAD]
    }

    /// Where it is found.
    #[inline]
    pub(super) fn place(&self) -> Place {
        self.places[self.done % AHEAD]
    }

    /// The next one is done.
    #[inline]
    pub(super) fn advance(&mut self, arena: &Arena) {
        if let Some(further) = self.hashes.get(self.done + AHEAD) {
            self.places[self.done % AHEAD] = arena.approach_one(*further);
        }
        let near = self.done + Self::NEAR;
        if near < self.hashes.len() {
            self.guesses[near % AHEAD] = arena.guess(self.places[near % AHEAD]);
        }
        self.done += 1;
    }
}
