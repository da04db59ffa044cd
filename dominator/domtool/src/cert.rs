//! `domtool cert`: makes authorities and certificates, shows and revokes them, without any daemon.

mod faults;
mod fleet;
mod issue;
mod renewal;
mod revoke;
mod show;
mod signing_key;

use std::path::PathBuf;
use std::time::Duration;

use api::access::IdentityKind;
use api::certificate::CertificateError;
use certs::authority::{Authority, AuthorityError, AuthorityOptions};
use certs::files::FilesError;
use certs::pem::PemError;
use certs::record::Record;
use certs::register::{Register, RegisterError};
use certs::signing_key::KeyError;
use clap::{Args, Subcommand, ValueEnum};
use daemon::mdb_file::MdbFileError;
use model::display::{rough_duration, utc};
use model::time_parse::positive_duration;
use model::tree::Time;
use system::clock::wall;
use tool::{Format, Output};

use crate::silent;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Make an authority: a key that signs the certificates of a site
    ///
    /// Writes ca.pem and ca.key into DIR, which only its owner can access. Keep DIR on a machine
    /// with few logins, not on a managed one, and keep a copy: whoever has ca.key can do
    /// everything, and without it each machine needs a new certificate. ca.pem is not secret:
    /// everybody who trusts the authority has it.
    #[command(after_help = "Examples:\n  \
        domtool cert ca /root/ca --name 'Example Inc'\n  \
        domtool cert ca /root/build-ca --name 'Build systems' --intermediate-of /root/ca\n  \
        domtool cert ca /root/machines-ca --name Machines --intermediate-of /root/ca \\\n    \
            --machines-only --lifetime 365d")]
    Ca(CaArguments),
    /// Make a certificate, or one for each machine of a machine database
    ///
    /// Writes ca.pem, cert.pem and key.pem into DIR, as the daemons' --tls DIR expects them.
    /// Repeated for the same name, the command renews the certificate and keeps the key; running
    /// daemons load the new one by themselves. The certificate of another holder is not
    /// overwritten.
    ///
    /// The certificate says what its holder is: only a user can be an owner of images and machines.
    ///
    /// With --mdb, DIR gets a directory for each machine, and certificates that are valid for long
    /// enough are left as they are: run the command once a day and copy what has changed.
    #[command(after_help = "Examples:\n  \
        domtool cert issue --ca /root/ca --out /root/tls/images --name images \\\n    \
            --host images.example.org --set imageserver\n  \
        domtool cert issue --ca /root/ca --out ~/.config/dominator/tls --name alice \\\n    \
            --set operator --group web --lifetime 90d\n  \
        domtool cert issue --ca /root/ca --out /root/tls --mdb /var/lib/Dominator/mdb\n\n\
        docs/CERTIFICATES.md explains the sets; domtool cert show DIR lists what the holder of a\n\
        certificate may do. Exit codes: 0 done, 1 failed, 2 misuse, 3 partly done.")]
    Issue(Box<issue::Arguments>),
    /// Show the holder, powers, validity and faults of a certificate
    ///
    /// For a directory, this also checks that its key and authorities belong to the certificate.
    /// Exit code 0: no faults. Exit code 3: faults.
    #[command(after_help = "Examples:\n  \
        domtool cert show /etc/dominator/tls\n  \
        domtool cert show cert.pem --format json")]
    Show(show::Arguments),
    /// Revoke certificates: write the list of revoked certificates
    ///
    /// The list is crl.pem in the directory of the authority. It has an effect where it is: copy it
    /// into the TLS directory of each daemon, which loads it by itself. Without a certificate to
    /// revoke, the command only makes a new list.
    ///
    /// If a key was stolen, give --reason key-compromise: a renewed certificate has the same key as
    /// its predecessor, so all certificates with that key are revoked. After a revocation for
    /// whatever reason, domtool cert issue makes a new key.
    #[command(after_help = "Examples:\n  \
        domtool cert revoke --ca /root/ca alice --reason key-compromise\n  \
        domtool cert revoke --ca /root/ca /root/tls/web1/cert.pem")]
    Revoke(revoke::Arguments),
    /// Make a key with which a filegen-server signs the content of computed files
    ///
    /// Writes the private key FILE, without a passphrase, which only its owner can read, and the
    /// public key FILE.pub. Images name the public key; machines that accept only signed images
    /// then accept only such content.
    #[command(after_help = "Example:\n  \
        domtool cert signing-key /etc/filegen-server/signing-key\n\n\
        docs/SIGNING.md has all steps.")]
    SigningKey(signing_key::Arguments),
}

/// What a holder is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// A person, or a program that acts for one: only users are owners
    User,
    /// A daemon other than subd
    Service,
    /// A managed machine
    Machine,
}

impl From<Kind> for IdentityKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::User => Self::User,
            Kind::Service => Self::Service,
            Kind::Machine => Self::Machine,
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct CaArguments {
    /// Directory for the authority; it must not exist or not have an authority
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Name for people and other programs; default: after this machine and the key. Use no name of
    /// another authority that is or was trusted with it
    #[arg(long)]
    name: Option<String>,
    /// Lifetime; nothing that it issues is valid for longer
    #[arg(long, value_name = "DURATION", default_value = "3650d", value_parser = positive_duration)]
    lifetime: Duration,
    /// Make it an intermediate of the authority in this directory: everyone who trusts that one
    /// trusts it too
    ///
    /// So a zone or a build system can issue its own certificates, and can be revoked as a whole.
    /// It cannot make further authorities.
    #[arg(long, value_name = "DIR")]
    intermediate_of: Option<PathBuf>,
    /// Let it certify machines only: whatever its certificates say, their holders are machines
    ///
    /// They get objects, and answer as subs; they can be no daemon but subd, and no owner. Its key
    /// may be on a filegen-server, which gives machines their certificates. Releases before this
    /// one do not know such authorities: upgrade all daemons before.
    #[arg(long)]
    machines_only: bool,
}

/// A failed `domtool cert` command.
#[derive(Debug, thiserror::Error)]
pub(super) enum CertError {
    #[error(transparent)]
    Register(#[from] RegisterError),
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error(transparent)]
    Pem(#[from] PemError),
    #[error(transparent)]
    Mdb(#[from] MdbFileError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("cannot read {path}")]
    Certificate { path: String, source: CertificateError },
    #[error("{path} has neither cert.pem nor ca.pem")]
    NothingToShow { path: String },
    #[error("{name} cannot be the name of a directory")]
    Hostname { name: String },
    #[error("this authority has issued no certificate with the name or serial number {target}")]
    Unknown { target: String },
    #[error("{path} was issued by another authority")]
    OtherIssuer { path: String },
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("cannot make {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("interrupted")]
    Interrupted,
}

impl CertError {
    pub(super) fn hints(&self) -> &'static [&'static str] {
        match self {
            Self::Register(RegisterError::None { .. }) => {
                &["make an authority: domtool cert ca DIR"]
            }
            Self::Register(RegisterError::Files(error)) | Self::Files(error) => match error {
                FilesError::OtherHolder { .. } | FilesError::UnknownKey { .. } => {
                    &["give another directory, or overwrite the files with --force"]
                }
                FilesError::OtherAuthority { .. } => {
                    &["add the authority's ca.pem to the file, or replace the file with --force"]
                }
                _ => &[],
            },
            Self::Register(RegisterError::Authority(AuthorityError::Make { what, .. }))
                if *what == "certificate for the key" =>
            {
                &["only keys in PKCS#8 form are supported; --new-key makes a new key"]
            }
            Self::OtherIssuer { .. } => &["give the directory of the authority that issued it"],
            Self::Interrupted => &["finished certificates are complete; repeat the command"],
            _ => &[],
        }
    }
}

/// Runs one of the commands.
pub(super) async fn run(format: Format, command: &Command) -> Result<Output, CertError> {
    match command {
        Command::Ca(arguments) => make_authority(format, arguments),
        Command::Issue(arguments) => {
            let register = Register::open(&arguments.ca)?;
            match &arguments.mdb {
                Some(mdb) => fleet::run(format, arguments, register, mdb).await,
                None => issue::run(format, arguments, &register),
            }
        }
        Command::Show(arguments) => show::run(format, arguments),
        Command::Revoke(arguments) => revoke::run(format, arguments),
        Command::SigningKey(arguments) => signing_key::run(format, arguments),
    }
}

fn make_authority(format: Format, arguments: &CaArguments) -> Result<Output, CertError> {
    let options = AuthorityOptions {
        name: arguments.name.clone().unwrap_or_else(default_name),
        key_in_name: arguments.name.is_none(),
        for_machines: arguments.machines_only,
        lifetime: arguments.lifetime,
        start: None,
    };
    let authority = match &arguments.intermediate_of {
        None => Authority::create(&options)?,
        Some(root) => Register::open(root)?.lock()?.create_intermediate(&options)?,
    };
    let register = Register::create(&arguments.directory, authority)?;
    let certificate = register.authority().certificate();
    let directory = register.directory().display();
    eprintln!(
        "Made the authority {} in {directory}, valid until {}.",
        certificate.common_name,
        time_and_distance(wall().seconds, certificate.not_after)
    );
    eprintln!("Keep {directory}/ca.key secret, and keep a copy of it in a safe place.");
    Ok(silent(format, &Record::new(certificate)))
}

fn default_name() -> String {
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    host.map_or("Dominator authority".to_owned(), |host| format!("Dominator authority of {host}"))
}

/// Formats a time in seconds since 1970 with its distance: `2030-01-31T18:30:00Z (90 days left)`.
fn time_and_distance(now: i64, time: i64) -> String {
    let distance = time.saturating_sub(now);
    let duration = rough_duration(distance.unsigned_abs());
    let side = if distance < 0 { "ago" } else { "left" };
    format!("{} ({duration} {side})", time_text(time))
}

/// Formats a time in seconds since 1970.
fn time_text(seconds: i64) -> String {
    utc(Time { seconds, nanoseconds: 0 })
}
