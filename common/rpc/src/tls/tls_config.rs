//! The security of a program's connections, kept as fresh as its files.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::credentials::Credentials;
use super::files::{self, FilesDigest, Stamp, TlsError};
use model::display::{error_chain, utc};
use model::tree::Time;
use system::clock::since_epoch;

/// How long before its expiry a certificate is warned of.
pub const WARN_BEFORE: Duration = Duration::from_secs(30 * 86_400);

/// How often the files are checked for changes. Changed files are read when two checks agree: a
/// file that is being copied is not complete yet.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How often the warning of an expiring certificate is logged.
const WARN_EVERY: Duration = Duration::from_secs(86_400);

/// The protection of a program's connections. Clones share their state.
#[derive(Clone)]
pub enum Security {
    /// Plain text: `--insecure`.
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
    pub(super) credentials: watch::Sender<Arc<Credentials>>,
}

/// The state of the checks for changed files.
#[derive(Default)]
struct ReloadState {
    /// The stamp of the last check.
    last: Option<Stamp>,
    /// Files that are invalid, until they change.
    refused: Option<Stamp>,
    /// The stamp that was logged last.
    logged: Option<Stamp>,
}

impl Security {
    /// Returns TLS with the files of `dir`, which [`super::FILES`] lists.
    pub fn open(dir: &Path) -> Result<Self, TlsError> {
        let credentials = Arc::new(Credentials::read(dir)?);
        let credentials = watch::Sender::new(credentials);
        Ok(Self::Tls(Arc::new(TlsConfig { dir: dir.to_owned(), credentials })))
    }

    /// Returns the directory of the files; `None` for [`Security::Insecure`].
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Self::Insecure => None,
            Self::Tls(config) => Some(config.directory()),
        }
    }

    /// Returns the names and addresses of the certificate in use; `None` for
    /// [`Security::Insecure`].
    #[must_use]
    pub fn own_hosts(&self) -> Option<Vec<String>> {
        match self {
            Self::Insecure => None,
            Self::Tls(config) => Some(config.credentials.borrow().own.hosts.clone()),
        }
    }

    /// Returns true for [`Security::Insecure`].
    #[must_use]
    pub fn is_insecure(&self) -> bool {
        matches!(self, Self::Insecure)
    }

    /// Returns the scheme of URLs: `https` or `http`.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        if self.is_insecure() { "http" } else { "https" }
    }

    /// Returns the digest of the files in use; `None` for [`Security::Insecure`].
    #[must_use]
    pub fn files_in_use(&self) -> Option<FilesDigest> {
        match self {
            Self::Insecure => None,
            Self::Tls(config) => Some(config.credentials.borrow().digest),
        }
    }

    /// Returns when the program's own certificate expires, in Unix seconds.
    #[must_use]
    pub fn expires_at(&self) -> Option<i64> {
        match self {
            Self::Insecure => None,
            Self::Tls(config) => Some(config.credentials.borrow().own.not_after),
        }
    }

    /// Returns true if the program's own certificate has expired.
    #[must_use]
    pub fn has_expired(&self) -> bool {
        self.expires_at().is_some_and(|ends| ends <= since_epoch().as_secs().cast_signed())
    }

    /// Returns a warning if the program's own certificate expires within [`WARN_BEFORE`], or has
    /// expired.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        ending(self.expires_at()?, since_epoch().as_secs().cast_signed())
    }

    /// Reads changed files, and logs a warning before the certificate expires, until `stop` is
    /// cancelled.
    pub async fn reload_until(&self, stop: CancellationToken) {
        let Self::Tls(config) = self else { return };
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let (mut warned, mut reload) = (None, ReloadState::default());
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            // Reads five small files' metadata, which does not need a thread for blocking work.
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

/// Returns the warning of a certificate that expires at `ends`, if there is one at `now`; in Unix
/// seconds.
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

impl ReloadState {
    /// Notes a check that found `stamp`. Returns true if changed files must be read; `taken` is the
    /// stamp of the files in use.
    fn is_due(&mut self, stamp: &Stamp, taken: &Stamp) -> bool {
        let is_settled = self.last.as_ref() == Some(stamp);
        self.last = Some(stamp.clone());
        is_settled && stamp != taken && self.refused.as_ref() != Some(stamp)
    }

    /// Notes that the files of `stamp` could not be used. Returns true if that must be logged. Read
    /// errors, for want of descriptors or by a fault of the disk, may disappear.
    fn refuse(&mut self, stamp: Stamp, error: &TlsError) -> bool {
        if !matches!(error, TlsError::Read { .. }) {
            self.refused = Some(stamp.clone());
        }
        self.logged.replace(stamp.clone()) != Some(stamp)
    }
}

impl TlsConfig {
    /// Returns the directory of the files.
    pub(super) fn directory(&self) -> &Path {
        &self.dir
    }

    /// Uses changed files if they are complete and valid, and returns true if so. An error is
    /// logged once.
    fn refresh(&self, reload: &mut ReloadState) -> bool {
        let stamp = files::stamp(&self.dir);
        if !reload.is_due(&stamp, &self.credentials.borrow().stamp) {
            return false;
        }
        match Credentials::read(&self.dir) {
            // They changed while they were read: the next check reads them again.
            Ok(credentials) if credentials.stamp != stamp || files::stamp(&self.dir) != stamp => {
                false
            }
            Ok(credentials) => {
                let ends = Time { seconds: credentials.own.not_after, nanoseconds: 0 };
                let ends = utc(ends);
                tracing::info!(dir = %self.dir.display(), ends, "certificates taken");
                let refused = credentials.refuses_itself();
                let former = self.credentials.send_replace(Arc::new(credentials));
                if let Some(why) = refused.filter(|_| former.refuses_itself().is_none()) {
                    tracing::warn!(
                        "others that trust the same authorities do not accept this program any \
                         more: {why}"
                    );
                }
                if files::lifts_revocations(&former.stamp, &stamp) {
                    let path = self.dir.join(files::REVOKED);
                    let path = path.display();
                    tracing::warn!(
                        "{path} is gone: certificates that it revoked are accepted again"
                    );
                }
                true
            }
            Err(error) => {
                if reload.refuse(stamp, &error) {
                    let error = error_chain(&error);
                    tracing::warn!("certificates not taken, the former stay in force: {error}");
                }
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use certs::{
        authority::{Authority, AuthorityOptions, Request},
        files::Replace,
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

    /// A directory with certificates, and its configuration.
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
    fn a_program_knows_when_its_own_authorities_refuse_it() {
        let (_directory, config, authority) = kept();
        let now = || Credentials::read(&config.dir).unwrap().refuses_itself();
        assert_eq!(now(), None);
        let next = Authority::create(&AuthorityOptions::default()).unwrap();
        let both = format!("{}{}", next.ca_pem(), authority.ca_pem());
        for (authorities, refused) in [(both.as_str(), None), (next.ca_pem(), Some(()))] {
            fs::write(config.dir.join("ca.pem"), authorities).unwrap();
            assert_eq!(now().map(drop), refused);
        }
    }

    #[test]
    fn what_was_refused_is_taken_when_its_mode_is_right() {
        let (_directory, config, authority) = kept();
        let mut reload = ReloadState::default();
        let mut refresh = || [config.refresh(&mut reload), config.refresh(&mut reload)];
        assert_eq!(refresh(), [false, false]);
        let key = config.dir.join("key.pem");
        // Repeated, in case the times of files are coarse.
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
        // The copy continues between two checks.
        let half = lists.find("END X509 CRL-----\n").unwrap() + "END X509 CRL-----\n".len();
        for copied in [&lists[..half], &lists] {
            fs::write(&path, copied).unwrap();
            assert!(!refresh());
        }
        assert!(refresh());
        let with_lists = files::stamp(&config.dir);
        // A truncated list is never used.
        for cut in ["", &lists[..half - 20]] {
            fs::write(&path, cut).unwrap();
            assert_eq!([refresh(), refresh(), refresh()], [false; 3]);
        }
        fs::remove_file(&path).unwrap();
        fs::write(config.dir.join("zones.toml"), "").unwrap();
        assert_eq!([refresh(), refresh(), refresh()], [false; 3]);
        fs::remove_file(config.dir.join("zones.toml")).unwrap();
        assert_eq!([refresh(), refresh(), refresh()], [false, true, false]);
        let without = files::stamp(&config.dir);
        let stamps = [&with_lists, &without];
        let lifts =
            stamps.map(|before| stamps.map(|after| files::lifts_revocations(before, after)));
        assert_eq!(lifts, [[false, true], [false, false]]);
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
}
