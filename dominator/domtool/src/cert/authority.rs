//! `domtool cert ca`: makes an authority.

use std::path::PathBuf;
use std::time::Duration;

use certs::authority::now;
use certs::record::Record;
use certs::{
    authority::{Authority, AuthorityOptions},
    register::Register,
};
use clap::Args;
use tool::{Format, Output, json};

use super::{CertError, lifetime, until};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Where to put it: a directory that is not there yet, or has no authority
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// What people and other programs call it; unless given, after this machine and its key. Give
    /// none the name of another that is trusted with it, or was
    #[arg(long)]
    name: Option<String>,
    /// How long it lasts; nothing that it issues lasts longer
    #[arg(long, value_name = "DURATION", default_value = "3650d", value_parser = lifetime)]
    lifetime: Duration,
    /// Have the authority in this directory vouch for it: who trusts that one trusts it too
    ///
    /// So a zone, or a build system, can issue certificates of its own, and can be revoked as a
    /// whole. It can make no further authorities.
    #[arg(long, value_name = "DIR")]
    intermediate_of: Option<PathBuf>,
}

pub(super) fn run(format: Format, arguments: &Arguments) -> Result<Output, CertError> {
    let options = AuthorityOptions {
        name: arguments.name.clone().unwrap_or_else(default_name),
        key_in_name: arguments.name.is_none(),
        lifetime: arguments.lifetime,
        start: None,
    };
    let authority = match &arguments.intermediate_of {
        None => Authority::create(&options)?,
        Some(root) => {
            let root = Register::open(root)?;
            let authority = root.authority().create_intermediate(&options)?;
            root.lock()?.keep(authority.certificate())?;
            authority
        }
    };
    let made = Register::make(&arguments.directory, authority)?;
    let certificate = made.authority().certificate();
    let directory = made.directory().display();
    eprintln!(
        "Made the authority {} in {directory}, valid until {}.",
        certificate.common_name,
        until(now(), certificate.not_after)
    );
    eprintln!("Keep {directory}/ca.key secret, and a copy of it in a safe place.");
    Ok(match format {
        Format::Table => String::new(),
        Format::Json => json(&Record::of(certificate)),
    }
    .into())
}

fn default_name() -> String {
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    host.map_or("Dominator authority".to_owned(), |host| format!("Dominator authority of {host}"))
}
