//! Asks foreign web servers for documents: HTTP/1.1, with TLS for https.
//!
//! Servers are verified with the authorities that the system trusts. Calls between daemons use
//! [`rpc::client`] instead.

mod address;

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::{Either, select};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Incoming};
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, LOCATION, TRANSFER_ENCODING, USER_AGENT};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

pub use address::{AddressError, WebAddress};

const REDIRECTIONS_MAX: usize = 5;

/// Largest head of a response, in bytes.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// A failed download.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WebError {
    #[error("cannot connect to {address}")]
    Connect { address: String, source: io::Error },
    #[error("cannot read the certificates of the authorities that this system trusts: {why}")]
    Authorities { why: String },
    #[error("no TLS with {address}")]
    Tls { address: String, source: io::Error },
    #[error("{address} gave no whole answer")]
    Lost { address: String, source: hyper::Error },
    #[error("{address} cannot be asked for")]
    Request { address: String, source: hyper::http::Error },
    #[error("{address} answers {status}")]
    Status { address: String, status: StatusCode },
    #[error("{address} leads where we do not follow")]
    Redirection { address: String, source: AddressError },
    #[error("{address} leads elsewhere: give the address that it leads to")]
    Moved { address: String },
    #[error("{address} leads to more than {REDIRECTIONS_MAX} other addresses")]
    Redirections { address: String },
    #[error("{address} gives a document without saying how long it is")]
    Endless { address: String },
    #[error("{address} has more than {limit} bytes")]
    TooLarge {
        address: String,
        /// The limit, in bytes.
        limit: usize,
    },
}

/// A program that asks, and what it accepts.
#[derive(Clone, Copy, Debug)]
pub struct WebClient {
    /// Its name and version, such as `mdbd/1.0`.
    pub agent: &'static str,
    /// The largest document, in bytes.
    pub bytes_max: usize,
}

enum Answer {
    Document(Vec<u8>),
    Redirection(WebAddress),
}

impl WebClient {
    /// Downloads the document at `address`.
    ///
    /// # Errors
    ///
    /// [`WebError`] names the address.
    pub async fn get(&self, address: &WebAddress) -> Result<Vec<u8>, WebError> {
        let mut at = address.clone();
        for _ in 0..=REDIRECTIONS_MAX {
            match self.ask(&at, None).await? {
                Answer::Document(bytes) => return Ok(bytes),
                Answer::Redirection(target) => at = target,
            }
        }
        Err(WebError::Redirections { address: address.to_string() })
    }

    /// Sends `json` to `address` and returns the answer. Redirections are not followed.
    ///
    /// # Errors
    ///
    /// [`WebError`] names the address.
    pub async fn post(&self, address: &WebAddress, json: Bytes) -> Result<Vec<u8>, WebError> {
        match self.ask(address, Some(json)).await? {
            Answer::Document(bytes) => Ok(bytes),
            Answer::Redirection(_) => Err(WebError::Moved { address: address.to_string() }),
        }
    }

    async fn ask(&self, at: &WebAddress, json: Option<Bytes>) -> Result<Answer, WebError> {
        let stream = connect(at).await;
        let stream =
            stream.map_err(|source| WebError::Connect { address: at.to_string(), source })?;
        if !at.secure {
            return self.exchange(at, json, stream).await;
        }
        let tls = |source| WebError::Tls { address: at.to_string(), source };
        let name = ServerName::try_from(at.peer.host.clone())
            .map_err(|error| tls(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
        let connector = TlsConnector::from(Arc::new(trust().await?));
        let stream = connector.connect(name, stream).await.map_err(tls)?;
        self.exchange(at, json, stream).await
    }

    async fn exchange(
        &self,
        at: &WebAddress,
        json: Option<Bytes>,
        stream: impl AsyncRead + AsyncWrite + Unpin,
    ) -> Result<Answer, WebError> {
        let lost = |source| WebError::Lost { address: at.to_string(), source };
        let mut request = Request::get(at.target.as_str())
            .header(HOST, at.host())
            .header(USER_AGENT, self.agent)
            .header(ACCEPT, "application/json, text/plain, */*;q=0.1");
        if json.is_some() {
            request = request.method(Method::POST).header(CONTENT_TYPE, "application/json");
        }
        let request = request
            .body(Full::new(json.unwrap_or_default()))
            .map_err(|source| WebError::Request { address: at.to_string(), source })?;
        let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(HEAD_BYTES_MAX)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(lost)?;
        let answer = async {
            let response = sender.send_request(request).await.map_err(lost)?;
            self.accept(at, response).await
        };
        // The connection must be polled for the answer to arrive; it may end first.
        match select(std::pin::pin!(answer), std::pin::pin!(connection)).await {
            Either::Left((answer, _)) => answer,
            Either::Right((_, answer)) => answer.await,
        }
    }

    async fn accept(
        &self,
        at: &WebAddress,
        response: Response<Incoming>,
    ) -> Result<Answer, WebError> {
        let (address, limit) = (|| at.to_string(), self.bytes_max);
        let status = response.status();
        let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
        if matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
            && let Some(location) = location
        {
            let target = at.follow(location);
            let refused = |source| WebError::Redirection { address: address(), source };
            return target.map(Answer::Redirection).map_err(refused);
        }
        if status != StatusCode::OK {
            return Err(WebError::Status { address: address(), status });
        }
        let is_chunked = response.headers().contains_key(TRANSFER_ENCODING);
        let mut body = response.into_body();
        if body.size_hint().exact().is_none() && !is_chunked {
            return Err(WebError::Endless { address: address() });
        }
        let claimed = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        let mut bytes = Vec::new();
        if claimed > limit {
            return Err(WebError::TooLarge { address: address(), limit });
        }
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|source| WebError::Lost { address: address(), source })?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > limit {
                return Err(WebError::TooLarge { address: address(), limit });
            }
            bytes.extend_from_slice(&data);
        }
        Ok(Answer::Document(bytes))
    }
}

async fn connect(at: &WebAddress) -> io::Result<TcpStream> {
    let stream = TcpStream::connect((at.peer.host.as_str(), at.peer.port)).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Reads the authorities that the system trusts, each time anew, so that a new one needs no
/// restart.
async fn trust() -> Result<ClientConfig, WebError> {
    let authorities = |why: String| WebError::Authorities { why };
    let found = tokio::task::spawn_blocking(rustls_native_certs::load_native_certs).await;
    let found = found.map_err(|error| authorities(error.to_string()))?;
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(found.certs);
    if added == 0 {
        let why: Vec<String> = found.errors.iter().map(ToString::to_string).collect();
        let why = if why.is_empty() {
            "this machine has no certificates of authorities".to_owned()
        } else {
            why.join("; ")
        };
        return Err(authorities(why));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| authorities(error.to_string()))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}
