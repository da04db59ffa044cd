//! The frame of every HTML page of a daemon, and tables.
//!
//! The templates escape everything. Pages need no script, no other file and no network.

use askama::Template;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::tls::Security;

/// The style of all pages; elements have no `style` of their own.
const STYLE: &str = include_str!("../templates/style.css");

/// The hash of the style in the Content-Security-Policy of pages.
pub const STYLE_HASH: &str = "sha256-8c0U/hpTgC3+YKXCuRoPBHtmlYKB1Bem0P5OUYH4t4A=";

/// The flag for access to pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct PageArgs {
    /// Show pages and metrics only to callers with a certificate. /healthz stays open to all
    #[arg(long, help_heading = "Security")]
    pub private_pages: bool,
}

/// The common parts of a daemon's pages.
#[derive(Clone, Debug)]
pub struct Frame {
    daemon: &'static str,
    security: Security,
    links: Vec<(String, String)>,
}

impl Frame {
    /// Returns the frame of `daemon`. A banner warns if it runs without TLS, or if its certificate
    /// expires soon.
    #[must_use]
    pub fn new(daemon: &'static str, security: &Security) -> Self {
        let link = |path: &str, text: &str| (path.to_owned(), text.to_owned());
        let links = vec![link("/", "status"), link("/audit", "audit"), link("/metrics", "metrics")];
        Self { daemon, security: security.clone(), links }
    }

    /// Adds a link to the navigation, before those to the audit log and the metrics.
    #[must_use]
    pub fn link(mut self, path: impl Into<String>, text: impl Into<String>) -> Self {
        let last = self.links.len().saturating_sub(2);
        self.links.insert(last, (path.into(), text.into()));
        self
    }

    #[must_use]
    pub fn daemon(&self) -> &'static str {
        self.daemon
    }

    /// Returns an HTML document with the heading `title` and `body`, which is HTML.
    #[must_use]
    pub fn render(&self, title: &str, body: &str) -> String {
        self.document(title, body, None)
    }

    /// The same for a document that browsers get again every `seconds`.
    #[must_use]
    pub fn render_live(&self, title: &str, body: &str, seconds: u32) -> String {
        self.document(title, body, Some(seconds))
    }

    fn document(&self, title: &str, body: &str, refresh: Option<u32>) -> String {
        let document = Document {
            refresh,
            daemon: self.daemon,
            insecure: self.security.is_insecure(),
            warning: self.security.warning(),
            style: STYLE,
            links: &self.links,
            version: env!("CARGO_PKG_VERSION"),
            title,
            body,
            now: model::display::utc(system::clock::wall()),
        };
        document.render().expect("writing to a String cannot fail")
    }

    /// Returns an error page.
    #[must_use]
    pub fn error(&self, status: u16, text: &str) -> String {
        let title = match status {
            400 => "Bad request".to_owned(),
            403 => "Not allowed".to_owned(),
            404 => "Not found".to_owned(),
            405 => "Method not allowed".to_owned(),
            410 => "Gone".to_owned(),
            503 => "Not available now".to_owned(),
            _ => format!("Error {status}"),
        };
        let body = ErrorText { text }.render().expect("writing to a String cannot fail");
        self.render(&title, &body)
    }
}

#[derive(Template)]
#[template(path = "frame.html")]
struct Document<'a> {
    refresh: Option<u32>,
    daemon: &'a str,
    insecure: bool,
    warning: Option<String>,
    style: &'a str,
    links: &'a [(String, String)],
    version: &'a str,
    title: &'a str,
    body: &'a str,
    now: String,
}

#[derive(Template)]
#[template(path = "error.html")]
struct ErrorText<'a> {
    text: &'a str,
}

/// The colour of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// In order.
    Good,
    /// Needs an operator.
    Bad,
    /// Under way.
    Busy,
    /// Of less interest.
    Quiet,
}

impl Mark {
    fn class(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Bad => "bad",
            Self::Busy => "busy",
            Self::Quiet => "quiet",
        }
    }
}

/// A cell of a table; its text is not HTML and is escaped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// The name of the row.
    Name(String),
    Text(String),
    /// A number, aligned to the right.
    Number(String),
    /// A link to a page of this server.
    Link {
        /// The target; escape names in it with [`path_escape`].
        path: String,
        text: String,
    },
    /// Text with a colour.
    Mark {
        /// The colour.
        mark: Mark,
        text: String,
    },
}

#[derive(Template)]
#[template(path = "table.html")]
struct Table<'a> {
    head: &'a [&'a str],
    rows: &'a [Vec<Cell>],
}

/// Formats a table as HTML; without a head if `head` is empty.
#[must_use]
pub fn table(head: &[&str], rows: &[Vec<Cell>]) -> String {
    Table { head, rows }.render().expect("writing to a String cannot fail")
}

/// Formats names and values as an HTML table.
#[must_use]
pub fn pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let rows: Vec<Vec<Cell>> = pairs
        .into_iter()
        .map(|(name, value)| vec![Cell::Name(name.to_owned()), Cell::Text(value)])
        .collect();
    table(&[], &rows)
}

/// Escapes `text` for HTML.
pub fn html_escape(text: &str) -> String {
    use askama::filters::{Html, escape};
    escape(text, Html).map(|escaped| escaped.to_string()).unwrap_or_default()
}

/// Every byte that is not a letter, digit, `-`, `.`, `_`, `~` or `/`.
const ESCAPED_IN_PATHS: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// Escapes `text` as a part of a path: all but letters, digits, `-`, `.`, `_`, `~` and `/`.
pub fn path_escape(text: &str) -> String {
    utf8_percent_encode(text, ESCAPED_IN_PATHS).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_escapes_its_title_and_shows_the_banner() {
        let frame = Frame::new("testd", &Security::Insecure).link("/sub/", "subs");
        let html = frame.render("<b>&", "<p>body</p>");
        for part in ["<h1>&#60;b&#62;&#38;</h1>", "<p>body</p>", "INSECURE", "<a href=\"/sub/\">"] {
            assert!(html.contains(part), "{part} in {html}");
        }
    }

    #[test]
    fn the_style_is_the_one_that_browsers_are_told_to_accept() {
        use sha2::Digest as _;
        const DIGITS: &[u8; 64] =
            b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let html = Frame::new("testd", &Security::Insecure).render("x", "");
        let style = html.split_once("<style>").unwrap().1.split_once("</style>").unwrap().0;
        let digest = sha2::Sha256::digest(style.as_bytes());
        let mut hash = "sha256-".to_owned();
        for chunk in digest.chunks(3) {
            let bits = chunk.iter().fold(0, |bits, byte| bits << 8 | usize::from(*byte));
            let bits = bits << (8 * (3 - chunk.len()));
            for digit in 0..4 {
                let is_there = digit <= chunk.len();
                let digit = DIGITS[bits >> (18 - 6 * digit) & 63];
                hash.push(if is_there { char::from(digit) } else { '=' });
            }
        }
        assert_eq!(STYLE_HASH, hash);
        assert_eq!(html.matches("<style").count(), 1);
    }

    #[test]
    fn a_page_refers_to_no_other_server_and_has_no_script() {
        let html = Frame::new("testd", &Security::Insecure).error(404, "<script>");
        for part in ["http://", "https://", "<script", "src=", "@import", "url("] {
            assert!(!html.contains(part), "{part} in {html}");
        }
    }

    #[test]
    fn tables_escape_every_kind_of_cell() {
        let text = || "<i>\"&".to_owned();
        let rows = vec![vec![
            Cell::Name(text()),
            Cell::Text(text()),
            Cell::Number(text()),
            Cell::Link { path: format!("/{}", path_escape("a b\"<")), text: text() },
            Cell::Mark { mark: Mark::Bad, text: text() },
        ]];
        let html = table(&["<u>"], &rows);
        for part in ["<i>", "<u>", "\"&"] {
            assert!(!html.contains(part), "{part} in {html}");
        }
        assert!(html.contains("href=\"/a%20b%22%3C\""), "{html}");
        assert!(html.contains("class=\"bad\""), "{html}");
    }
}
