//! Where the text of a conversation with media stops being known.
//!
//! Engines replace each image, audio or video by as many tokens as its processor says, so only the text before
//! the first one can be computed here. It is found by rendering twice: as it is, and with a mark in place of
//! every item; both renderings are equal exactly up to the first place where an item shows.

use crate::messages::MEDIA_MARK;

/// Bytes of `text` before the first media item, given the same rendering with marks.
pub(crate) fn known_prefix(text: &str, marked: &str) -> usize {
    let same = text.bytes().zip(marked.bytes()).take_while(|(a, b)| a == b).count();
    let mut end = same;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    end
}

/// Bytes before the first mark, where the content itself carries it.
pub(crate) fn before_mark(text: &str) -> usize {
    text.find(MEDIA_MARK).unwrap_or(text.len())
}
