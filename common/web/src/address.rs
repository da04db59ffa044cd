//! Addresses of documents on foreign web servers, and their redirections.
// tidy: core

use core::fmt;

use rpc::client::{Peer, PeerError};

/// An invalid address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    #[error("`{text}` does not begin with http:// or https://")]
    Scheme { text: String },
    #[error("bad server; names and passwords in addresses are not supported")]
    Server {
        #[source]
        source: PeerError,
    },
    #[error("spaces, control and other than ASCII characters must be written as %XX")]
    Target,
    #[error("a redirection from https to http is not followed")]
    Downgrade,
}

/// Address of a document. It is displayed without its query, which may have a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebAddress {
    /// True for https.
    pub secure: bool,
    pub peer: Peer,
    /// Path and query; starts with `/`.
    pub target: String,
}

impl WebAddress {
    /// Parses `http://HOST[:PORT][/PATH][?QUERY]`, or the same with `https`.
    ///
    /// # Errors
    ///
    /// [`AddressError`] for any other text.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        let scheme = |name: &str| {
            let start = text.get(..name.len())?;
            start.eq_ignore_ascii_case(name).then(|| &text[name.len()..])
        };
        match (scheme("http://"), scheme("https://")) {
            (Some(rest), _) => Self::with_scheme(false, rest),
            (_, Some(rest)) => Self::with_scheme(true, rest),
            (None, None) => Err(AddressError::Scheme { text: text.to_owned() }),
        }
    }

    fn with_scheme(secure: bool, rest: &str) -> Result<Self, AddressError> {
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (server, target) = rest.split_at(end);
        let peer = Peer::parse(server, if secure { 443 } else { 80 })
            .map_err(|source| AddressError::Server { source })?;
        let target = target.split('#').next().unwrap_or_default();
        let slash = if target.starts_with('/') { "" } else { "/" };
        let target = format!("{slash}{target}");
        if !target.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(AddressError::Target);
        }
        Ok(Self { secure, peer, target })
    }

    /// Resolves `location`, a redirection by the server.
    ///
    /// # Errors
    ///
    /// [`AddressError`] if it is invalid or leads from https to http.
    pub fn follow(&self, location: &str) -> Result<Self, AddressError> {
        let first = location.split(['/', '?', '#']).next().unwrap_or_default();
        if first.contains(':') {
            let target = Self::parse(location)?;
            let is_downgrade = self.secure && !target.secure;
            return if is_downgrade { Err(AddressError::Downgrade) } else { Ok(target) };
        }
        if let Some(rest) = location.strip_prefix("//") {
            return Self::with_scheme(self.secure, rest);
        }
        let path = self.target.split('?').next().unwrap_or_default();
        let target = match location.chars().next() {
            None => self.target.clone(),
            Some('/') => location.to_owned(),
            Some('?') => format!("{path}{location}"),
            Some(_) => {
                let (path, query) = location.split_at(location.find('?').unwrap_or(location.len()));
                let directory = &self.target[..=self.directory_end()];
                format!("{}{query}", without_dots(&format!("{directory}{path}")))
            }
        };
        Self::with_scheme(self.secure, &format!("{}{target}", self.peer.authority()))
    }

    /// Returns the position of the last slash of the path.
    fn directory_end(&self) -> usize {
        let path = self.target.split('?').next().unwrap_or_default();
        path.rfind('/').unwrap_or_default()
    }

    /// Returns the server for the header `Host`, without the default port.
    #[must_use]
    pub fn host(&self) -> String {
        let authority = self.peer.authority();
        let implied = if self.secure { ":443" } else { ":80" };
        authority.strip_suffix(implied).map_or_else(|| authority.clone(), str::to_owned)
    }
}

impl fmt::Display for WebAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https" } else { "http" };
        let path = self.target.split('?').next().unwrap_or_default();
        write!(formatter, "{scheme}://{}{path}", self.host())
    }
}

/// Resolves `.` and `..` in `path`; `..` of the root is the root.
fn without_dots(path: &str) -> String {
    let mut names: Vec<&str> = Vec::new();
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    for (index, part) in parts.iter().enumerate() {
        let is_last = index + 1 == parts.len();
        match *part {
            "." => {}
            ".." => {
                names.pop();
            }
            part => {
                names.push(part);
                continue;
            }
        }
        if is_last {
            names.push("");
        }
    }
    format!("/{}", names.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_shown_without_their_query() {
        #[rustfmt::skip]
        let table = [
            ("http://a",                 Some(("a:80",       "/",          "http://a/"))),
            ("https://a/b/c?d=e#f",      Some(("a:443",      "/b/c?d=e",   "https://a/b/c"))),
            ("HTTPS://a:443/",           Some(("a:443",      "/",          "https://a/"))),
            ("http://a:443?key=1",       Some(("a:443",      "/?key=1",    "http://a:443/"))),
            ("http://[::1]:8/x",         Some(("[::1]:8",    "/x",         "http://[::1]:8/x"))),
            ("http://a#b",               Some(("a:80",       "/",          "http://a/"))),
            ("http://",                  None),
            ("http://me:word@a/",        None),
            ("http://a/b c",             None),
            ("http://a/\n",              None),
            ("http://a/ü",               None),
            ("file:///etc/mdb",          None),
            ("a/b",                      None),
            ("",                         None),
            ("ü",                        None),
        ];
        for (text, expected) in table {
            let got = WebAddress::parse(text).ok();
            let got = got.map(|at| (at.peer.authority(), at.target.clone(), at.to_string()));
            let expected = expected.map(|(peer, target, shown)| {
                (peer.to_owned(), target.to_owned(), shown.to_owned())
            });
            assert_eq!(got, expected, "{text}");
        }
    }

    #[test]
    fn redirections_lead_where_a_browser_would_go() {
        let downgrade = Err(AddressError::Downgrade);
        #[rustfmt::skip]
        let table = [
            ("http://a/b/c?d", "https://e/f",      Ok("https://e/f")),
            ("https://a/b/c",  "http://e/f",       downgrade.clone()),
            ("https://a/b/c",  "HTTP://a/b/c",     downgrade),
            ("https://a/b/c",  "//e:8/f",          Ok("https://e:8/f")),
            ("http://a:8/b/c", "/f?g#h",           Ok("http://a:8/f?g")),
            ("http://a/b/c?d", "f",                Ok("http://a/b/f")),
            ("http://a/b/c",   "./f/../g?x=/../y", Ok("http://a/b/g?x=/../y")),
            ("http://a/b/c",   "../../../f",       Ok("http://a/f")),
            ("http://a/b/c",   "..",               Ok("http://a/")),
            ("http://a/b/c",   "f/.",              Ok("http://a/b/f/")),
            ("http://a/b/c?d", "?e",               Ok("http://a/b/c?e")),
            ("http://a/b/c?d", "",                 Ok("http://a/b/c?d")),
        ];
        for (from, location, expected) in table {
            let expected = expected.map(|text| WebAddress::parse(text).unwrap());
            let got = WebAddress::parse(from).unwrap().follow(location);
            assert_eq!(got, expected, "{from} {location}");
        }
        let from = WebAddress::parse("http://a/").unwrap();
        for location in ["ftp://a/b", "file:/etc/mdb", "javascript:x"] {
            let error = from.follow(location).unwrap_err();
            assert!(matches!(error, AddressError::Scheme { .. }), "{location}: {error}");
        }
    }
}
