//! A stream whose errors are in words: in TLS 1.3 a client learns with the first bytes that it
//! reads whether its certificate was good, and what passes HTTP/2 keeps only the text of an error.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::explain::explain;

/// The same error, with what rustls says in words.
pub(super) fn told(error: io::Error) -> io::Error {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        Some(inner) => io::Error::new(error.kind(), explain(inner)),
        None => error,
    }
}

/// `S`, with errors in words.
pub(crate) struct ExplainedStream<S>(pub(super) S);

impl<S: AsyncRead + Unpin> AsyncRead for ExplainedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer).map_err(told)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ExplainedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes).map_err(told)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, slices).map_err(told)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context).map_err(told)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context).map_err(told)
    }
}
