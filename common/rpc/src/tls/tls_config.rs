//! What a program holds to prove itself and to know others, kept as fresh as its files.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::client::Resumption;
use rustls::pki_types::ServerName;
use rustls::server::NoServerSessionStorage;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};
use tokio_util::sync::CancellationToken;

use super::explain::explain;
use super::files::{self, Files, Stamp, TlsError};
use super::trust::{Trust, TrustError};
use super::verifier::{Callers, Servers};
use crate::tls::explained_stream::{ExplainedStream, told};
use crate::tls::peer_session::{PeerSession, Role};
use api::certificate::Certificate;

/// How long before a certificate ends it is warned of.
pub const WARN_BEFORE: Duration = Duration::from_secs(30 * 86_400);

/// How often it is looked whether files have changed. They are taken when two reload agree: what is
/// being copied is not whole yet.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How often a certificate that ends soon is told of in the log.
const WARN_EVERY: Duration = Duration::from_secs(86_400);

/// The first byte of a connection in TLS: a record of the handshake.
const HANDSHAKE_RECORD: u8 = 0x16;

/// What a caller is told that speaks HTTP where TLS is spoken.
const PLAIN_REPLY: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\n\
    connection: close\r\ncontent-length: 55\r\n\r\n\
    This port speaks TLS only: use https, or --tls DIR.    ";

/// How long, and for how many bytes, a caller is listened to that was refused: what is closed with
/// bytes unread is reset, and the caller never learns why.
const REFUSED_LINGER: Duration = Duration::from_secs(1);
const REFUSED_BYTES_MAX: usize = 64 << 10;

/// How the connections of a program are protected. A clone shares everything.
#[derive(Clone)]
pub enum Security {
    /// Not at all: `--insecure`.
    Insecure,
    /// By TLS.
    Tls(Arc<TlsConfig>),
}

impl std::fmt::Debug for Security {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Insecure => formatter.write_str("Insecure"),
            Self::Tls(config) => write!(formatter, "Tls({})", config.dir.display()),
        }
    }
}

/// The files of one directory, in use.
pub struct TlsConfig {
    dir: PathBuf,
    credentials: watch::Sender<Arc<Credentials>>,
}

/// What was seen of files, look by look.
#[derive(Default)]
struct ReloadState {
    /// What the last look has seen.
    last: Option<Stamp>,
    /// What cannot be used, whatever happens, unless it changes.
    refused: Option<Stamp>,
    /// What was told of in the log.
    told: Option<Stamp>,
}

/// What was made of files.
pub(super) struct Credentials {
    own: Certificate,
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    pub(super) trust: Arc<Trust>,
    stamp: Stamp,
}

impl Security {
    /// TLS with the files of `dir`; [`super::FILES`] says which.
    ///
    /// # Errors
    ///
    /// [`TlsError`].
    pub fn open(dir: &Path) -> Result<Self, TlsError> {
        let credentials = Arc::new(Credentials::read(dir)?);
        let credentials = watch::Sender::new(credentials);
        Ok(Self::Tls(Arc::new(TlsConfig { dir: dir.to_owned(), credentials })))
    }

    /// True for [`Security::Insecure`].
    #[must_use]
    pub fn is_insecure(&self) -> bool {
        matches!(self, Self::Insecure)
    }

    /// The scheme of addresses: `https`, or `http`.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        if self.is_insecure() { "http" } else { "https" }
    }

    /// When the program's own certificate ends, in Unix seconds.
    #[must_use]
    pub fn ends(&self) -> Option<i64> {
        match self {
            Self::Insecure => None,
            Self::Tls(config) => Some(config.credentials.borrow().own.not_after),
        }
    }

    /// True if the program's own certificate has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ends().is_some_and(|ends| ends <= now().as_secs().cast_signed())
    }

    /// What there is to warn of: that the program's own certificate ends within [`WARN_BEFORE`],
    /// or has ended.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        ending(self.ends()?, now().as_secs().cast_signed())
    }

    /// Takes files that change, and tells of a certificate that ends soon, until `stop` is
    /// cancelled.
    pub async fn keep(&self, stop: CancellationToken) {
        let Self::Tls(config) = self else { return };
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let (mut warned, mut reload) = (None, ReloadState::default());
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            // Five questions to the kernel about small files: no thread is worth it.
            if config.refresh(&mut reload) {
                warned = None;
            }
            let is_due = warned.is_none_or(|at: tokio::time::Instant| at.elapsed() > WARN_EVERY);
            if is_due && let Some(warning) = self.warning() {
                tracing::warn!("{warning}; renew it with domtool cert issue");
                warned = Some(tokio::time::Instant::now());
            }
        }
    }
}

/// The warning of a certificate that ends at `ends`, if there is one at `now`; in Unix seconds.
fn ending(ends: i64, now: i64) -> Option<String> {
    let left = ends - now;
    let at = jiff::Timestamp::from_second(ends)
        .map_or_else(|_| "an unknown time".to_owned(), |at| at.to_string());
    match left {
        ..=0 => Some(format!("the certificate of this program has ended at {at}")),
        1..86_400 => Some(format!("the certificate of this program ends today, at {at}")),
        _ if left > WARN_BEFORE.as_secs().cast_signed() => None,
        _ => {
            let days = left / 86_400;
            let plural = if days == 1 { "" } else { "s" };
            Some(format!("the certificate of this program ends in {days} day{plural}, at {at}"))
        }
    }
}

/// The time by the wall clock, since 1970.
pub(super) fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

impl ReloadState {
    /// Takes note of a look that sees `stamp`; true if files must be read that are not those of
    /// `taken`.
    fn is_due(&mut self, stamp: &Stamp, taken: &Stamp) -> bool {
        let is_settled = self.last.as_ref() == Some(stamp);
        self.last = Some(stamp.clone());
        is_settled && stamp != taken && self.refused.as_ref() != Some(stamp)
    }

    /// Takes note that the files of `stamp` could not be taken; true if it must be told. What
    /// could not be read, for want of descriptors or by a fault of the disk, may be read later.
    fn refuse(&mut self, stamp: Stamp, error: &TlsError) -> bool {
        if !matches!(error, TlsError::Read { .. }) {
            self.refused = Some(stamp.clone());
        }
        self.told.replace(stamp.clone()) != Some(stamp)
    }
}

impl TlsConfig {
    /// Takes the files if they have changed, are whole and are right; true if so. What is wrong
    /// with them is told once.
    fn refresh(&self, reload: &mut ReloadState) -> bool {
        let stamp = files::stamp(&self.dir);
        if !reload.is_due(&stamp, &self.credentials.borrow().stamp) {
            return false;
        }
        match Credentials::read(&self.dir) {
            // They have changed while they were read: the next look is at others.
            Ok(credentials) if credentials.stamp != stamp || files::stamp(&self.dir) != stamp => {
                false
            }
            Ok(credentials) => {
                let ends = credentials.own.not_after;
                tracing::info!(dir = %self.dir.display(), ends, "certificates taken");
                self.credentials.send_replace(Arc::new(credentials));
                true
            }
            Err(error) => {
                if reload.refuse(stamp, &error) {
                    let error = model::report::report(&error);
                    tracing::warn!("certificates not taken, the former stay in force: {error}");
                }
                false
            }
        }
    }

    /// Makes the server's side of a connection of `stream`. With it comes who the caller is, if it
    /// has shown a certificate.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
    ) -> io::Result<(server::TlsStream<TcpStream>, Option<PeerSession>)> {
        let mut first = [0];
        if stream.peek(&mut first).await? == 1 && first != [HANDSHAKE_RECORD] {
            refuse(stream, PLAIN_REPLY).await;
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the caller speaks no TLS"));
        }
        let config = Arc::clone(&self.credentials.borrow().server);
        let accepted = TlsAcceptor::from(config).accept(stream).into_fallible().await;
        let stream = match accepted {
            Ok(stream) => stream,
            Err((error, stream)) => {
                refuse(stream, &[]).await;
                return Err(told(error));
            }
        };
        let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
        if shown.is_empty() {
            return Ok((stream, None));
        }
        let chain = shown.iter().map(|one| one.clone().into_owned()).collect();
        let session = PeerSession::new(self.credentials.subscribe(), chain, Role::Caller);
        let session = session.map_err(|error| io::Error::other(explain(&error)))?;
        Ok((stream, Some(session)))
    }

    /// Makes the client's side of a connection of `stream`, if the server at its other end is
    /// `host`.
    pub(crate) async fn connect(
        &self,
        stream: TcpStream,
        host: &str,
    ) -> io::Result<(ExplainedStream<client::TlsStream<TcpStream>>, PeerSession)> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| io::Error::other(format!("`{host}` can be in no certificate")))?;
        let config = Arc::clone(&self.credentials.borrow().client);
        let stream =
            TlsConnector::from(config).connect(name.clone(), stream).await.map_err(told)?;
        let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let chain = shown.iter().map(|one| one.clone().into_owned()).collect();
        let session = PeerSession::new(self.credentials.subscribe(), chain, Role::Server(name));
        let session = session.map_err(|error| io::Error::other(explain(&error)))?;
        Ok((ExplainedStream(stream), session))
    }
}

/// Says `last`, and listens a little, so that the caller gets to read it.
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
    // A caller that is gone wants no explanation.
    let _gone = tokio::time::timeout(REFUSED_LINGER, listen).await;
}

impl Credentials {
    fn read(dir: &Path) -> Result<Self, TlsError> {
        let Files { chain, key, authorities, revoked, zones, stamp } = Files::read(dir)?;
        let content = |path: PathBuf, what: String| TlsError::Content { path, what };
        let of_certificate = |what: String| content(files::certificate_of(dir), what);
        let own = Certificate::read(&chain[0])
            .map_err(|error| of_certificate(model::report::report(&error)))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let trust = Trust::new(&authorities, &revoked, zones.as_deref(), Arc::clone(&provider));
        let trust = trust.map_err(|error| match error {
            TrustError::Authority { .. } => content(files::authorities_of(dir), error.to_string()),
            TrustError::List(_) | TrustError::Lists(_) => {
                content(files::revoked_of(dir), error.to_string())
            }
            TrustError::Zones(source) => TlsError::Zones { path: files::zones_of(dir), source },
        })?;
        let trust = Arc::new(trust);
        let unusable = |error: rustls::Error| of_certificate(explain(&error));
        let callers = Callers { trust: Arc::clone(&trust), subjects: trust.subjects() };
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_client_cert_verifier(Arc::new(callers))
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(unusable)?;
        server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Servers { trust: Arc::clone(&trust) }))
            .with_client_auth_cert(chain, key)
            .map_err(unusable)?;
        client.alpn_protocols = vec![b"h2".to_vec()];
        client.resumption = Resumption::disabled();
        Ok(Self { own, server: Arc::new(server), client: Arc::new(client), trust, stamp })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use certs::{
        authority::{Authority, AuthorityOptions, Request},
        place::Replace,
    };

    #[test]
    fn the_end_of_a_certificate_is_told_from_thirty_days_before() {
        const DAY: i64 = 86_400;
        let ends = 1_800_000_000;
        let at = "2027-01-15T08:00:00Z";
        let table = [
            (31 * DAY, None),
            (30 * DAY, Some(format!("ends in 30 days, at {at}"))),
            (DAY + 5, Some(format!("ends in 1 day, at {at}"))),
            (5, Some(format!("ends today, at {at}"))),
            (0, Some(format!("has ended at {at}"))),
            (-DAY, Some(format!("has ended at {at}"))),
        ];
        for (left, want) in table {
            let want = want.map(|text| format!("the certificate of this program {text}"));
            assert_eq!(ending(ends, ends - left), want, "{left}");
        }
    }

    /// A directory with certificates, and what holds them.
    fn kept() -> (tempfile::TempDir, Arc<TlsConfig>, Authority) {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create(&AuthorityOptions::default()).unwrap();
        let issued = authority.issue(&Request { name: "web1".into(), ..Request::default() });
        let tls = directory.path().join("tls");
        issued.unwrap().write(&tls, authority.ca_pem(), Replace::Own).unwrap();
        let Security::Tls(config) = Security::open(&tls).unwrap() else { unreachable!() };
        (directory, config, authority)
    }

    #[test]
    fn what_was_refused_is_taken_when_its_mode_is_right() {
        let (_directory, config, authority) = kept();
        let mut reload = ReloadState::default();
        let mut refresh = || [config.refresh(&mut reload), config.refresh(&mut reload)];
        assert_eq!(refresh(), [false, false]);
        let key = config.dir.join("key.pem");
        // Also where the clock of the files is coarse.
        let mode = |mode| {
            let before = files::stamp(&config.dir);
            while files::stamp(&config.dir) == before {
                fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
            }
        };
        mode(0o644);
        let list = authority.revocation_list(&[], 1).unwrap();
        fs::write(config.dir.join("crl.pem"), list).unwrap();
        assert_eq!(refresh(), [false, false]);
        mode(0o600);
        assert_eq!(refresh(), [false, true]);
        assert_eq!(refresh(), [false, false]);
    }

    #[test]
    fn files_are_taken_when_they_stay_as_they_are() {
        let (_directory, config, authority) = kept();
        let mut reload = ReloadState::default();
        let mut refresh = || config.refresh(&mut reload);
        assert!(!refresh());
        let lists = [1, 2].map(|number| authority.revocation_list(&[], number).unwrap()).concat();
        let path = config.dir.join("crl.pem");
        // The copy goes on between two reload: half of it is as good as whole.
        let half = lists.find("END X509 CRL-----\n").unwrap() + "END X509 CRL-----\n".len();
        for copied in [&lists[..half], &lists] {
            fs::write(&path, copied).unwrap();
            assert!(!refresh());
        }
        assert!(refresh());
        // One that was cut off limits nothing, and is never taken.
        for cut in ["", &lists[..half - 20]] {
            fs::write(&path, cut).unwrap();
            assert_eq!([refresh(), refresh(), refresh()], [false; 3]);
        }
        fs::remove_file(&path).unwrap();
        fs::write(config.dir.join("zones.toml"), "").unwrap();
        assert_eq!([refresh(), refresh(), refresh()], [false; 3]);
        fs::remove_file(config.dir.join("zones.toml")).unwrap();
        assert_eq!([refresh(), refresh(), refresh()], [false, true, false]);
    }

    #[test]
    fn what_cannot_be_read_is_tried_again_and_told_once() {
        let failed = |source: io::ErrorKind| TlsError::Read {
            path: PathBuf::from("crl.pem"),
            source: source.into(),
        };
        let wrong = TlsError::Content { path: PathBuf::from("crl.pem"), what: "no".to_owned() };
        let (taken, next) = (vec![], vec![None]);
        let mut reload = ReloadState::default();
        assert_eq!([(); 2].map(|()| reload.is_due(&next, &taken)), [false, true]);
        assert!(reload.refuse(next.clone(), &failed(io::ErrorKind::PermissionDenied)));
        assert!(reload.is_due(&next, &taken));
        assert!(!reload.refuse(next.clone(), &failed(io::ErrorKind::Other)));
        assert!(reload.is_due(&next, &taken));
        assert!(!reload.refuse(next.clone(), &wrong));
        assert!(!reload.is_due(&next, &taken));
        assert_eq!([(); 2].map(|()| reload.is_due(&taken, &taken)), [false, false]);
    }

    #[test]
    fn the_reply_to_plain_http_is_as_long_as_it_says() {
        let text = std::str::from_utf8(PLAIN_REPLY).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{}", body.len());
    }
}
