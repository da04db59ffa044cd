//! Comment lines in the JSON files that people edit: the machine database and trigger files.

/// `text` with comment lines emptied, so that line numbers in errors stay right.
#[must_use]
pub fn without_comments(text: &str) -> String {
    let keep = |line: &str| {
        let start = line.trim_start();
        !start.starts_with('#') && !start.starts_with("//")
    };
    let lines: Vec<&str> =
        text.split('\n').map(|line| if keep(line) { line } else { "" }).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::without_comments;

    #[test]
    fn empties_comment_lines_and_keeps_the_line_numbers() {
        assert_eq!(without_comments("# a\n  // b\n[1]\n \"#\""), "\n\n[1]\n \"#\"");
        assert_eq!(without_comments(""), "");
    }
}
