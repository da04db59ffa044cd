//! Decides whether a certificate may take the place of one that has ended: it must give the same
//! machine nothing that it did not have.
// tidy: core

use api::access::{Identity, IdentityKind};
use model::display::utc;
use model::tree::Time;

use super::files::TlsError;

/// A certificate that an authority vouches for: the present one as at its end, the other as now.
#[derive(Clone, Debug)]
pub(super) struct Shown {
    /// The digest of its public key.
    pub(super) key: String,
    /// When it ends, in seconds since 1970.
    pub(super) not_after: i64,
    pub(super) identity: Identity,
}

/// Why a certificate does not take the place of the present one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplacementError {
    #[error("it cannot be used")]
    Files(#[from] TlsError),
    #[error("the files on the disk are not those in use")]
    Changed,
    #[error(
        "by the clock of this machine its certificate is valid until {}: an update can replace it",
        utc(Time { seconds: *until, nanoseconds: 0 })
    )]
    NotEnded { until: i64 },
    #[error("the present certificate was not accepted as that of {name}: {why}")]
    Present { name: String, why: String },
    #[error("it is not accepted as that of {name}: {why}")]
    Refused { name: String, why: String },
    #[error("it is for another key than that of this machine")]
    Key,
    #[error("it is that of {next}, and the present one that of {present}")]
    Holder { present: String, next: String },
    #[error("it gives more than the present one: {what}")]
    Power { what: String },
}

/// Judges whether `next` may take the place of `present` at `now`, in seconds since 1970.
pub(super) fn judge(present: &Shown, next: &Shown, now: i64) -> Result<(), ReplacementError> {
    if now <= present.not_after {
        return Err(ReplacementError::NotEnded { until: present.not_after });
    }
    if next.key != present.key {
        return Err(ReplacementError::Key);
    }
    let (before, then) = (&present.identity, &next.identity);
    let is_same_kind = then.kind == IdentityKind::Machine && before.kind.agrees(then.kind);
    if !is_same_kind || then.user != before.user {
        let words = |identity: &Identity| identity.in_words().unwrap_or_else(|| "nobody".into());
        return Err(ReplacementError::Holder { present: words(before), next: words(then) });
    }
    let mut methods = api::methods().into_iter().map(|method| method.name);
    let method = methods.find(|method| then.may_call(method) && !before.may_call(method));
    let group = then.groups.difference(&before.groups).next();
    match (method, group) {
        (Some(method), _) => Err(ReplacementError::Power { what: method.to_owned() }),
        (_, Some(group)) => Err(ReplacementError::Power { what: format!("the group {group}") }),
        (None, None) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::access::Powers;

    fn shown(key: &str, not_after: i64, kind: IdentityKind, user: &str, powers: &[&str]) -> Shown {
        let identity = Identity {
            user: Some(user.to_owned()),
            kind,
            powers: Powers::new(powers.iter().copied()),
            ..Identity::default()
        };
        Shown { key: key.to_owned(), not_after, identity }
    }

    #[test]
    fn only_an_equal_certificate_takes_the_place_of_one_that_has_ended() {
        use IdentityKind::{Machine, Service, Unstated, User};
        const GET: &str = "ObjectServer.GetObjects";
        let ended = "by the clock of this machine its certificate is valid until \
                     1970-01-01T00:01:40Z: an update can replace it";
        let holder =
            |next, present| format!("it is that of {next}, and the present one that of {present}");
        let more = |what| format!("it gives more than the present one: {what}");
        let good = shown("a", 900, Machine, "web1", &[GET]);
        let with = |powers| shown("a", 900, Machine, "web1", powers);
        let mut of_group = good.clone();
        of_group.identity.groups.insert("web".to_owned());
        let present = shown("a", 100, Machine, "web1", &[GET]);
        let unstated = shown("a", 100, Unstated, "web1", &["ObjectServer.*"]);
        let service = shown("a", 100, Service, "web1", &["*.*"]);
        #[rustfmt::skip]
        let table = [
            (&present, good.clone(), 101, None),
            (&present, with(&[]), 101, None),
            (&unstated, good.clone(), 101, None),
            (&present, good.clone(), 100, Some(ended.to_owned())),
            (&present, shown("b", 900, Machine, "web1", &[GET]), 101,
             Some("it is for another key than that of this machine".to_owned())),
            (&present, shown("a", 900, Machine, "web2", &[GET]), 101,
             Some(holder("machine web2", "machine web1"))),
            (&present, shown("a", 900, User, "web1", &[GET]), 101,
             Some(holder("web1", "machine web1"))),
            (&present, shown("a", 900, Unstated, "web1", &[GET]), 101,
             Some(holder("web1", "machine web1"))),
            (&service, good, 101, Some(holder("machine web1", "service web1"))),
            (&present, with(&[GET, "Subd.Poll"]), 101, Some(more("Subd.Poll"))),
            (&present, with(&["*.*"]), 101, Some(more("Dominator.AcceptClock"))),
            (&present, of_group, 101, Some(more("the group web"))),
        ];
        for (present, next, now, expected) in table {
            let judged = judge(present, &next, now).map_err(|error| error.to_string());
            assert_eq!(judged.err(), expected, "{next:?}");
        }
    }
}
