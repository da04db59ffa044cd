//! Decides whether the certificates of a peer are trusted.

use std::sync::Arc;
use std::time::Duration;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{CertificateError, DistinguishedName, RootCertStore};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::lists::{self, Chosen, ListError};
use super::zones::{self, Zone, ZonesError};
use api::access::{Identity, IdentityKind};
use api::certificate::Certificate;

/// The longest chain of certificates.
const CHAIN_MAX: usize = 8;

/// The identity of a verified peer, and when it expires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VerifiedPeer {
    pub(super) identity: Identity,
    /// When the first certificate of its chain expires, in Unix seconds.
    pub(super) until: u64,
    /// True if an authority of its chain certifies machines only.
    pub(super) is_of_machines: bool,
}

/// The trusted authorities, with their revocation lists and zones.
#[derive(Debug)]
pub(super) struct Trust {
    authorities: Vec<Authority>,
    provider: Arc<CryptoProvider>,
}

#[derive(Debug)]
struct Authority {
    der: CertificateDer<'static>,
    /// True if there are lists under its name by another key.
    has_namesake: bool,
    subject: DistinguishedName,
    callers: Arc<dyn ClientCertVerifier>,
    servers: Arc<WebPkiServerVerifier>,
    zone: Option<Zone>,
    /// What all holders of its certificates are, if it says that.
    kind: IdentityKind,
}

/// Why authorities cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum TrustError {
    #[error("invalid certificate {number}: {what}")]
    Authority { number: usize, what: String },
    #[error(transparent)]
    List(#[from] ListError),
    #[error("a list in it cannot be used: {0}")]
    Lists(rustls::server::VerifierBuilderError),
    #[error(transparent)]
    Zones(#[from] ZonesError),
}

impl Trust {
    pub(super) fn new<'a>(
        authorities: &'a [CertificateDer<'static>],
        revoked: &[CertificateRevocationListDer<'static>],
        zones: Option<&str>,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, TrustError> {
        let bad = |number: usize, error: &dyn std::fmt::Display| TrustError::Authority {
            number: number + 1,
            what: error.to_string(),
        };
        let read = |(number, der): (usize, &CertificateDer)| {
            Certificate::read(der).map_err(|error| bad(number, &error))
        };
        let known = authorities.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
        let zones = match zones.map(zones::parse).transpose()? {
            Some(zones) if zones.is_empty() => return Err(ZonesError::Nothing.into()),
            zones => zones::assign(&zones.unwrap_or_default(), &known)?,
        };
        let revoked = lists::read(revoked)?;
        let parse = |(number, der): (usize, &'a CertificateDer<'static>)| {
            let parsed = X509Certificate::from_der(der);
            parsed.map(|(_, x509)| x509).map_err(|error| bad(number, &error))
        };
        let parsed = authorities.iter().enumerate().map(parse).collect::<Result<Vec<_>, _>>()?;
        let make = |(number, (der, zone)): (usize, (&CertificateDer<'static>, Option<Zone>))| {
            let mut roots = RootCertStore::empty();
            roots.add(der.clone()).map_err(|error| bad(number, &error))?;
            let subject = roots.subjects().remove(0);
            let Chosen { lists, has_namesake } = lists::choose(&revoked, &parsed[number], &parsed);
            let (callers, servers) =
                verifiers(roots, &lists, &provider).map_err(TrustError::Lists)?;
            let (der, kind) = (der.clone(), known[number].identity.kind);
            Ok(Authority { der, has_namesake, subject, callers, servers, zone, kind })
        };
        let made = authorities.iter().zip(zones).enumerate().map(make);
        let authorities = made.collect::<Result<_, TrustError>>()?;
        Ok(Self { authorities, provider })
    }

    pub(super) fn provider(&self) -> &CryptoProvider {
        &self.provider
    }

    pub(super) fn subjects(&self) -> Vec<DistinguishedName> {
        self.authorities.iter().map(|authority| authority.subject.clone()).collect()
    }

    /// Verifies the chain of a caller.
    pub(super) fn caller(
        &self,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<VerifiedPeer, rustls::Error> {
        let (leaf, between) = split(chain)?;
        let authority = self.first(|authority| {
            authority.callers.verify_client_cert(leaf, between, now)?;
            authority.expect_no_namesake(between)?;
            Ok(authority)
        })?;
        let mut peer = authority.verified_peer(chain)?;
        peer.identity.zone = authority.zone.as_ref().map(|zone| zone.methods.clone());
        Ok(peer)
    }

    /// Verifies the chain of the server `name`.
    pub(super) fn server(
        &self,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<VerifiedPeer, rustls::Error> {
        let (leaf, between) = split(chain)?;
        let authority = self.first(|authority| {
            authority.servers.verify_server_cert(leaf, between, name, &[], now)?;
            authority.expect_no_namesake(between)?;
            let may = |zone: &Zone| zone.has_server(&name.to_str());
            if authority.zone.as_ref().is_none_or(may) {
                return Ok(authority);
            }
            let what = format!("its authority may not vouch for servers called {}", name.to_str());
            Err(rustls::Error::General(what))
        })?;
        authority.verified_peer(chain)
    }

    /// As [`Trust::server`]. A machine's certificate that ended at most `within` ago is judged as
    /// at its end, and counts as valid until that time is over.
    pub(super) fn server_ended_within(
        &self,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        now: UnixTime,
        within: Duration,
    ) -> Result<VerifiedPeer, rustls::Error> {
        if within.is_zero() {
            return self.server(chain, name, now);
        }
        let (leaf, _) = split(chain)?;
        let leaf = Certificate::read(leaf).map_err(|error| unreadable(&error))?;
        let end = u64::try_from(leaf.not_after).unwrap_or_default();
        let until = end.saturating_add(within.as_secs());
        if now.as_secs() <= end || now.as_secs() > until {
            return self.server(chain, name, now);
        }
        if leaf.identity.kind != IdentityKind::Machine {
            let what = "its certificate has ended, and does not say that it is a machine";
            return Err(rustls::Error::General(what.to_owned()));
        }
        let end = UnixTime::since_unix_epoch(Duration::from_secs(end));
        Ok(VerifiedPeer { until, ..self.server(chain, name, end)? })
    }

    /// Returns the result of the first authority that accepts; otherwise the most specific error.
    fn first<'a, T>(
        &'a self,
        ask: impl Fn(&'a Authority) -> Result<T, rustls::Error>,
    ) -> Result<T, rustls::Error> {
        let mut best = CertificateError::UnknownIssuer.into();
        for authority in &self.authorities {
            match ask(authority) {
                Ok(good) => return Ok(good),
                Err(error) if specificity(&error) >= specificity(&best) => best = error,
                Err(_) => {}
            }
        }
        Err(best)
    }
}

fn unreadable(error: &api::certificate::CertificateError) -> rustls::Error {
    rustls::Error::General(error.to_string())
}

/// Ranks errors: an error of an authority that has not issued the certificate is less specific than
/// one of the authority that has, even if both share a name.
fn specificity(error: &rustls::Error) -> u8 {
    match error {
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => 0,
        rustls::Error::InvalidCertificate(CertificateError::BadSignature) => 1,
        _ => 2,
    }
}

impl Authority {
    /// Reads a chain that this authority vouches for.
    fn verified_peer(&self, chain: &[CertificateDer<'_>]) -> Result<VerifiedPeer, rustls::Error> {
        let read =
            |der: &CertificateDer<'_>| Certificate::read(der).map_err(|error| unreadable(&error));
        let leaf = read(&chain[0])?;
        let (mut until, mut is_of_machines) = (leaf.not_after, is_for_machines(self.kind)?);
        for between in &chain[1..] {
            let between = read(between)?;
            until = until.min(between.not_after);
            is_of_machines |= between.is_authority && is_for_machines(between.identity.kind)?;
        }
        let identity = if is_of_machines { leaf.identity.as_machine() } else { leaf.identity };
        let until = u64::try_from(until).unwrap_or_default();
        Ok(VerifiedPeer { identity, until, is_of_machines })
    }

    /// Refuses an intermediate authority with the same name, if there are lists of that name that
    /// may be its: they were left out.
    fn expect_no_namesake(&self, between: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
        if !(self.has_namesake && lists::has_namesake(&self.der, between)) {
            return Ok(());
        }
        let what = "an authority below a root has the root's name, and crl.pem holds lists of both";
        Err(rustls::Error::General(what.to_owned()))
    }
}

/// Returns true if an authority that says that all holders of its certificates are of this kind
/// certifies machines only. A kind of a later release limits its holders in an unknown way.
fn is_for_machines(kind: IdentityKind) -> Result<bool, rustls::Error> {
    match kind {
        IdentityKind::Unstated => Ok(false),
        IdentityKind::Machine => Ok(true),
        _ => {
            let what = "an authority of its chain certifies a kind of holders that is not known";
            Err(rustls::Error::General(what.to_owned()))
        }
    }
}

fn verifiers(
    roots: RootCertStore,
    revoked: &[CertificateRevocationListDer<'static>],
    provider: &Arc<CryptoProvider>,
) -> Result<
    (Arc<dyn ClientCertVerifier>, Arc<WebPkiServerVerifier>),
    rustls::server::VerifierBuilderError,
> {
    let roots = Arc::new(roots);
    let callers =
        WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(provider))
            .with_crls(revoked.iter().cloned())
            .allow_unknown_revocation_status()
            .build()?;
    let servers = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(provider))
        .with_crls(revoked.iter().cloned())
        .allow_unknown_revocation_status()
        .build()?;
    Ok((callers, servers))
}

fn split<'a, 'b>(
    chain: &'a [CertificateDer<'b>],
) -> Result<(&'a CertificateDer<'b>, &'a [CertificateDer<'b>]), rustls::Error> {
    if chain.len() > CHAIN_MAX {
        return Err(rustls::Error::General(format!("{} certificates were shown", chain.len())));
    }
    chain.split_first().ok_or(rustls::Error::NoCertificatesPresented)
}

#[cfg(test)]
mod tests;
