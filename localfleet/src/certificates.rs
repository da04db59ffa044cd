//! The certificates of a fleet: an authority of its own, and one certificate for each program.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use certs::sets::Set;
use certs::{
    authority::{Authority, AuthorityOptions, Request},
    place::Replace,
};
use rpc::tls::Security;

/// The holder of every power, for whoever tries things out.
pub const OPERATOR: &str = "operator";

/// The certificates of one fleet, in a directory for each holder; or none, for a fleet that runs
/// with `--insecure`.
#[derive(Debug)]
pub struct Certificates {
    made: Option<Made>,
}

#[derive(Debug)]
struct Made {
    directory: PathBuf,
    authority: Authority,
}

impl Certificates {
    /// No certificates.
    pub fn none() -> Self {
        Self { made: None }
    }

    /// An authority, and a certificate of the operator, below `directory`.
    ///
    /// # Errors
    ///
    /// If files cannot be written.
    pub fn make(directory: &Path) -> anyhow::Result<Self> {
        let options = AuthorityOptions { name: "local fleet".to_owned(), ..Default::default() };
        let authority = Authority::create(&options).context("cannot make an authority")?;
        let directory = directory.to_owned();
        let all = Self { made: Some(Made { directory, authority }) };
        all.issue(OPERATOR, vec!["*.*".to_owned()], &[])?;
        Ok(all)
    }

    /// A certificate for the daemon `holder`, with the powers of `set`, that is reached by these
    /// names and addresses.
    ///
    /// # Errors
    ///
    /// If files cannot be written.
    pub fn of_daemon(&self, holder: &str, set: Set, hosts: &[&str]) -> anyhow::Result<()> {
        self.issue(holder, set.powers(), hosts)
    }

    /// The authority; `None` for a fleet that runs with `--insecure`.
    pub fn authority(&self) -> Option<&Authority> {
        self.made.as_ref().map(|made| &made.authority)
    }

    /// The file of the authority, for those who do not know it; `None` without certificates.
    pub fn authority_file(&self) -> Option<PathBuf> {
        self.made.as_ref().map(|made| made.directory.join(OPERATOR).join("ca.pem"))
    }

    fn issue(&self, holder: &str, powers: Vec<String>, hosts: &[&str]) -> anyhow::Result<()> {
        let Some(made) = &self.made else { return Ok(()) };
        let request = Request {
            name: holder.to_owned(),
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            powers: Some(powers),
            ..Request::default()
        };
        let issued = made.authority.issue(&request)?;
        let directory = made.directory.join(holder);
        issued.write(&directory, made.authority.ca_pem(), Replace::Any)?;
        Ok(())
    }

    /// The flags with which `holder` is started.
    pub fn flags(&self, holder: &str) -> Vec<String> {
        match &self.made {
            None => vec!["--insecure".to_owned()],
            Some(made) => {
                vec!["--tls".to_owned(), made.directory.join(holder).display().to_string()]
            }
        }
    }

    /// How the connections of `holder` are protected, for what runs in this process.
    ///
    /// # Errors
    ///
    /// If its files cannot be read.
    pub fn security(&self, holder: &str) -> anyhow::Result<Security> {
        match &self.made {
            None => Ok(Security::Insecure),
            Some(made) => Ok(Security::open(&made.directory.join(holder))?),
        }
    }
}
