//! Documents whose examples are run.

use std::fmt::Write as _;

/// What begins a block with commands and their output.
const CONSOLE: &str = "```console\n";

/// Returns the contents of the blocks of a kind, such as `json`.
///
/// # Panics
///
/// If a block has no end.
#[must_use]
pub fn blocks<'a>(text: &'a str, kind: &str) -> Vec<&'a str> {
    let begin = format!("```{kind}\n");
    let parts = text.split(&begin).skip(1);
    parts.map(|part| part.split_once("```").expect("the block ends").0).collect()
}

/// Returns the document `text` with the output that `answer` returns for the command in the first
/// line of each block of the kind `console`. Commands begin with `$ `, which `answer` does not get.
/// A block stays as it is if `answer` returns nothing.
///
/// # Panics
///
/// If a block has no end, or no command.
#[must_use]
pub fn with_outputs(text: &str, mut answer: impl FnMut(&str) -> Option<String>) -> String {
    let mut parts = text.split(CONSOLE);
    let mut said = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (block, rest) = part.split_once("```").expect("the block ends");
        let line = block.lines().next().expect("the block has a command");
        let output = answer(line.strip_prefix("$ ").expect("a command begins with `$ `"));
        let block = output.map_or(block.to_owned(), |output| format!("{line}\n{output}"));
        write!(said, "{CONSOLE}{block}```{rest}").expect("memory can be written");
    }
    said
}
