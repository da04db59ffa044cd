//! Downloads a page of any length, starting at any byte.
//!
//! The range that the server states is returned unchanged and not compared with the request: the
//! caller, who stores the bytes, decides about a server that sends others.

use std::sync::Arc;

use bytes::Bytes;
use hyper::header::{CONTENT_LENGTH, CONTENT_RANGE, RANGE};
use hyper::{HeaderMap, Request, StatusCode};

use super::connection::Connection;
use super::exchange::Reply;
use super::{CALL_LIMIT, CallError, Client};
use crate::body;
use crate::object_reader::{StreamError, next_chunk};
use crate::pace::{Pace, STREAM_PACE_BYTES};
use api::fault::{Fault, FaultCode};

/// The range that a server states to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Everything: the range was ignored. The length in bytes, if stated.
    Whole(Option<u64>),
    /// From the first byte to before the end.
    Part {
        /// The first byte.
        first: u64,
        /// The byte after the last.
        end: u64,
        /// The total length, in bytes, if stated.
        total_bytes: Option<u64>,
    },
    /// An unknown part.
    Unclear,
}

/// A page that is being read.
pub struct Download {
    extent: Extent,
    body: Reply,
    pace: Pace,
    _connection: Arc<Connection>,
}

impl std::fmt::Debug for Download {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Download").field("extent", &self.extent).finish_non_exhaustive()
    }
}

impl Download {
    /// Returns the range that the server states.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Returns the next bytes, at least one; `None` at the end.
    ///
    /// # Errors
    ///
    /// [`StreamError`] if the connection breaks, the body does not have the stated length, or the
    /// server is too slow.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, StreamError> {
        next_chunk(&mut self.body, &mut self.pace).await
    }
}

impl Client {
    /// Requests the page from byte `first` on. Returns `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// A server that is too busy answers a fault with `Unavailable`.
    pub async fn download(&self, path: &str, first: u64) -> Result<Option<Download>, CallError> {
        let method = "GET";
        let request = Request::get(self.uri(method, path.to_owned())?)
            .header(RANGE, format!("bytes={first}-"))
            .body(body::full(Bytes::new()))
            .map_err(|error| self.odd(method, error.to_string()))?;
        let call = async {
            let (response, connection) = self.send(method, Box::new(request)).await?;
            let extent = match response.status() {
                StatusCode::OK => Extent::Whole(length_of(response.headers())),
                StatusCode::PARTIAL_CONTENT => extent_of(response.headers()),
                StatusCode::NOT_FOUND => return Ok(None),
                StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
                    let source = Fault::new(FaultCode::Unavailable, "it is too busy");
                    return Err(CallError::Fault { method, peer: self.name(), source });
                }
                status => return Err(self.odd(method, format!("the answer has status {status}"))),
            };
            let (body, pace) = (response.into_body(), Pace::new(STREAM_PACE_BYTES));
            Ok(Some(Download { extent, body, pace, _connection: connection }))
        };
        self.within(method, CALL_LIMIT, call).await
    }
}

fn length_of(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn extent_of(headers: &HeaderMap) -> Extent {
    let value = headers.get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
    value.and_then(parse).unwrap_or(Extent::Unclear)
}

/// Parses the header `Content-Range` of a response with status 206.
fn parse(value: &str) -> Option<Extent> {
    let number = |text: &str| -> Option<u64> {
        text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
    };
    let (range, total) = value.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, end) = (number(first)?, number(last)?.checked_add(1)?);
    let total_bytes = match total {
        "*" => None,
        total => Some(number(total)?),
    };
    let fits = first < end && total_bytes.is_none_or(|total| end <= total);
    fits.then_some(Extent::Part { first, end, total_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read() {
        let part = |first, end, total_bytes| Some(Extent::Part { first, end, total_bytes });
        #[rustfmt::skip]
        let table = [
            ("bytes 2-4/7",    part(2, 5, Some(7))),
            ("bytes 2-6/7",    part(2, 7, Some(7))),
            (" bytes 0-0/*",   part(0, 1, None)),
            ("bytes 2-7/7",    None),
            ("bytes 4-2/7",    None),
            ("bytes */7",      None),
            ("bytes -4/7",     None),
            ("bytes 2-4",      None),
            ("bytes +2-4/7",   None),
            ("bytes 0-18446744073709551615/*", None),
            ("items 2-4/7",    None),
            ("",               None),
        ];
        for (value, expected) in table {
            assert_eq!(parse(value), expected, "{value}");
        }
    }
}
