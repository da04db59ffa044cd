//! Peers that come in crowds: they take no more than their share, and nobody else's.

use std::net::SocketAddr;
use std::sync::Arc;

use api::subd::GetConfiguration;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustls::client::WantsClientCert;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::lab::{Lab, Wanted};
use super::served;

/// Connects from `source`, an address of this machine.
async fn connect(source: &str, address: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(format!("{source}:0").parse().unwrap())?;
    socket.connect(address).await
}

/// Somebody without a certificate, who asks for a page and stays.
async fn stranger(
    lab: &Lab,
    source: &str,
    address: SocketAddr,
) -> std::io::Result<TlsStream<TcpStream>> {
    let config = trusting(lab).with_no_client_auth();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let stream = connect(source, address).await?;
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    page(&mut stream, "/healthz").await?;
    Ok(stream)
}

/// The beginning of a client's configuration, which trusts the authority of `lab`.
pub fn trusting(lab: &Lab) -> ConfigBuilder<ClientConfig, WantsClientCert> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(lab.authority.pem.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
}

pub async fn page(stream: &mut TlsStream<TcpStream>, path: &str) -> std::io::Result<String> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut reply = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&reply).into_owned();
        let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
        if let (Some((_, body)), Some(length)) = (text.split_once("\r\n\r\n"), length)
            && body.len() >= length.parse().unwrap()
        {
            return Ok(body.to_owned());
        }
        if stream.read_buf(&mut reply).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// How many connections were refused for this reason.
fn refused(metrics: &str, why: &str) -> u64 {
    let name = format!("dominator_connections_refused_total{{why=\"{why}\"}} ");
    let value = metrics.lines().find_map(|line| line.strip_prefix(&name));
    value.map_or(0, |value| value.parse().unwrap())
}

#[tokio::test]
async fn strangers_from_one_address_leave_room_for_others() {
    let lab = Lab::new();
    let server = served(&lab).await;
    let address = server.address;
    lab.issue("a", &Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() });
    let mut crowd = Vec::new();
    for _ in 0..64 {
        crowd.push(stranger(&lab, "127.0.0.1", address).await.unwrap());
    }
    stranger(&lab, "127.0.0.1", address).await.unwrap_err();
    // Those that are there are answered, and so are known callers and other strangers.
    let metrics = page(&mut crowd[0], "/metrics").await.unwrap();
    assert_eq!(refused(&metrics, "strangers"), 1, "{metrics}");
    lab.client("a", address).call::<GetConfiguration>(&()).await.unwrap();
    stranger(&lab, "127.0.0.2", address).await.unwrap();
    // Whoever goes makes room.
    crowd.clear();
    while stranger(&lab, "127.0.0.1", address).await.is_err() {}
    server.stop().await;
}

#[tokio::test]
async fn who_fails_again_and_again_is_turned_away_for_a_while() {
    let lab = Lab::new();
    let server = served(&lab).await;
    let address = server.address;
    lab.issue("a", &Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() });
    let mut watch = stranger(&lab, "127.0.0.3", address).await.unwrap();
    let mut tries = 0;
    let metrics = loop {
        let mut noise = connect("127.0.0.4", address).await.unwrap();
        let _gone = noise.write_all(b"SSH-2.0-noise\r\n").await;
        drop(noise);
        tries += 1;
        if tries % 16 == 0 {
            let metrics = page(&mut watch, "/metrics").await.unwrap();
            if refused(&metrics, "failures") > 0 {
                break metrics;
            }
        }
    };
    assert!(refused(&metrics, "handshake") >= 128, "{metrics}");
    lab.client("a", address).call::<GetConfiguration>(&()).await.unwrap();
    // It is not for ever.
    while stranger(&lab, "127.0.0.4", address).await.is_err() {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    server.stop().await;
}

#[tokio::test]
async fn connections_that_say_nothing_keep_nobody_out() {
    let lab = Lab::new();
    let server = served(&lab).await;
    let address = server.address;
    lab.issue("a", &Wanted { name: "a", powers: Some(&["*.*"]), ..Wanted::default() });
    // Each connection takes two descriptors of this process.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
    // More than there are places for handshakes and for connections, from nine addresses.
    let mut silent = Vec::new();
    for number in 0..5_000 {
        let source = format!("127.0.5.{}", number % 9);
        // Those beyond the limit of their address are ended.
        silent.push(connect(&source, address).await.unwrap());
    }
    lab.client("a", address).call::<GetConfiguration>(&()).await.unwrap();
    let mut stranger = stranger(&lab, "127.0.0.1", address).await.unwrap();
    let metrics = page(&mut stranger, "/metrics").await.unwrap();
    assert!(refused(&metrics, "arriving") >= 5_000 - 9 * 256, "{metrics}");
    drop(silent);
    server.stop().await;
}
