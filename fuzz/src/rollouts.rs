//! Documents about rollouts.

use ::rollouts::{Document, decide};

/// Reads a document, and decides about it twice: the second decision must change nothing more.
pub fn rollout(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(mut document) = Document::parse(text) else { return };
    let first = decide(&document);
    document.rollout.clone_from(&first.rollout);
    document.pending.clone_from(&first.pending);
    document.event = None;
    let second = decide(&document);
    assert_eq!((second.rollout, second.pending), (first.rollout, first.pending));
}
