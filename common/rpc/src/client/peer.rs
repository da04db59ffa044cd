//! The address of a server: `host:port`.
// tidy: core

use core::fmt;
use core::net::{IpAddr, Ipv6Addr};

/// A server, by name, and optionally the address to reach it at.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peer {
    /// The name that the server's certificate must have; a name or an address, without brackets.
    pub host: String,
    pub port: u16,
    /// The address to connect to, instead of that of the name.
    pub address: Option<IpAddr>,
}

/// Why a text is not a `host:port`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not HOST or HOST:PORT: {why}")]
pub struct PeerError {
    pub text: String,
    pub why: &'static str,
}

impl Peer {
    /// Parses `host`, `host:port`, an IPv4 or IPv6 address, or `[address]:port`.
    ///
    /// # Errors
    ///
    /// [`PeerError`] if the text has another form, or the port exceeds 65535.
    pub fn parse(text: &str, default_port: u16) -> Result<Self, PeerError> {
        let bad = |why| PeerError { text: text.to_owned(), why };
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, after) = rest.split_once(']').ok_or_else(|| bad("`]` is missing"))?;
            if host.parse::<Ipv6Addr>().is_err() {
                return Err(bad("no IPv6 address is in the brackets"));
            }
            match after {
                "" => (host, None),
                _ => (host, Some(after.strip_prefix(':').ok_or_else(|| bad("no `:` after `]`"))?)),
            }
        } else if text.parse::<Ipv6Addr>().is_ok() {
            (text, None)
        } else {
            match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            }
        };
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
        if host.is_empty() {
            return Err(bad("the host is missing"));
        }
        if host.len() > 255 || !host.bytes().all(known) {
            return Err(bad("the host is not a host name"));
        }
        let port = match port {
            None => default_port,
            Some(port) => port.parse().map_err(|_| bad("the port is not a number up to 65535"))?,
        };
        Ok(Self { host: host.to_owned(), port, address: None })
    }

    /// Returns the same server, connected to at `address`.
    #[must_use]
    pub fn at(self, address: Option<IpAddr>) -> Self {
        Self { address, ..self }
    }

    /// Returns true if the server is on this machine.
    #[must_use]
    pub fn is_local(&self) -> bool {
        match self.address.or_else(|| self.host.parse().ok()) {
            Some(address) => address.is_loopback(),
            None => self.host == "localhost",
        }
    }

    /// Returns `host:port`, with brackets around an IPv6 address.
    #[must_use]
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.authority())?;
        match self.address {
            Some(address) if address.to_string() != self.host => {
                write!(formatter, " (at {address})")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_operators_write() {
        #[rustfmt::skip]
        let table = [
            ("localhost",        Some(("localhost", 7, "localhost:7"))),
            ("localhost:6971",   Some(("localhost", 6971, "localhost:6971"))),
            ("127.0.0.2:1",      Some(("127.0.0.2", 1, "127.0.0.2:1"))),
            ("::1",              Some(("::1", 7, "[::1]:7"))),
            ("[::1]",            Some(("::1", 7, "[::1]:7"))),
            ("[::1]:8",          Some(("::1", 8, "[::1]:8"))),
            ("",                 None),
            (":1",               None),
            ("a:",               None),
            ("a:65536",          None),
            ("a:b:c",            None),
            ("http://a",         None),
            ("a b",              None),
            ("a/b:1",            None),
            ("[::1",             None),
            ("[::1]x",           None),
            ("[a]:1",            None),
        ];
        for (text, expected) in table {
            let got = Peer::parse(text, 7).ok();
            let got = got.as_ref().map(|peer| (&*peer.host, peer.port, peer.authority()));
            let expected = expected.map(|(host, port, shown)| (host, port, shown.to_owned()));
            assert_eq!(got, expected, "{text}");
        }
    }

    #[test]
    fn shows_the_address_that_is_dialled() {
        let peer = Peer::parse("web-1", 6969).unwrap();
        assert_eq!(peer.to_string(), "web-1:6969");
        let peer = peer.at(Some([10, 0, 0, 7].into()));
        assert_eq!(peer.to_string(), "web-1:6969 (at 10.0.0.7)");
    }
}
