//! `domtool cert`: makes authorities and certificates, shows and revokes them. Asks no daemon.

mod authority;
mod fleet;
mod issue;
mod judgement;
mod need;
mod revoke;
mod show;

use std::time::Duration;

use api::certificate::CertificateError;
use certs::pem::PemError;
use certs::sets::PatternError;
use certs::{authority::AuthorityError, place::PlaceError, register::RegisterError};
use clap::Subcommand;
use model::tree::Time;
use model::when::{lasting, moment};
use tool::{Format, Output};

use daemon::mdb_file::FileError;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Make an authority: a key that signs the certificates of a site
    ///
    /// Makes ca.pem and ca.key in DIR, which only its owner may look into. Keep DIR on a machine
    /// that few may log in to, not on one that is managed, and keep a copy: whoever has ca.key can
    /// do everything, and who loses it must give each machine new certificates. ca.pem is no
    /// secret: everybody who trusts the authority has it.
    #[command(after_help = "Examples:\n  \
        domtool cert ca /root/ca --name 'Example Inc'\n  \
        domtool cert ca /root/build-ca --name 'Build systems' --intermediate-of /root/ca")]
    Ca(authority::Arguments),
    /// Make a certificate, or one for each machine of a machine database
    ///
    /// Writes ca.pem, cert.pem and key.pem into DIR, as the daemons' --tls DIR expects them. Done
    /// again for the same name, the certificate is renewed and the key stays; running daemons take
    /// the new one by themselves. Somebody else's certificate is not overwritten.
    ///
    /// With --mdb, DIR gets a directory for each machine, and those whose certificate is still
    /// good for long are left as they are: run it once a day and copy what has changed.
    #[command(after_help = "Examples:\n  \
        domtool cert issue --ca /root/ca --out /root/tls/images --name images \\\n    \
            --host images.example.org --set imageserver\n  \
        domtool cert issue --ca /root/ca --out ~/.config/dominator/tls --name alice \\\n    \
            --set operator --group web --lifetime 90d\n  \
        domtool cert issue --ca /root/ca --out /root/tls --mdb /var/lib/Dominator/mdb\n\n\
        The sets are explained in docs/CERTIFICATES.md; domtool cert show DIR lists what the\n\
        holder of a certificate may do. Exit codes: 0 done, 1 failed, 2 misuse, 3 partly done.")]
    Issue(Box<issue::Arguments>),
    /// Say who holds a certificate, what they may do and until when, and what is wrong with it
    ///
    /// Of a directory, also whether the key and the authorities in it belong to the certificate.
    /// Exits with 0 if all is in order and with 3 if something is wrong.
    #[command(after_help = "Examples:\n  \
        domtool cert show /etc/dominator/tls\n  \
        domtool cert show cert.pem --format json")]
    Show(show::Arguments),
    /// Revoke certificates: write the list of those that count no more
    ///
    /// The list is crl.pem in the directory of the authority. It counts where it is: copy it into
    /// the TLS directory of each daemon, which takes note of it by itself. Without a certificate to
    /// revoke, the list is only made anew.
    ///
    /// Where a key was stolen, say --reason key-compromise: a renewed certificate has the key of
    /// the one before, so all that have it are revoked. Whatever the reason, domtool cert issue
    /// makes another key where one had a certificate that was revoked.
    #[command(after_help = "Examples:\n  \
        domtool cert revoke --ca /root/ca alice --reason key-compromise\n  \
        domtool cert revoke --ca /root/ca /root/tls/web1/cert.pem")]
    Revoke(revoke::Arguments),
}

/// Why a certificate cannot be made, shown or revoked.
#[derive(Debug, thiserror::Error)]
pub(super) enum CertError {
    #[error(transparent)]
    Register(#[from] RegisterError),
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error(transparent)]
    Pem(#[from] PemError),
    #[error(transparent)]
    Pattern(#[from] PatternError),
    #[error(transparent)]
    Mdb(#[from] FileError),
    #[error(transparent)]
    File(#[from] std::io::Error),
    #[error("cannot read {path}")]
    Certificate { path: String, source: CertificateError },
    #[error("{path} has neither cert.pem nor ca.pem")]
    NothingToShow { path: String },
    #[error("{name} cannot be the name of a directory")]
    Hostname { name: String },
    #[error("this authority has issued no certificate with the name, or the number, {target}")]
    Unknown { target: String },
    #[error("{path} was issued by another authority")]
    Foreign { path: String },
    #[error("it was stopped")]
    Stopped,
}

impl CertError {
    /// What may be done about it.
    pub(super) fn hints(&self) -> &'static [&'static str] {
        match self {
            Self::Register(RegisterError::None { .. }) => {
                &["make an authority: domtool cert ca DIR"]
            }
            Self::Register(RegisterError::Place(error)) | Self::Place(error) => match error {
                PlaceError::Other { .. } | PlaceError::Key { .. } => {
                    &["name another directory, or overwrite what is there: --force"]
                }
                PlaceError::Authorities { .. } => {
                    &["add the authority's ca.pem to the file, or put it in its place: --force"]
                }
                _ => &[],
            },
            Self::Register(RegisterError::Authority(AuthorityError::Make { what, .. }))
                if *what == "certificate for the key" =>
            {
                &["a key that is not in PKCS#8 form cannot be read here: --new-key makes another"]
            }
            Self::Foreign { .. } => &["revoke it with the directory of the one that issued it"],
            Self::Stopped => &["what was made is whole; go on with the same command"],
            _ => &[],
        }
    }
}

/// Runs one of the commands.
pub(super) async fn run(format: Format, command: &Command) -> Result<Output, CertError> {
    match command {
        Command::Ca(arguments) => authority::run(format, arguments),
        Command::Issue(arguments) => issue::run(format, arguments).await,
        Command::Show(arguments) => show::run(format, arguments),
        Command::Revoke(arguments) => revoke::run(format, arguments),
    }
}

/// A duration that is longer than none.
fn lifetime(text: &str) -> Result<Duration, String> {
    let duration = model::when::written::duration(text)?;
    if duration.is_zero() { Err("nothing lasts no time".to_owned()) } else { Ok(duration) }
}

/// A moment in seconds since 1970, and how far away it is: `2030-01-31T18:30:00Z (90 days left)`.
fn until(now: i64, then: i64) -> String {
    let distance = then.saturating_sub(now);
    let far = lasting(distance.unsigned_abs());
    let words = if distance < 0 { format!("{far} ago") } else { format!("{far} left") };
    format!("{} ({words})", written(then))
}

/// A moment in seconds since 1970, for people.
fn written(seconds: i64) -> String {
    moment(Time { seconds, nanoseconds: 0 })
}
