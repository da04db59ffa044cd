//! Makes TLS connections, as a server and as a client.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use super::explain::{explain, has_ended};
use super::peer_session::{PeerSession, Role};
use super::successor::CallerProof;
use super::tls_config::TlsConfig;

/// The first byte of a connection in TLS: a record of the handshake.
const HANDSHAKE_RECORD: u8 = 0x16;

/// The reply to a caller that speaks plain HTTP.
const PLAIN_REPLY: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\n\
    connection: close\r\ncontent-length: 55\r\n\r\n\
    This port speaks TLS only: use https, or --tls DIR.    ";

/// The reply to a caller that speaks HTTP/2 without TLS: its settings, and GOAWAY with the error
/// `INADEQUATE_SECURITY` and the reason (RFC 9113, 6.5 and 6.8).
const PLAIN_HTTP2_REPLY: &[u8] = b"\0\0\0\x04\0\0\0\0\0\
    \0\0\x28\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0c\
    this port speaks TLS only: --tls";

/// The first bytes of HTTP/2.
const HTTP2_PREFACE: &[u8] = b"PRI";

/// How long, and for how many bytes, a refused caller is read. A connection that is closed with
/// unread bytes is reset, and the caller never sees the reason.
const REFUSED_LINGER: Duration = Duration::from_secs(1);
const REFUSED_BYTES_MAX: usize = 64 << 10;

impl TlsConfig {
    /// Makes the server's side of the handshake on `stream`. Returns the session of a caller that
    /// showed a certificate.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
    ) -> io::Result<(server::TlsStream<TcpStream>, Option<PeerSession>)> {
        let mut first = [0; HTTP2_PREFACE.len()];
        let length = stream.peek(&mut first).await?;
        if length > 0 && first[0] != HANDSHAKE_RECORD {
            let reply = match first == *HTTP2_PREFACE {
                true => PLAIN_HTTP2_REPLY,
                false => PLAIN_REPLY,
            };
            refuse(stream, reply).await;
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the caller speaks no TLS"));
        }
        let credentials = Arc::clone(&self.credentials.borrow());
        let config = Arc::clone(&credentials.server);
        let accepted = TlsAcceptor::from(config).accept(stream).into_fallible().await;
        let stream = match accepted {
            Ok(stream) => stream,
            Err((error, stream)) => {
                refuse(stream, &[]).await;
                return Err(explained(error));
            }
        };
        let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
        if shown.is_empty() {
            return Ok((stream, None));
        }
        let proof = CallerProof {
            chain: shown.iter().map(|one| one.clone().into_owned()).collect(),
            server_name: stream.get_ref().1.server_name().map(str::to_owned),
            files: credentials.digest,
        };
        let session = PeerSession::new(self.credentials.subscribe(), proof, Role::Caller);
        let session = session.map_err(|error| io::Error::other(explain(&error)))?;
        Ok((stream, Some(session)))
    }

    /// Makes the client's side of the handshake on `stream`, with the server `host`. That may be a
    /// machine whose certificate ended at most so long ago.
    pub(crate) async fn connect(
        &self,
        stream: TcpStream,
        host: &str,
        ended_within: Duration,
    ) -> io::Result<(ExplainedStream<client::TlsStream<TcpStream>>, PeerSession)> {
        let name = ServerName::try_from(host.to_owned()).map_err(|_| {
            io::Error::other(format!("`{host}` is not a name that a certificate can have"))
        })?;
        let credentials = Arc::clone(&self.credentials.borrow());
        let config = credentials.client_of_ended(ended_within);
        let stream =
            TlsConnector::from(config).connect(name.clone(), stream).await.map_err(explained)?;
        let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let chain = shown.iter().map(|one| one.clone().into_owned()).collect();
        let proof = CallerProof { chain, server_name: None, files: credentials.digest };
        let role = Role::Server(name, ended_within);
        let session = PeerSession::new(self.credentials.subscribe(), proof, role);
        let session = session.map_err(|error| io::Error::other(explain(&error)))?;
        Ok((ExplainedStream(stream), session))
    }
}

/// Sends `last`, and reads for a short time, so that the caller can read it.
async fn refuse(mut stream: TcpStream, last: &[u8]) {
    let listen = async {
        stream.write_all(last).await?;
        stream.shutdown().await?;
        let mut left = REFUSED_BYTES_MAX;
        let mut bytes = [0; 1_024];
        loop {
            match stream.read(&mut bytes).await? {
                0 => return Ok::<_, io::Error>(()),
                count if count >= left => return Ok(()),
                count => left -= count,
            }
        }
    };
    // The caller may have disconnected.
    let _gone = tokio::time::timeout(REFUSED_LINGER, listen).await;
}

/// The certificate of the server has ended, which need not be all that is wrong with it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct EndedCertificate(String);

/// Replaces the error of rustls in `error` by an explanation, and the text of rustls for a
/// connection that was cut, which has the address of its documentation.
fn explained(error: io::Error) -> io::Error {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        // What answers is something else.
        Some(inner @ rustls::Error::InvalidMessage(_)) => {
            io::Error::new(io::ErrorKind::Unsupported, explain(inner))
        }
        Some(inner) if has_ended(inner) => {
            io::Error::new(error.kind(), EndedCertificate(explain(inner)))
        }
        Some(inner) => io::Error::new(error.kind(), explain(inner)),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            io::Error::new(error.kind(), "the other side has cut the connection")
        }
        None => error,
    }
}

/// A stream whose TLS errors are explained. In TLS 1.3 a client learns with the first bytes that it
/// reads whether its certificate was accepted, and HTTP/2 passes on only the text of an error.
pub(crate) struct ExplainedStream<S>(S);

impl<S: AsyncRead + Unpin> AsyncRead for ExplainedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer).map_err(explained)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ExplainedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes).map_err(explained)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, slices).map_err(explained)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context).map_err(explained)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context).map_err(explained)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reply_to_plain_http_is_as_long_as_it_says() {
        let text = std::str::from_utf8(PLAIN_REPLY).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{}", body.len());
    }

    #[test]
    fn the_reply_to_http2_has_the_reason_of_its_goaway() {
        let (settings, goaway) = PLAIN_HTTP2_REPLY.split_at(9);
        assert_eq!(settings, [0, 0, 0, 4, 0, 0, 0, 0, 0]);
        let (head, payload) = goaway.split_at(9);
        let length = u8::try_from(payload.len()).unwrap();
        assert_eq!(head, [0, 0, length, 7, 0, 0, 0, 0, 0]);
        assert_eq!(payload[..8], [0, 0, 0, 0, 0, 0, 0, 0xc]);
        assert_eq!(payload[8..], *b"this port speaks TLS only: --tls");
    }

    #[test]
    fn a_connection_that_was_cut_is_explained_without_an_address() {
        let error = io::Error::new(io::ErrorKind::UnexpectedEof, "see https://docs.rs/rustls");
        assert_eq!(explained(error).to_string(), "the other side has cut the connection");
    }
}
