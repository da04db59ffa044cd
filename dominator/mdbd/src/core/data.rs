//! What a source gives: a machine database in JSON, or a plain list of hosts.
//!
//! Both pass the same checks: a list becomes JSON of as many lines, so that an error names the
//! line that its writer sees.
// tidy: core

use model::mdb::{Machines, MdbError, parse};
use serde::{Deserialize, Serialize};

/// How a source writes machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// A machine database, as the dominator reads it.
    #[default]
    Json,
    /// Lines of `HOST [REQUIRED-IMAGE [PLANNED-IMAGE]]`; a word that begins with `#` begins a
    /// comment.
    Hosts,
}

/// Data that are not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    #[error("line {line} is not UTF-8")]
    Text {
        /// The line, from 1.
        line: usize,
    },
    #[error(
        "line {line}: `{word}` is a word too many: expected HOST [REQUIRED-IMAGE [PLANNED-IMAGE]]"
    )]
    Words {
        /// The line, from 1.
        line: usize,
        /// The first word that is too many.
        word: String,
    },
    #[error(transparent)]
    Machines(MdbError),
}

/// Reads what a source gave.
///
/// # Errors
///
/// [`DataError`] names the line or the record; one that is wrong is enough to refuse all.
pub fn read(format: Format, bytes: &[u8]) -> Result<Machines, DataError> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let line = 1 + bytes[..error.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count();
        DataError::Text { line }
    })?;
    // Some editors begin a file with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    match format {
        Format::Json => parse(text),
        Format::Hosts => parse(&json_of(text)?),
    }
    .map_err(DataError::Machines)
}

/// A line of a list as a record.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Record<'a> {
    hostname: &'a str,
    required_image: &'a str,
    planned_image: &'a str,
}

/// The list as JSON, each record in the line that it has in the list.
fn json_of(list: &str) -> Result<String, DataError> {
    let mut json = "[".to_owned();
    let mut is_first = true;
    for (index, line) in list.lines().enumerate() {
        if index > 0 {
            json.push('\n');
        }
        let mut words = line.split_whitespace().take_while(|word| !word.starts_with('#'));
        let Some(hostname) = words.next() else { continue };
        let record = Record {
            hostname,
            required_image: words.next().unwrap_or_default(),
            planned_image: words.next().unwrap_or_default(),
        };
        if let Some(word) = words.next() {
            return Err(DataError::Words { line: index + 1, word: word.to_owned() });
        }
        if !is_first {
            json.push(',');
        }
        is_first = false;
        json.push_str(&serde_json::to_string(&record).expect("texts have a JSON"));
    }
    json.push(']');
    Ok(json)
}

#[cfg(test)]
mod tests {
    use model::mdb::Machine;
    use model::report::report;

    use super::*;

    #[test]
    fn a_list_has_a_host_in_each_line() {
        let list = "# the fleet\nweb1 base/1 base/2\n\n  db1\tbase/1 # no plan yet\r\nspare\n#end";
        let machine = |hostname: &str, required: &str, planned: &str| Machine {
            hostname: hostname.into(),
            required_image: required.into(),
            planned_image: planned.into(),
            ..Machine::default()
        };
        let machines: Vec<Machine> =
            read(Format::Hosts, list.as_bytes()).unwrap().into_values().collect();
        let expected = [
            machine("db1", "base/1", ""),
            machine("spare", "", ""),
            machine("web1", "base/1", "base/2"),
        ];
        assert_eq!(machines, expected);
        assert!(read(Format::Hosts, b"").unwrap().is_empty());
    }

    #[test]
    fn the_json_of_a_list_has_its_lines() {
        let json = json_of("\na\n# b\n\nc d\n").unwrap();
        let lines: Vec<&str> = json.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(lines[1].contains("\"a\""), "{json}");
        assert!(lines[4].starts_with(",{\"Hostname\":\"c\""), "{json}");
    }

    #[test]
    fn one_wrong_record_refuses_all() {
        use Format::{Hosts, Json};
        let table: [(Format, &[u8], &str); 8] = [
            (Json, br#"[{"Hostname": "a"}, {"Hostname": "a"}]"#, "host name a was given already"),
            (Json, b"[{\"Hostname\": \"a/b\"}]", "`a/b` is no host name"),
            (Json, b"[\n{\"Hostname\": \"a\"},\n", "line 3"),
            (Json, b"[\n\"\xfc\"]", "line 2 is not UTF-8"),
            (Hosts, b"a\nb\na\n", "host name a was given already"),
            (Hosts, b"a\n\nb x y z", "line 3: `z` is a word too many"),
            (Hosts, b"a x/../y", "RequiredImage"),
            (Hosts, b"{\"Hostname\":", "is no host name"),
        ];
        for (format, bytes, part) in table {
            let error = report(&read(format, bytes).unwrap_err());
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}
