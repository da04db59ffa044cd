//! What a call asks for, in a few words.

use core::fmt::Display;

/// The longest text of all arguments together, in bytes.
pub const ARGUMENTS_BYTES_MAX: usize = 600;

/// The longest reason, in bytes.
pub const WHY_BYTES_MAX: usize = 400;

/// The longest name of somebody, in bytes.
pub const WHO_BYTES_MAX: usize = 256;

/// How many things of a list are named.
const NAMED_MAX: usize = 5;

/// The arguments of a call in short, why it is made, and by whom by its own word.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Brief {
    /// `NAME=VALUE`, separated by spaces.
    pub arguments: String,
    /// The reason that was given.
    pub why: String,
    /// Who the caller says that it is; a certificate says it better.
    pub who: String,
}

impl Brief {
    /// Adds an argument.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Display) -> Self {
        let value = value.to_string();
        let is_word = !value.is_empty() && !value.contains(|c: char| c.is_whitespace() || c == '"');
        let value = short(&value, ARGUMENTS_BYTES_MAX);
        // So that no value looks like another argument.
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

    /// Adds the first few of a list, and how many there are.
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

    /// Says why.
    #[must_use]
    pub fn why(mut self, why: &str) -> Self {
        self.why = short(why, WHY_BYTES_MAX);
        self
    }

    /// Says who, by the caller's own word.
    #[must_use]
    pub fn who(mut self, who: &str) -> Self {
        self.who = short(who, WHO_BYTES_MAX);
        self
    }
}

/// `text` with everything escaped that is not shown as it is, control characters and marks of
/// direction among them, and cut after about `bytes_max` bytes.
#[must_use]
pub fn short(text: &str, bytes_max: usize) -> String {
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

/// The first `bytes_max` bytes of `text`, and a mark if that is not all.
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
