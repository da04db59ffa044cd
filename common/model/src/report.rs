//! Prints an error with everything that caused it: the one printer of chains.

use std::error::Error;
use std::fmt::Write as _;

/// `error` and its sources, outermost first, joined by colons on one line.
#[must_use]
pub fn report(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        write!(text, ": {cause}").expect("writing to a String cannot fail");
        source = cause.source();
    }
    text
}
