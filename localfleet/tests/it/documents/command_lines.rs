//! Finds the command lines in a Markdown file.

/// What a shell is given in a fenced block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShellLine {
    /// The line in the document, from 1.
    pub number: usize,
    /// Without the prompt. What was broken with a backslash is one line.
    pub text: String,
    /// What follows the line as a here-document, with the line that ends it.
    pub here_document: String,
}

/// A command of a fenced block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// The line in the document, from 1.
    pub number: usize,
    pub words: Vec<String>,
}

impl CommandLine {
    /// The name of the program.
    pub fn program(&self) -> &str {
        &self.words[0]
    }
}

/// A fenced block of a document.
pub struct Block<'a> {
    /// The line at which it begins, from 1.
    pub number: usize,
    /// The word after the fence, such as `sh`.
    pub kind: &'a str,
    /// Its lines with their numbers, without what indents them.
    pub lines: Vec<(usize, &'a str)>,
}

/// Returns the fenced blocks of a document.
pub fn blocks_of(text: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    let mut is_open = false;
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        match line.trim_start().strip_prefix("```") {
            Some(_) if is_open => is_open = false,
            Some(kind) => {
                is_open = true;
                blocks.push(Block { number, kind: kind.trim(), lines: Vec::new() });
            }
            None if is_open => {
                let block = blocks.last_mut().expect("a block is open");
                block.lines.push((number, line.trim_start()));
            }
            None => {}
        }
    }
    blocks
}

/// Returns what a shell is given in a document: all lines of the blocks of the kind `sh`, and those
/// after a prompt in the blocks of the kind `console`.
pub fn shell_lines_of(text: &str) -> Vec<ShellLine> {
    let blocks = blocks_of(text);
    blocks.iter().flat_map(|block| of_block(block.kind, &block.lines)).collect()
}

fn of_block(kind: &str, lines: &[(usize, &str)]) -> Vec<ShellLine> {
    let after_prompt = |line: &str| -> Option<String> {
        let (prompt, rest) = line.split_once(' ')?;
        (prompt == "$" || prompt.ends_with('#')).then(|| rest.to_owned())
    };
    let begin = |line: &str| match kind {
        "sh" => (!line.is_empty() && !line.starts_with('#')).then(|| line.to_owned()),
        "console" => after_prompt(line),
        _ => None,
    };
    let mut found = Vec::new();
    let mut rest = lines.iter();
    while let Some((number, line)) = rest.next() {
        let Some(mut text) = begin(line) else { continue };
        // The shell asks for more.
        while text.ends_with(['\\', '|']) {
            let Some((_, more)) = rest.next() else { break };
            text = format!("{} {more}", text.trim_end_matches('\\').trim_end());
        }
        let mut here_document = String::new();
        if let Some((_, end)) = text.split_once("<<") {
            let end = end.trim_matches(['\'', '"', ' ']);
            for (_, line) in rest.by_ref() {
                here_document.push_str(&format!("{line}\n"));
                if *line == end {
                    break;
                }
            }
        }
        // A comment. No command of the documents has this text in quotes.
        if let Some((command, _)) = text.split_once(" # ") {
            text = command.trim_end().to_owned();
        }
        found.push(ShellLine { number: *number, text, here_document });
    }
    found
}

/// Returns the commands of what a shell is given in a document.
pub fn lines_of(text: &str) -> Vec<CommandLine> {
    let of_line = |ShellLine { number, text, .. }: ShellLine| {
        let commands = split(&text).into_iter().map(without_keyword);
        let commands = commands.filter(|words| !words.is_empty());
        commands.map(move |words| CommandLine { number, words }).collect::<Vec<_>>()
    };
    shell_lines_of(text).into_iter().flat_map(of_line).collect()
}

/// Returns a command of a loop without the word of the shell before it.
fn without_keyword(mut words: Vec<String>) -> Vec<String> {
    const KEYWORDS: [&str; 3] = ["until", "do", "done"];
    if words.first().is_some_and(|word| KEYWORDS.contains(&word.as_str())) {
        words.remove(0);
    }
    words
}

/// Splits a line into its commands, and these into words, as a shell does. Leaves out comments,
/// redirections and settings of variables.
pub fn split(text: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words) = (Vec::new(), Vec::new());
    let mut word: Option<String> = None;
    let mut skips_word = false;
    let mut quote = None;
    let end_word = |word: &mut Option<String>, words: &mut Vec<String>, skips: &mut bool| {
        let Some(text) = word.take() else { return };
        let is_setting = words.is_empty()
            && text.split_once('=').is_some_and(|(name, _)| {
                name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
            });
        if !std::mem::take(skips) && !is_setting {
            words.push(text);
        }
    };
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (Some(open), _) if character == open => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(character),
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, '$') if characters.peek() == Some(&'(') => {}
            (None, '>' | '<') => {
                // `2>`, `>&1` and `<(...)`.
                word.take_if(|word| word.chars().all(|letter| letter.is_ascii_digit()));
                end_word(&mut word, &mut words, &mut skips_word);
                skips_word = characters.peek() != Some(&'(');
            }
            (None, '&') if skips_word => {}
            (None, '|' | ';' | '&' | '(' | ')') => {
                end_word(&mut word, &mut words, &mut skips_word);
                commands.push(std::mem::take(&mut words));
            }
            (None, _) if character.is_whitespace() => {
                end_word(&mut word, &mut words, &mut skips_word);
            }
            (None, _) => word.get_or_insert_default().push(character),
        }
    }
    end_word(&mut word, &mut words, &mut skips_word);
    commands.push(words);
    commands
}

/// Returns the code in the running text that may be a command, with its line.
pub fn spans_of(text: &str) -> Vec<(usize, Vec<String>)> {
    let (mut spans, mut is_in_block, mut open) = (Vec::new(), false, None);
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_in_block = !is_in_block;
            continue;
        }
        if is_in_block {
            continue;
        }
        if line.trim().is_empty() {
            open = None;
        }
        for (part, piece) in line.split('`').enumerate() {
            if part > 0 {
                open = match open.take() {
                    None => Some((index + 1, String::new())),
                    Some((number, span)) => {
                        let words: Vec<String> =
                            span.split_whitespace().map(str::to_owned).collect();
                        if words.len() > 1 {
                            spans.push((number, words));
                        }
                        None
                    }
                };
            }
            if let Some((_, span)) = &mut open {
                span.push_str(piece);
                span.push(' ');
            }
        }
    }
    spans
}
