//! One request and its response on an HTTP/2 connection.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Reason, RecvStream, SendStream};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Frame, SizeHint};
use hyper::header::{CONTENT_LENGTH, HeaderValue};
use hyper::{Request, Response};

use super::keep_alive::LastHeard;
use crate::body::{Body, BoxError, SLICE_BYTES};

/// Why a request got no response.
pub(super) enum Failure {
    /// The connection had ended and nothing was sent; returns the request, and why it ended.
    Unsent(Box<Request<Body>>, BoxError),
    /// The connection broke, or the body could not be read.
    Lost(BoxError),
}

/// Sends `request`, and returns the response when its head has arrived. A response that arrives
/// before the whole body was sent is a refusal: the rest is not sent.
pub(super) async fn exchange(
    mut sender: SendRequest<Bytes>,
    request: Box<Request<Body>>,
    heard: &Arc<LastHeard>,
) -> Result<Response<Reply>, Failure> {
    let (response, sending) = {
        let (mut head, body) = (*request).into_parts();
        if let Some(length) = body.size_hint().exact() {
            head.headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        let unsent = |head, body, error: h2::Error| {
            Failure::Unsent(Box::new(Request::from_parts(head, body)), error.into())
        };
        if let Err(error) = poll_fn(|context| sender.poll_ready(context)).await {
            return Err(unsent(head, body, error));
        }
        let request = Request::from_parts(head.clone(), ());
        match sender.send_request(request, body.is_end_stream()) {
            Ok((response, _)) if body.is_end_stream() => (response, None),
            Ok((response, stream)) => (response, Some(send(body, stream))),
            Err(error) => return Err(unsent(head, body, error)),
        }
    };
    let mut response = pin!(response);
    let answered = match sending {
        None => response.await,
        Some(sending) => tokio::select! {
            biased;
            answered = &mut response => answered,
            sent = sending => {
                sent.map_err(Failure::Lost)?;
                response.await
            }
        },
    };
    let (head, stream) = answered.map_err(|error| Failure::Lost(error.into()))?.into_parts();
    heard.note();
    let length = head.headers.get(CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
    Ok(Response::from_parts(head, Reply { stream, length, heard: Arc::clone(heard) }))
}

/// Sends `body`, as fast as the server accepts it. If the server refuses the rest that is not an
/// error here: its response explains it.
async fn send(mut body: Body, mut stream: SendStream<Bytes>) -> Result<(), BoxError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.inspect_err(|_| stream.send_reset(Reason::CANCEL))?;
        let Ok(mut data) = frame.into_data() else { continue };
        let is_last = body.is_end_stream();
        // Before its head was sent, a stream has no capacity: with a wait for it, most requests
        // would be two packets, and would wake this task and that of the connection twice.
        if is_last && data.len() <= SLICE_BYTES {
            let _is_ended = stream.send_data(data, true);
            return Ok(());
        }
        while !data.is_empty() {
            stream.reserve_capacity(data.len());
            if stream.capacity() == 0
                && !matches!(poll_fn(|context| stream.poll_capacity(context)).await, Some(Ok(_)))
            {
                return Ok(());
            }
            let part = data.split_to(stream.capacity().min(data.len()));
            if stream.send_data(part, is_last && data.is_empty()).is_err() {
                return Ok(());
            }
        }
        if is_last {
            return Ok(());
        }
    }
    // The server may have ended the stream meanwhile.
    let _is_ended = stream.send_data(Bytes::new(), true);
    Ok(())
}

/// The body of a response, as it arrives. Dropping it before its end cancels the response.
pub(super) struct Reply {
    stream: RecvStream,
    /// The stated length, in bytes.
    length: Option<u64>,
    heard: Arc<LastHeard>,
}

impl hyper::body::Body for Reply {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        let next = match ready!(self.stream.poll_data(context)) {
            Some(Ok(data)) => {
                self.heard.note();
                // Flow control: the caller has these bytes.
                self.stream.flow_control().release_capacity(data.len()).map(|()| data)
            }
            Some(Err(error)) => Err(error),
            None => return Poll::Ready(None),
        };
        Poll::Ready(match next {
            Ok(data) => Some(Ok(Frame::data(data))),
            // A server that refuses the rest of the request has sent its complete response (RFC
            // 9113, 8.1).
            Err(error) if error.is_reset() && error.reason() == Some(Reason::NO_ERROR) => None,
            Err(error) => Some(Err(error)),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map(SizeHint::with_exact).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::{self, streamed};
    use crate::pace::Pace;
    use futures_util::StreamExt as _;
    use h2::server::SendResponse;
    use std::time::Duration;
    use tokio::sync::oneshot;

    const CHUNK: &[u8] = &[7; 1 << 15];

    /// How much of an endless body the server has received when its stream ended.
    type Received = oneshot::Receiver<usize>;

    /// Sends an endless body to a server that answers as `answer` does when the head has come.
    async fn ask(answer: fn(SendResponse<Bytes>)) -> (Result<Response<Reply>, Failure>, Received) {
        let (near, far) = tokio::io::duplex(1 << 16);
        let (counted, received) = oneshot::channel();
        let mut counted = Some(counted);
        tokio::spawn(async move {
            let mut server = h2::server::handshake(far).await.unwrap();
            while let Some(Ok((request, respond))) = server.accept().await {
                answer(respond);
                let (mut body, counted) = (request.into_body(), counted.take().unwrap());
                tokio::spawn(async move {
                    let mut count = 0;
                    while let Some(Ok(data)) = body.data().await {
                        count += data.len();
                        body.flow_control().release_capacity(data.len()).unwrap();
                    }
                    let _nobody_asks = counted.send(count);
                });
            }
        });
        let (sender, connection) = h2::client::handshake(near).await.unwrap();
        tokio::spawn(connection);
        let endless = futures_util::stream::repeat_with(|| Ok(Bytes::from_static(CHUNK)));
        let request = Request::post("http://host/").body(streamed(endless)).unwrap();
        (exchange(sender, Box::new(request), &Arc::new(LastHeard::new())).await, received)
    }

    async fn body_of(response: Result<Response<Reply>, Failure>) -> Result<Bytes, String> {
        let Ok(response) = response else { return Err("no response".to_owned()) };
        let read =
            body::read(response.into_body(), 100, Duration::from_secs(60), Pace::any()).await;
        read.map_err(|error| model::display::error_chain(&error))
    }

    #[tokio::test]
    async fn a_refusal_ends_an_upload_that_never_would() {
        let (response, received) = ask(|mut respond| {
            let mut body = respond.send_response(Response::new(()), false).unwrap();
            body.send_data(Bytes::from_static(b"no"), true).unwrap();
        })
        .await;
        assert_eq!(body_of(response).await, Ok(Bytes::from_static(b"no")));
        received.await.unwrap();
    }

    #[tokio::test]
    async fn a_body_that_was_cut_is_no_whole_one() {
        let (response, _) = ask(|mut respond| {
            let mut body = respond.send_response(Response::new(()), false).unwrap();
            body.send_data(Bytes::from_static(b"half"), false).unwrap();
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(10)).await;
                body.send_reset(Reason::CANCEL);
            });
        })
        .await;
        let cut = "the body was cut: stream error received: stream no longer needed";
        assert_eq!(body_of(response).await, Err(cut.to_owned()));
    }

    #[tokio::test]
    async fn a_body_is_sent_whole_and_no_faster_than_it_is_taken() {
        let (near, far) = tokio::io::duplex(1 << 10);
        tokio::spawn(async move {
            let mut server = h2::server::handshake(far).await.unwrap();
            let (request, mut respond) = server.accept().await.unwrap().unwrap();
            let count = tokio::spawn(async move {
                let mut body = request.into_body();
                let mut count = 0_usize;
                while let Some(data) = body.data().await {
                    let length = data.unwrap().len();
                    count += length;
                    body.flow_control().release_capacity(length).unwrap();
                }
                let mut body = respond.send_response(Response::new(()), false).unwrap();
                body.send_data(Bytes::from(count.to_string()), true).unwrap();
            });
            while server.accept().await.is_some() {}
            count.await.unwrap();
        });
        let (sender, connection) = h2::client::handshake(near).await.unwrap();
        tokio::spawn(connection);
        let chunks = futures_util::stream::repeat_with(|| Ok(Bytes::from_static(CHUNK))).take(32);
        let request = Request::post("http://host/").body(streamed(chunks)).unwrap();
        let response = exchange(sender, Box::new(request), &Arc::new(LastHeard::new())).await;
        assert_eq!(body_of(response).await, Ok(Bytes::from((1 << 20).to_string())));
    }
}
