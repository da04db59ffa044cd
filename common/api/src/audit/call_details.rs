//! The arguments of a call, its reason and its caller, for the audit log.

use core::fmt::Display;

/// The longest text of all arguments together, in bytes.
pub const ARGUMENTS_BYTES_MAX: usize = 600;

/// The longest reason, in bytes.
pub const WHY_BYTES_MAX: usize = 400;

/// The longest name of a user, in bytes.
pub const WHO_BYTES_MAX: usize = 256;

/// How many items of a list are named.
const NAMED_MAX: usize = 5;

/// The arguments of a call, its reason, and who made it by the caller's own account.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallDetails {
    /// `NAME=VALUE`, separated by spaces.
    pub arguments: String,
    /// The reason that the caller gave.
    pub why: String,
    /// Who the caller claims to be. If it has a certificate, trust that instead.
    pub who: String,
}

impl CallDetails {
    /// Adds an argument.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Display) -> Self {
        let value = value.to_string();
        let is_word = !value.is_empty() && !value.contains(|c: char| c.is_whitespace() || c == '"');
        let value = escape_and_cut(&value, ARGUMENTS_BYTES_MAX);
        // Quoted, so that no value looks like another argument.
        let value = match is_word {
            true => value,
            false => format!("\"{}\"", value.replace('"', "\\\"")),
        };
        let space = if self.arguments.is_empty() { "" } else { " " };
        let both = format!("{}{space}{name}={value}", self.arguments);
        self.arguments = cut(&both, ARGUMENTS_BYTES_MAX);
        self
    }

    /// Adds an argument if it is set.
    #[must_use]
    pub fn with_some(self, name: &str, value: Option<impl Display>) -> Self {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }

    /// Adds the first items of a list, and how many there are.
    #[must_use]
    pub fn with_list(self, name: &str, values: impl IntoIterator<Item = impl Display>) -> Self {
        let mut values = values.into_iter();
        let named: Vec<String> =
            values.by_ref().take(NAMED_MAX).map(|value| value.to_string()).collect();
        let mut text = named.join(",");
        let more = values.count();
        if more > 0 {
            text.push_str(&format!(",... ({} in all)", named.len() + more));
        }
        self.with(name, text)
    }

    /// Sets the reason.
    #[must_use]
    pub fn why(mut self, why: &str) -> Self {
        self.why = escape_and_cut(why, WHY_BYTES_MAX);
        self
    }

    /// Sets who the caller claims to be.
    #[must_use]
    pub fn who(mut self, who: &str) -> Self {
        self.who = escape_and_cut(who, WHO_BYTES_MAX);
        self
    }
}

/// Escapes everything in `text` that is not printable, such as control characters and direction
/// marks, and cuts it after about `bytes_max` bytes.
#[must_use]
pub fn escape_and_cut(text: &str, bytes_max: usize) -> String {
    let mut harmless = String::new();
    for character in text.chars() {
        if harmless.len() > bytes_max {
            break;
        }
        match character {
            '"' | '\'' => harmless.push(character),
            _ => harmless.extend(character.escape_debug()),
        }
    }
    cut(&harmless, bytes_max)
}

/// Returns the first `bytes_max` bytes of `text`, with a mark if something was cut.
fn cut(text: &str, bytes_max: usize) -> String {
    const MARK: &str = " ...";
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    let mut end = bytes_max - MARK.len();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{MARK}", &text[..end])
}
