//! Decides what the certificate of a machine says, and when it is renewed.
// tidy: core

use core::fmt;
use core::time::Duration;
use std::path::PathBuf;

use api::access::IdentityKind;
use certs::authority::Request;
use certs::pairs::WantedPair;
use model::mdb::Machine;
use model::object::Algorithm;
use model::path::TreePath;

/// The default lifetime of a certificate.
pub const LIFETIME: Duration = Duration::from_secs(30 * 86_400);

/// Machines renew their certificates over this part of the time until then, so that those of a
/// fleet that were made together are not renewed together.
const SPREAD: f64 = 0.1;

/// Why there is no certificate for a key of a machine.
const KEY_NOT_KNOWN: &str = "the key of the machine is not known: a dominator tells it that has \
                             connected to the machine by TLS, and that may call \
                             FileGenerator.GetSecrets";

/// Machines whose own TLS files are below this directory keep their keys.
const OWN_DIRECTORY: &str = "/etc/dominator/tls";

/// True if the key of a certificate at `path` stays on the machine, unless the configuration says
/// something else.
#[must_use]
pub fn keeps_key(path: &TreePath) -> bool {
    TreePath::new(OWN_DIRECTORY).is_ok_and(|own| path.starts_with(&own))
}

/// How certificates are made for machines.

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateSettings {
    /// The directory of the authority.
    pub authority: PathBuf,
    /// The path of the certificate, on machines.
    pub path: TreePath,
    /// That of its key, which is made with it; `None` if machines have their keys.
    pub key_path: Option<TreePath>,
    /// The methods that the machines may call.
    pub powers: Vec<String>,
    /// True if a certificate is for the address of its machine too.
    pub with_address: bool,
    pub lifetime: Duration,
    /// When a certificate is renewed; less than the lifetime.
    pub renew_after: Duration,
}

/// A certificate or its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairPart {
    Certificate,
    Key,
}

impl fmt::Display for PairPart {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Certificate => "certificate",
            Self::Key => "key",
        })
    }
}

impl CertificateSettings {
    /// Returns all that decides what certificates say, except the machine and the authority.
    #[must_use]
    pub fn said(&self) -> String {
        let Self { authority: _, path: _, key_path, powers, with_address, lifetime, renew_after } =
            self;
        format!("{key_path:?} {powers:?} {with_address} {lifetime:?} {renew_after:?}")
    }

    /// Returns the pair that a machine is to have from the authority with this fingerprint. `key`
    /// is the public key of the machine.
    ///
    /// # Errors
    ///
    /// A text if that is needed and not known.
    pub fn wanted(
        &self,
        machine: &Machine,
        key: Option<&[u8]>,
        authority: &str,
    ) -> Result<WantedPair, String> {
        let key = match &self.key_path {
            Some(_) => None,
            None => Some(key.ok_or(KEY_NOT_KNOWN)?.to_vec()),
        };
        let mut hosts = vec![machine.hostname.clone()];
        if self.with_address {
            hosts.extend(machine.ip_address.map(|address| address.to_string()));
        }
        let made_from = format!("{authority} {hosts:?} {} {key:?}", self.said());
        let request = Request {
            name: machine.hostname.clone(),
            kind: IdentityKind::Machine,
            hosts,
            powers: Some(self.powers.clone()),
            lifetime: self.lifetime,
            ..Request::default()
        };
        Ok(WantedPair {
            path: self.path.to_string(),
            request,
            key,
            made_from: Algorithm::Blake3.digest(made_from.as_bytes()),
            renew_after: self.renew_after.as_secs_f64() / self.lifetime.as_secs_f64()
                * (1.0 - SPREAD * share_of(&machine.hostname)),
        })
    }
}

/// Returns a number from 0 to 1 that is always the same for a name.
fn share_of(name: &str) -> f64 {
    let digest = Algorithm::Blake3.digest(name.as_bytes());
    let [first, second, ..] = digest.digest() else { return 0.0 };
    f64::from(u16::from_le_bytes([*first, *second])) / f64::from(u16::MAX)
}
