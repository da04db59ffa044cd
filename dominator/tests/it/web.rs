//! A web server on a port of this machine, which answers what the test says.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// Answers by path; what is not there is answered with 404.
#[derive(Clone, Default)]
pub struct Web {
    answers: Arc<Mutex<BTreeMap<String, String>>>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Web {
    /// Starts a server on this address; gives its port.
    pub async fn start(&self, address: &str) -> u16 {
        self.listen(address, None).await
    }

    /// As [`Web::start`], with TLS; gives its port and its certificate as PEM.
    pub async fn start_secure(&self, address: &str) -> (u16, String) {
        let made = rcgen::generate_simple_self_signed([address.to_owned()]).unwrap();
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], PrivateKeyDer::from(key))
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        (self.listen(address, Some(acceptor)).await, made.cert.pem())
    }

    async fn listen(&self, address: &str, tls: Option<TlsAcceptor>) -> u16 {
        let listener = TcpListener::bind((address, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let web = self.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                match &tls {
                    None => web.answer(stream).await,
                    // A client that does not trust us hangs up.
                    Some(tls) => {
                        if let Ok(stream) = tls.accept(stream).await {
                            web.answer(stream).await;
                        }
                    }
                }
            }
        });
        port
    }

    async fn answer(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin) {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => request.push(byte),
                Err(_) => return,
            }
        }
        let request = String::from_utf8(request).unwrap();
        let path = request.split(' ').nth(1).unwrap().to_owned();
        self.requests.lock().unwrap().push(request);
        let missing = || "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_owned();
        let answer = self.answers.lock().unwrap().get(&path).cloned().unwrap_or_else(missing);
        // It may have hung up, of a document that it does not like.
        let _gone = stream.write_all(answer.as_bytes()).await;
        let _gone = stream.shutdown().await;
    }

    /// Answers `path` with this document.
    pub fn document(&self, path: &str, text: &str) {
        let length = text.len();
        self.raw(path, &format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{text}"));
    }

    /// Answers `path` with a redirection.
    pub fn redirect(&self, path: &str, location: &str) {
        let answer = format!("HTTP/1.1 302 Found\r\nlocation: {location}\r\n\r\n");
        self.raw(path, &answer);
    }

    /// Answers `path` with these bytes.
    pub fn raw(&self, path: &str, answer: &str) {
        self.answers.lock().unwrap().insert(path.to_owned(), answer.to_owned());
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}
