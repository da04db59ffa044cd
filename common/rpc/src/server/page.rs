//! Pages, for browsers, curl and Prometheus.

use std::io;
use std::ops::Range;
use std::pin::Pin;

use api::PROTOCOL_HEADER;
use api::codec::Encoding;
use bytes::Bytes;
use futures_util::Stream;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Response, StatusCode};
use percent_encoding::percent_decode_str;

use super::caller::Caller;
use super::range::ByteRange;
use crate::body::{self, Body};
use crate::packing;
use crate::page_frame::STYLE_HASH;

/// The most parameters of a query that are read.
const PARAMETERS_MAX: usize = 64;

/// The Content-Security-Policy of pages: one style, known by its hash, forms for this server, and
/// nothing else.
fn page_policy() -> String {
    format!(
        "default-src 'none'; style-src '{STYLE_HASH}'; form-action 'self'; base-uri 'none'; \
         frame-ancestors 'none'"
    )
}

/// The Content-Security-Policy of all other responses.
const CONTENT_POLICY: &str = "default-src 'none'; frame-ancestors 'none'; sandbox";

/// Headers of every response that a browser may get. Browsers must not guess types, embed the
/// content in other sites, or use features of the machine. They tell the address of a page to this
/// server only: without it, forms would have no origin.
const PROTECTION: [(&str, &str); 6] = [
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "same-origin"),
    ("x-frame-options", "DENY"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
];

/// Adds the security headers for browsers to a response. Replies of methods in bincode, and their
/// streams of objects, get none: a browser cannot make such a call for a page of another site,
/// because the call needs a header that this server would have to allow first (CORS), and it never
/// does. They would double the length of most polls.
pub(super) fn protect(response: &mut Response<Body>) {
    let headers = response.headers_mut();
    let kind = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    let json = Encoding::Json.content_type().as_bytes();
    if headers.contains_key(PROTOCOL_HEADER) && kind != Some(json) {
        return;
    }
    for (name, value) in PROTECTION {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    headers
        .entry(header::CONTENT_SECURITY_POLICY)
        .or_insert(HeaderValue::from_static(CONTENT_POLICY));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
}

/// Returns true if a browser states that a page of another site sends the request. Without
/// certificates, such a page could otherwise make a browser inside of the network call methods.
pub(super) fn is_foreign(headers: &HeaderMap) -> bool {
    let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    site.is_some_and(|site| site != b"same-origin" && site != b"none")
}

/// A request for a page.
#[derive(Clone, Debug)]
pub struct PageRequest {
    pub caller: Caller,
    /// The path, with its `%` escapes decoded.
    pub path: String,
    /// What follows the path of the page, if that stands for all paths below it; otherwise empty.
    pub below: String,
    /// The parameters of the query.
    pub query: Query,
    /// The requested range, if any.
    pub range: Option<ByteRange>,
    /// The value of `If-None-Match`.
    pub if_none_match: Option<String>,
    /// What forms of the page must have in the field [`TOKEN_FIELD`](super::TOKEN_FIELD).
    pub form_token: String,
}

/// A body that was sent to a path.
#[derive(Clone, Debug)]
pub struct PostRequest {
    /// What follows the path.
    pub below: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl PostRequest {
    /// Returns the value of a header, if it is ASCII.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// The parameters of a query, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Returns the value of a parameter; the last one if it is repeated.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.pairs().rev().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// Returns all values of a parameter without empty ones: forms send fields that were left empty
    /// too.
    #[must_use]
    pub fn all(&self, name: &str) -> Vec<String> {
        let values = self.pairs().filter(|(known, value)| *known == name && !value.is_empty());
        values.map(|(_, value)| value.to_owned()).collect()
    }

    /// Returns the names and values.
    pub fn pairs(&self) -> impl DoubleEndedIterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

/// A body that is read one chunk after the other.
pub type PageBody = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// Bytes of a known length, all or a part of them.
pub struct Content {
    /// The type of the bytes.
    pub content_type: &'static str,
    /// The length of the whole, in bytes.
    pub total_bytes: u64,
    /// The range of `body`; `None` if it is the whole.
    pub part: Option<Range<u64>>,
    /// The entity tag, without quotes.
    pub etag: Option<String>,
    /// True if the content of the path never changes, so that caches may keep it forever.
    pub immutable: bool,
    /// True if `body` is packed: zstd frames of the whole, one after the other.
    pub is_packed: bool,
    pub body: PageBody,
}

impl std::fmt::Debug for Content {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Content")
            .field("content_type", &self.content_type)
            .field("total_bytes", &self.total_bytes)
            .field("part", &self.part)
            .finish_non_exhaustive()
    }
}

/// The content of a page.
#[derive(Debug)]
#[non_exhaustive]
pub enum Page {
    /// A whole HTML document.
    Html(String),
    /// Plain text.
    Text(String),
    Json(Vec<u8>),
    /// Bytes of another kind, as they are read.
    Stream(Content),
    /// The requested range begins after the end.
    RangeNotSatisfiable {
        /// The length of the whole, in bytes.
        total_bytes: u64,
    },
    /// A redirect within this server.
    Redirect(String),
}

impl Page {
    /// Makes the response; `if_none_match` is from the request.
    pub(super) fn into_response(self, if_none_match: Option<&str>) -> Response<Body> {
        match self {
            Self::Html(html) => html_response(StatusCode::OK, html),
            Self::Text(text) => small("text/plain; charset=utf-8", text.into_bytes()),
            Self::Json(json) => small("application/json", json),
            Self::Stream(content) => content.into_response(if_none_match),
            Self::RangeNotSatisfiable { total_bytes } => {
                let mut response = Response::new(body::full(Bytes::new()));
                *response.status_mut() = StatusCode::RANGE_NOT_SATISFIABLE;
                set(&mut response, header::CONTENT_RANGE, &format!("bytes */{total_bytes}"));
                response
            }
            Self::Redirect(to) => {
                let mut response = Response::new(body::full(Bytes::new()));
                *response.status_mut() = StatusCode::SEE_OTHER;
                set(&mut response, header::LOCATION, &to);
                response
            }
        }
    }
}

impl Content {
    fn into_response(self, if_none_match: Option<&str>) -> Response<Body> {
        // To a cache the packed and the plain content differ.
        let packed = if self.is_packed { "-zstd" } else { "" };
        let etag = self.etag.map(|etag| format!("\"{etag}{packed}\""));
        let known = match (&etag, if_none_match) {
            (Some(etag), Some(have)) => have.split(',').any(|have| {
                let have = have.trim();
                have == "*" || have.strip_prefix("W/").unwrap_or(have) == etag
            }),
            _ => false,
        };
        let length = self.part.as_ref().map_or(self.total_bytes, |part| part.end - part.start);
        let mut response = if known {
            Response::new(body::full(Bytes::new()))
        } else {
            Response::new(body::streamed(self.body))
        };
        if known {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        } else {
            set(&mut response, header::CONTENT_TYPE, self.content_type);
            if self.is_packed {
                set(&mut response, header::CONTENT_ENCODING, packing::ENCODING);
            } else {
                set(&mut response, header::CONTENT_LENGTH, &length.to_string());
                set(&mut response, header::ACCEPT_RANGES, "bytes");
            }
            if let Some(part) = self.part {
                *response.status_mut() = StatusCode::PARTIAL_CONTENT;
                let (start, last) = (part.start, part.end.saturating_sub(1));
                let range = format!("bytes {start}-{last}/{}", self.total_bytes);
                set(&mut response, header::CONTENT_RANGE, &range);
            }
        }
        set(&mut response, header::VARY, "accept-encoding");
        let caching =
            if self.immutable { "public, max-age=31536000, immutable" } else { "no-cache" };
        set(&mut response, header::CACHE_CONTROL, caching);
        if let Some(etag) = etag {
            set(&mut response, header::ETAG, &etag);
        }
        response
    }
}

/// Returns an HTML response with the security headers.
pub(super) fn html_response(status: StatusCode, html: String) -> Response<Body> {
    let mut response = small("text/html; charset=utf-8", html.into_bytes());
    *response.status_mut() = status;
    set(&mut response, header::CONTENT_SECURITY_POLICY, &page_policy());
    response
}

/// Returns a response of bytes in memory that must not be cached.
pub(super) fn small(content_type: &str, bytes: Vec<u8>) -> Response<Body> {
    let length = bytes.len().to_string();
    let mut response = Response::new(body::full(bytes));
    set(&mut response, header::CONTENT_TYPE, content_type);
    set(&mut response, header::CONTENT_LENGTH, &length);
    response
}

/// Sets a header; an invalid value is left out.
pub(super) fn set(response: &mut Response<Body>, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

/// Decodes the `%` escapes of a path; `None` if one is malformed or the result is not UTF-8.
pub(super) fn unescape(path: &str) -> Option<String> {
    let is_escape = |rest: &str| {
        rest.as_bytes().get(..2).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    let is_valid = path.split('%').skip(1).all(is_escape);
    let decoded = percent_decode_str(path).decode_utf8().ok()?;
    is_valid.then(|| decoded.into_owned())
}

/// Parses a query.
pub(super) fn parameters(query: &str) -> Query {
    let pairs = form_urlencoded::parse(query.as_bytes()).into_owned().take(PARAMETERS_MAX);
    Query(pairs.filter(|(name, _)| !name.is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_of_paths_are_undone() {
        #[rustfmt::skip]
        let table = [
            ("/a",      Some("/a")),
            ("/a%20b",  Some("/a b")),
            ("/%2e%2E", Some("/..")),
            ("/%",      None),
            ("/%a",     None),
            ("/%ag",    None),
            ("/%ff",    None),
        ];
        for (text, expected) in table {
            assert_eq!(unescape(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn parameters_are_split() {
        let query = parameters("a=1&b=x+y%26&c&=z&a=2&a=");
        let pairs: Vec<_> = query.pairs().collect();
        assert_eq!(pairs, [("a", "1"), ("b", "x y&"), ("c", ""), ("a", "2"), ("a", "")]);
        assert_eq!(
            (query.get("b"), query.get("c"), query.get("d")),
            (Some("x y&"), Some(""), None)
        );
        assert_eq!((query.get("a"), query.all("a")), (Some(""), vec!["1".into(), "2".into()]));
        assert_eq!(query.all("c"), Vec::<String>::new());
    }
}
