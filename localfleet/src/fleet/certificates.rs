//! The certificates of a fleet: its own authority, and a certificate for each program.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use api::access::IdentityKind;
use certs::sets::Set;
use certs::{
    authority::{Authority, AuthorityOptions, Request},
    files::Replace,
    register::Register,
};
use rpc::tls::Security;

/// The operator of the fleet, who has all powers.
pub const OPERATOR: &str = "operator";

/// The certificates of one fleet, in a directory for each holder; or none, for a fleet that runs
/// with `--insecure`.
#[derive(Debug)]
pub struct Certificates {
    issued: Option<IssuedCertificates>,
}

#[derive(Debug)]
struct IssuedCertificates {
    directory: PathBuf,
    authority: Authority,
}

impl Certificates {
    /// Returns no certificates.
    pub fn none() -> Self {
        Self { issued: None }
    }

    /// Makes an authority, and a certificate of the operator, below `directory`.
    ///
    /// # Errors
    ///
    /// If files cannot be written.
    pub fn make(directory: &Path) -> anyhow::Result<Self> {
        let options = AuthorityOptions { name: "local fleet".to_owned(), ..Default::default() };
        let authority = Authority::create(&options).context("cannot make an authority")?;
        let directory = directory.to_owned();
        let all = Self { issued: Some(IssuedCertificates { directory, authority }) };
        all.issue(OPERATOR, IdentityKind::User, vec!["*.*".to_owned()], &[])?;
        Ok(all)
    }

    /// Issues a certificate for the daemon `holder`, with the powers of `set`, for these names and
    /// addresses.
    ///
    /// # Errors
    ///
    /// If files cannot be written.
    pub fn for_daemon(&self, holder: &str, set: Set, hosts: &[&str]) -> anyhow::Result<()> {
        self.issue(holder, set.kind(), set.powers(), hosts)
    }

    /// Returns the authority; `None` for a fleet that runs with `--insecure`.
    pub fn authority(&self) -> Option<&Authority> {
        self.issued.as_ref().map(|made| &made.authority)
    }

    /// Makes an authority that certifies machines only in `directory`, below that of the fleet.
    ///
    /// # Errors
    ///
    /// If the fleet has no authority, or files cannot be written.
    pub fn make_authority_for_machines(&self, directory: &Path) -> anyhow::Result<()> {
        let root = self.authority().context("the fleet has no authority")?;
        let options = AuthorityOptions {
            name: "machines of the local fleet".to_owned(),
            for_machines: true,
            ..AuthorityOptions::default()
        };
        Register::create(directory, root.create_intermediate(&options)?)?;
        Ok(())
    }

    /// Returns the certificate file of the authority; `None` without certificates.
    pub fn authority_file(&self) -> Option<PathBuf> {
        self.issued.as_ref().map(|made| made.directory.join(OPERATOR).join("ca.pem"))
    }

    fn issue(
        &self,
        holder: &str,
        kind: IdentityKind,
        powers: Vec<String>,
        hosts: &[&str],
    ) -> anyhow::Result<()> {
        let Some(made) = &self.issued else { return Ok(()) };
        let request = Request {
            name: holder.to_owned(),
            kind,
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            powers: Some(powers),
            ..Request::default()
        };
        let issued = made.authority.issue(&request)?;
        let directory = made.directory.join(holder);
        issued.write(&directory, made.authority.ca_pem(), Replace::Any)?;
        Ok(())
    }

    /// Returns the flags with which `holder` is started.
    pub fn flags(&self, holder: &str) -> Vec<String> {
        match &self.issued {
            None => vec!["--insecure".to_owned()],
            Some(made) => {
                vec!["--tls".to_owned(), made.directory.join(holder).display().to_string()]
            }
        }
    }

    /// Returns the protection of the connections of `holder`, for code in this process.
    ///
    /// # Errors
    ///
    /// If its files cannot be read.
    pub fn security(&self, holder: &str) -> anyhow::Result<Security> {
        match &self.issued {
            None => Ok(Security::Insecure),
            Some(made) => Ok(Security::open(&made.directory.join(holder))?),
        }
    }
}
