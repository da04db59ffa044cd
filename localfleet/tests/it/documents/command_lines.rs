//! Finds the command lines in a Markdown file.

/// A command of a fenced block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// The line in the document, from 1.
    pub number: usize,
    pub words: Vec<String>,
    /// True if it is surely a command: of a block of the kind `sh`, or after a prompt.
    pub is_strict: bool,
}

impl CommandLine {
    /// The name of the program.
    pub fn program(&self) -> &str {
        &self.words[0]
    }
}

/// Returns the commands of the fenced blocks. A block of the kind `sh` has nothing else. In
/// others, commands stand after a prompt; if there is none, each line may be one.
pub fn lines_of(text: &str) -> Vec<CommandLine> {
    let mut found = Vec::new();
    let mut block: Option<(String, Vec<(usize, &str)>)> = None;
    for (index, line) in text.lines().enumerate() {
        match (line.trim_start().strip_prefix("```"), &mut block) {
            (Some(kind), None) => block = Some((kind.trim().to_owned(), Vec::new())),
            (Some(_), Some(_)) => {
                let (kind, lines) = block.take().expect("it is there");
                found.extend(of_block(&kind, &lines));
            }
            (None, Some((_, lines))) => lines.push((index + 1, line.trim_start())),
            (None, None) => {}
        }
    }
    found
}

fn of_block(kind: &str, lines: &[(usize, &str)]) -> Vec<CommandLine> {
    let has_roots_prompt = kind == "console";
    let command = |line: &str| -> Option<String> {
        let (prompt, rest) = line.split_once(' ')?;
        let is_prompt = prompt == "$" || (has_roots_prompt && prompt.ends_with('#'));
        is_prompt.then(|| rest.to_owned())
    };
    let has_prompts = lines.iter().any(|(_, line)| command(line).is_some());
    let is_strict = match kind {
        "sh" => true,
        "" | "console" => has_prompts,
        _ => return Vec::new(),
    };
    // A line of a configuration file is no command.
    let is_setting = |words: &[String]| words.get(1).is_some_and(|word| word == "=");
    let mut found = Vec::new();
    let mut rest = lines.iter();
    while let Some((number, line)) = rest.next() {
        let begin =
            if has_prompts && kind != "sh" { command(line) } else { Some((*line).to_owned()) };
        let Some(mut text) = begin else { continue };
        // The shell asks for more.
        while text.ends_with(['\\', '|']) {
            let Some((_, more)) = rest.next() else { break };
            text = format!("{} {more}", text.trim_end_matches('\\'));
        }
        // What a here-document holds is no command.
        if let Some((_, end)) = text.split_once("<<") {
            let end = end.trim_matches(['\'', '"', ' ']);
            rest.by_ref().find(|(_, line)| *line == end);
        }
        let commands = split(&text).into_iter().map(without_keyword);
        let commands = commands.filter(|words| !words.is_empty() && !is_setting(words));
        found.extend(commands.map(|words| CommandLine { number: *number, words, is_strict }));
    }
    found
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
