//! Callers with a certificate who take all they can get: they get no more than their share of the
//! memory.

use std::path::Path;
use std::sync::Arc;

use api::method::Method as _;
use api::subd::{Poll, PollRequest, Prepare};
use bytes::Bytes;
use certs::authority::{Authority, AuthorityOptions, Request};
use certs::files::Replace;
use futures_util::StreamExt as _;
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rpc::client::{Client, Peer};
use rpc::tls::Security;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::process::Process;

/// What subd may take for all callers together, but for one large request at a time.
const BUDGET_MIB: u64 = 64;

type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, std::io::Error>;

/// A subd with certificates, and callers of it.
struct Lab {
    place: tempfile::TempDir,
    process: Process,
}

impl Lab {
    fn start() -> Self {
        let place = tempfile::tempdir().unwrap();
        let authority = Authority::create(&AuthorityOptions::default()).unwrap();
        for (name, power) in [("sub", "No.Power"), ("admin", "*.*"), ("other", "*.*")] {
            let request = Request {
                name: name.to_owned(),
                hosts: vec!["127.0.0.5".to_owned()],
                powers: Some(vec![power.to_owned()]),
                ..Request::default()
            };
            let issued = authority.issue(&request).unwrap();
            issued.write(&place.path().join(name), authority.ca_pem(), Replace::Any).unwrap();
        }
        let root = place.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let tls = place.path().join("sub").display().to_string();
        let process = Process::start_with(&root, &["--tls", &tls]);
        Self { place, process }
    }

    fn peer(&self) -> &Peer {
        self.process.client.peer()
    }

    /// A connection of this caller, who reads `window` bytes of each reply.
    async fn connect(&self, name: &str, window: u32) -> Option<SendRequest<Body>> {
        let stream = TcpStream::connect(self.peer().authority()).await.ok()?;
        let connector = TlsConnector::from(Arc::new(config(&self.place.path().join(name))));
        let host = ServerName::try_from("127.0.0.5").unwrap();
        let stream = connector.connect(host, stream).await.ok()?;
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size(window);
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.ok()?;
        // It ends with what it is for.
        tokio::spawn(connection);
        Some(sender)
    }

    /// The most memory that subd ever had, in MiB.
    fn peak_mib(&self) -> u64 {
        crate::attack::peak_mib(self.process.child.id())
    }

    /// Another caller is answered, and subd stops well.
    async fn finish(self) {
        let security = Security::open(&self.place.path().join("other")).unwrap();
        let client = Client::new(self.peer().clone(), &security);
        client.call::<Poll>(&PollRequest::default()).await.unwrap();
        assert_eq!(self.process.stop(), Some(0));
    }
}

fn config(directory: &Path) -> ClientConfig {
    let certificates = |name: &str| {
        let found = CertificateDer::pem_file_iter(directory.join(name)).unwrap();
        found.map(Result::unwrap).collect::<Vec<_>>()
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates("ca.pem"));
    let key = PrivateKeyDer::from_pem_file(directory.join("key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots);
    let mut config = builder.with_client_auth_cert(certificates("cert.pem"), key).unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

/// A request that claims `length` bytes, sends all but one of them, and never ends.
fn slow(method: &str, length: usize) -> hyper::Request<Body> {
    let piece = Bytes::from(vec![0; 64 << 10]);
    let pieces = (length - 1) / piece.len();
    let sent = futures_util::stream::iter(std::iter::repeat_n(piece, pieces));
    let sent = sent.map(|piece| Ok::<_, std::io::Error>(Frame::data(piece)));
    let body = StreamBody::new(sent.chain(futures_util::stream::pending()));
    hyper::Request::post(format!("https://x/rpc/{method}"))
        .header("dominator-protocol", "1")
        .header("content-length", length)
        .body(http_body_util::BodyExt::boxed_unsync(body))
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_one_slow_requests_of_one_certificate_take_no_more_than_the_budget() {
    // One of a length that a caller's share has room for, and one that counts as large.
    for (length, on_top_mib) in [(20 << 20, 0), (Prepare::REQUEST_BYTES_MAX, 128)] {
        let lab = Lab::start();
        let before = lab.peak_mib();
        let mut calls = Vec::new();
        for _ in 0..8 {
            let sender = lab.connect("admin", 1 << 20).await.unwrap();
            for _ in 0..8 {
                let mut sender = sender.clone();
                let request = slow("Subd.Prepare", length);
                calls.push(tokio::spawn(async move { sender.send_request(request).await }));
            }
        }
        assert!(calls.len() >= 61);
        // All but those that have a share are refused.
        testing::eventually_async("the others are refused", async || {
            calls.iter().filter(|call| call.is_finished()).count() >= calls.len() - 2
        })
        .await;
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        let grown = lab.peak_mib() - before;
        assert!(grown < BUDGET_MIB + on_top_mib, "it has grown by {grown} MiB");
        lab.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn crowds_who_do_not_read_what_they_asked_for_take_no_more_than_the_budget() {
    for path in ["/metrics", "/", "/rpc/Subd.Poll"] {
        let lab = Lab::start();
        let before = lab.peak_mib();
        let mut calls = Vec::new();
        for _ in 0..150 {
            // Those beyond the limit of a user are refused, some of them later.
            let Some(sender) = lab.connect("admin", 0).await else { continue };
            for _ in 0..500 {
                let request = match path.starts_with("/rpc/") {
                    true => hyper::Request::post(format!("https://x{path}"))
                        .header("content-type", "application/json"),
                    false => hyper::Request::get(format!("https://x{path}")),
                };
                let empty = if path.starts_with("/rpc/") { "{\"wait_ms\": 0}" } else { "" };
                let body = http_body_util::Full::new(Bytes::from(empty));
                let body = http_body_util::BodyExt::map_err(body, |never| match never {});
                let request = request.body(http_body_util::BodyExt::boxed_unsync(body)).unwrap();
                let mut sender = sender.clone();
                calls.push(tokio::spawn(async move { sender.send_request(request).await }));
            }
        }
        tokio::time::sleep(std::time::Duration::from_secs(3)).await;
        assert!(calls.len() >= 32 * 500);
        let grown = lab.peak_mib() - before;
        assert!(grown < BUDGET_MIB, "{path}: it has grown by {grown} MiB");
        drop(calls);
        lab.finish().await;
    }
}
