//! Makes the configurations of TLS from the files of one directory.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::Resumption;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::{ClientConfig, ServerConfig};

use super::explain::explain;
use super::files::{self, Files, FilesDigest, Stamp, TlsError};
use super::trust::{Trust, TrustError};
use super::verifier::{Callers, Servers};
use api::certificate::Certificate;
use model::display::error_chain;
use system::clock::since_epoch;

/// The content of the files of one directory, ready to use in handshakes.
pub(super) struct Credentials {
    pub(super) own: Certificate,
    pub(super) own_chain: Vec<CertificateDer<'static>>,
    pub(super) server: Arc<ServerConfig>,
    pub(super) client: Arc<ClientConfig>,
    pub(super) trust: Arc<Trust>,
    pub(super) digest: FilesDigest,
    pub(super) stamp: Stamp,
}

impl Credentials {
    pub(super) fn read(dir: &Path) -> Result<Self, TlsError> {
        Self::of(dir, Files::read(dir)?)
    }

    /// Makes them from files of `dir`.
    pub(super) fn of(dir: &Path, files: Files) -> Result<Self, TlsError> {
        let Files { chain, key, authorities, revoked, zones, digest, stamp } = files;
        let own_chain = chain.clone();
        let content = |path: PathBuf, what: String| TlsError::Content { path, what };
        let of_certificate = |what: String| content(dir.join(files::CERTIFICATE), what);
        let own =
            Certificate::read(&chain[0]).map_err(|error| of_certificate(error_chain(&error)))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let trust = Trust::new(&authorities, &revoked, zones.as_deref(), Arc::clone(&provider));
        let trust = trust.map_err(|error| match error {
            TrustError::Authority { .. } => {
                content(dir.join(files::AUTHORITIES), error.to_string())
            }
            TrustError::List(_) | TrustError::Lists(_) => {
                content(dir.join(files::REVOKED), error.to_string())
            }
            TrustError::Zones(source) => TlsError::Zones { path: dir.join(files::ZONES), source },
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
            .with_custom_certificate_verifier(Arc::new(servers(&trust, Duration::ZERO)))
            .with_client_auth_cert(chain, key)
            .map_err(unusable)?;
        client.alpn_protocols = vec![b"h2".to_vec()];
        client.resumption = Resumption::disabled();
        let (server, client) = (Arc::new(server), Arc::new(client));
        Ok(Self { own, own_chain, server, client, trust, digest, stamp })
    }
    /// Returns why those that trust the same authorities do not accept the certificate; `None` if
    /// they do.
    pub(super) fn refuses_itself(&self) -> Option<String> {
        let now = UnixTime::since_unix_epoch(since_epoch());
        self.trust.caller(&self.own_chain, now).err().map(|error| explain(&error))
    }

    /// Returns the configuration of a client that also accepts a machine whose certificate ended at
    /// most so long ago.
    pub(super) fn client_of_ended(&self, ended_within: Duration) -> Arc<ClientConfig> {
        if ended_within.is_zero() {
            return Arc::clone(&self.client);
        }
        let mut client = ClientConfig::clone(&self.client);
        let servers = Arc::new(servers(&self.trust, ended_within));
        client.dangerous().set_certificate_verifier(servers);
        Arc::new(client)
    }
}

fn servers(trust: &Arc<Trust>, ended_within: Duration) -> Servers {
    Servers { trust: Arc::clone(trust), ended_within }
}
