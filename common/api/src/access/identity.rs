//! Callers with their powers, and owners.

use std::collections::BTreeSet;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

/// The most bytes that the names of all owners of one item may have together.
pub const OWNERS_BYTES_MAX: usize = 4_096;

/// Patterns of the methods that a caller may call, whoever owns what the call is about.
///
/// A pattern is `Service.Method`; in each half `*` stands for any characters, so that
/// `ImageServer.*` is all of the image server, and `*.*` is everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Powers(Vec<String>);

impl Powers {
    /// Returns the powers of `patterns`. A text that is not a pattern gives no power.
    #[must_use]
    pub fn new<Text: Into<String>>(patterns: impl IntoIterator<Item = Text>) -> Self {
        Self(patterns.into_iter().map(Into::into).collect())
    }

    /// Returns all powers.
    #[must_use]
    pub fn all() -> Self {
        Self::new(["*.*"])
    }

    /// Returns the patterns, as they were given.
    pub fn patterns(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Returns true if a pattern matches `method`, which is `Service.Method`.
    #[must_use]
    pub fn has(&self, method: &str) -> bool {
        let Some((service, name)) = method.split_once('.') else { return false };
        let patterns = self.0.iter().filter_map(|pattern| pattern.split_once('.'));
        let mut patterns = patterns.filter(|(_, of_name)| !of_name.contains('.'));
        patterns.any(|(of_service, of_name)| {
            matches(of_service.as_bytes(), service.as_bytes())
                && matches(of_name.as_bytes(), name.as_bytes())
        })
    }
}

/// Returns true if `pattern`, in which `*` stands for any bytes, matches all of `text`. Takes at
/// most as many steps as the product of their lengths.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at_pattern, mut at_text) = (0, 0);
    // The position after the last star, and where the text continues if the star stands for as
    // little as possible.
    let mut star: Option<(usize, usize)> = None;
    while at_text < text.len() {
        match pattern.get(at_pattern) {
            Some(b'*') => {
                at_pattern += 1;
                star = Some((at_pattern, at_text));
            }
            Some(byte) if *byte == text[at_text] => {
                at_pattern += 1;
                at_text += 1;
            }
            _ => {
                let Some((behind, from)) = star else { return false };
                star = Some((behind, from + 1));
                (at_pattern, at_text) = (behind, from + 1);
            }
        }
    }
    pattern[at_pattern..].iter().all(|byte| *byte == b'*')
}

/// The methods that machines call. An authority that certifies machines only gives no others.
pub const MACHINE_METHODS: &[&str] = &["ObjectServer.GetObjects"];

/// The service that machines have.
pub const MACHINE_SERVICE: &str = "Subd";

/// What the holder of a certificate is. Each kind has names of its own: a machine called `alice` is
/// not the user `alice`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum IdentityKind {
    /// The certificate does not say. In this release such a holder may be an owner.
    #[default]
    Unstated,
    /// A person, or a program that acts for one.
    User,
    /// A daemon other than subd.
    Service,
    /// A managed machine: its subd.
    Machine,
    /// A kind that this release does not know.
    Unknown,
}

impl IdentityKind {
    /// The kinds that a certificate can state.
    pub const STATED: [Self; 3] = [Self::User, Self::Service, Self::Machine];

    /// Returns the name in certificates and on the command line; `None` for
    /// [`Self::Unstated`] and [`Self::Unknown`].
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::User => Some("user"),
            Self::Service => Some("service"),
            Self::Machine => Some("machine"),
            Self::Unstated | Self::Unknown => None,
        }
    }

    /// Returns the kind called `name` in a certificate.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        let kind = Self::STATED.into_iter().find(|kind| kind.name() == Some(name));
        kind.unwrap_or(Self::Unknown)
    }

    /// Returns true if a holder of this kind may be an owner.
    #[must_use]
    pub fn may_own(self) -> bool {
        matches!(self, Self::User | Self::Unstated)
    }

    /// Returns true if holders of one name may be the same: of one kind, or one of them unstated.
    #[must_use]
    pub fn agrees(self, other: Self) -> bool {
        self == other || self == Self::Unstated || other == Self::Unstated
    }

    /// Describes the holder of this kind called `name`: `alice`, or `machine alice`.
    #[must_use]
    pub fn in_words(self, name: &str) -> String {
        match self {
            Self::Unstated | Self::User => name.to_owned(),
            Self::Service => format!("service {name}"),
            Self::Machine => format!("machine {name}"),
            Self::Unknown => format!("{name} (of an unknown kind)"),
        }
    }
}

/// A caller, as its certificate describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The name of the holder; `None` without a certificate of a trusted authority.
    pub user: Option<String>,
    /// What the holder is. A name alone does not say who somebody is.
    pub kind: IdentityKind,
    /// The groups that the user is in.
    pub groups: BTreeSet<String>,
    /// The methods that the user may call, whoever owns what the call is about.
    pub powers: Powers,
    /// The methods that the user's authority may vouch for; `None` for all.
    pub zone: Option<Powers>,
}

impl Identity {
    /// Makes the holder a machine, whatever it was: one that calls what machines call, as far as it
    /// has the powers.
    #[must_use]
    pub fn as_machine(self) -> Self {
        let methods = MACHINE_METHODS.iter().filter(|method| self.powers.has(method));
        let powers = Powers::new(methods.copied());
        Self { kind: IdentityKind::Machine, groups: BTreeSet::new(), powers, ..self }
    }

    /// Returns true if the holder has the power to call a method, and its authority may vouch for
    /// that.
    #[must_use]
    pub fn may_call(&self, method: &str) -> bool {
        self.powers.has(method) && self.zone.as_ref().is_none_or(|zone| zone.has(method))
    }

    /// Returns somebody unknown with all powers: the caller of a server that runs with
    /// `--insecure`, and the server itself.
    #[must_use]
    pub fn unrestricted() -> Self {
        Self { powers: Powers::all(), ..Self::default() }
    }

    /// Describes the holder, with its kind if that is not a user; `None` without a certificate.
    /// Holders of one name and different kinds have different descriptions.
    #[must_use]
    pub fn in_words(&self) -> Option<String> {
        self.user.as_deref().map(|user| self.kind.in_words(user))
    }
}

/// The owners of an image, directory or machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Owners {
    /// Every member of one of these groups is an owner.
    pub groups: BTreeSet<String>,
    /// These users are owners.
    pub users: BTreeSet<String>,
}

/// Why owners are not allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OwnersError {
    /// A name is not allowed.
    #[error("`{name}` is no name of an owner: {why}")]
    Name {
        /// The name, escaped.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The names are too long.
    #[error(
        "the names of all owners of one thing have at most {OWNERS_BYTES_MAX} bytes together, \
         these have {bytes}: make a group of them"
    )]
    TooLong { bytes: usize },
}

impl Owners {
    /// Returns these groups and users.
    pub fn new<Text: Into<String>>(
        groups: impl IntoIterator<Item = Text>,
        users: impl IntoIterator<Item = Text>,
    ) -> Self {
        let groups = groups.into_iter().map(Into::into).collect();
        Self { groups, users: users.into_iter().map(Into::into).collect() }
    }

    /// Returns true if there are no owners.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.users.is_empty()
    }

    /// Returns true if `identity` is an owner: a user, by name or group.
    #[must_use]
    pub fn include(&self, identity: &Identity) -> bool {
        let user = identity.user.as_ref().filter(|_| identity.kind.may_own());
        user.is_some_and(|user| {
            self.users.contains(user)
                || self.groups.iter().any(|group| identity.groups.contains(group))
        })
    }

    /// Refuses names that cannot be displayed or that look like others, and too many names.
    pub fn verify(&self) -> Result<(), OwnersError> {
        let mut bytes = 0;
        for name in self.groups.iter().chain(&self.users) {
            let why = match name {
                _ if name.is_empty() => "it is empty",
                _ if name.len() > 256 => "it is longer than 256 bytes",
                _ if name.trim() != name => "it begins or ends with a space",
                _ if name.contains(',') => "it holds a comma",
                _ if name.chars().any(char::is_control) => "it holds a control character",
                _ => {
                    bytes += name.len();
                    continue;
                }
            };
            return Err(OwnersError::Name { name: model::escape::escape(name.as_bytes()), why });
        }
        if bytes > OWNERS_BYTES_MAX { Err(OwnersError::TooLong { bytes }) } else { Ok(()) }
    }

    /// Describes the owners, such as `groups web, dba; user alice`, or `nobody`.
    #[must_use]
    pub fn in_words(&self) -> String {
        let list = |what: &str, names: &BTreeSet<String>| {
            let plural = if names.len() == 1 { "" } else { "s" };
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            (!names.is_empty()).then(|| format!("{what}{plural} {}", names.join(", ")))
        };
        let parts: Vec<String> = [list("group", &self.groups), list("user", &self.users)]
            .into_iter()
            .flatten()
            .collect();
        if parts.is_empty() { "nobody".to_owned() } else { parts.join("; ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_methods() {
        #[rustfmt::skip]
        let table = [
            ("Subd.Poll",       "Subd.Poll",             true),
            ("Subd.Poll",       "Subd.Polls",            false),
            ("Subd.*",          "Subd.Poll",             true),
            ("Subd.*",          "ImageServer.GetImage",  false),
            ("*.*",             "ImageServer.GetImage",  true),
            ("*.Get*",          "ImageServer.GetImage",  true),
            ("*.Get*",          "ImageServer.ListImages", false),
            ("*.*et*g*",        "ImageServer.GetImage",  true),
            ("*.*Image",        "ImageServer.GetImage",  true),
            ("*.*Imag",         "ImageServer.GetImage",  false),
            ("*",               "ImageServer.GetImage",  false),
            ("",                "ImageServer.GetImage",  false),
            ("*.*.*",           "ImageServer.GetImage",  false),
            ("*.*",             "GetImage",              false),
            ("image*.*",        "ImageServer.GetImage",  false),
        ];
        for (pattern, method, want) in table {
            assert_eq!(Powers::new([pattern]).has(method), want, "{pattern} {method}");
        }
        assert!(Powers::new(["Subd.Poll", "*.GetImage"]).has("ImageServer.GetImage"));
        assert!(!Powers::default().has("Subd.Poll") && Powers::all().has("Subd.Poll"));
    }

    #[test]
    fn a_pattern_of_many_stars_takes_no_longer() {
        let pattern = format!("*.{}b", "*a".repeat(1_000));
        assert!(!Powers::new([pattern]).has(&format!("X.{}", "a".repeat(10_000))));
    }

    #[test]
    fn nobody_without_a_name_is_an_owner() {
        let owners = Owners::new(["web"], ["alice"]);
        let identity = |user: Option<&str>, group: &str| Identity {
            user: user.map(str::to_owned),
            groups: BTreeSet::from([group.to_owned()]),
            ..Identity::default()
        };
        let table = [
            (Some("alice"), "none", true),
            (Some("bob"), "web", true),
            (Some("bob"), "alice", false),
            (Some("web"), "none", false),
            (None, "web", false),
        ];
        for (user, group, want) in table {
            assert_eq!(owners.include(&identity(user, group)), want, "{user:?} {group}");
        }
        assert!(!Owners::default().include(&identity(Some(""), "")));
    }

    #[test]
    fn only_users_are_owners() {
        use IdentityKind::{Machine, Service, Unknown, Unstated, User};
        let owners = Owners::new(["web"], ["alice"]);
        let table = [
            (Unstated, None, true, "alice"),
            (User, Some("user"), true, "alice"),
            (Service, Some("service"), false, "service alice"),
            (Machine, Some("machine"), false, "machine alice"),
            (Unknown, None, false, "alice (of an unknown kind)"),
        ];
        for (kind, name, is_owner, words) in table {
            let of = |user: &str, group: &str| Identity {
                user: Some(user.to_owned()),
                kind,
                groups: BTreeSet::from([group.to_owned()]),
                ..Identity::default()
            };
            let got = [of("alice", ""), of("bob", "web")].map(|one| owners.include(&one));
            assert_eq!(got, [is_owner; 2], "{kind:?}");
            assert!(!owners.include(&of("bob", "dba")), "{kind:?}");
            assert_eq!((kind.name(), kind.may_own()), (name, is_owner), "{kind:?}");
            assert_eq!(of("alice", "").in_words().as_deref(), Some(words));
        }
        let names = ["user", "service", "machine", "User", "user ", "", "robot"];
        let kinds = [User, Service, Machine, Unknown, Unknown, Unknown, Unknown];
        assert_eq!(names.map(IdentityKind::from_name), kinds);
        assert_eq!(Identity::default().in_words(), None);
    }

    #[test]
    fn owners_can_be_named_and_shown() {
        let owners = |groups: &[&str], users: &[&str]| {
            Owners::new(groups.iter().copied(), users.iter().copied())
        };
        let long = "x".repeat(256);
        let many: Vec<String> = (0..20).map(|index| format!("{index:0>250}")).collect();
        let table = [
            (owners(&[], &[]), None),
            (owners(&["web", "Grün & co"], &["alice@example.org"]), None),
            (owners(&[&long], &[]), None),
            (owners(&[""], &[]), Some("`` is no name of an owner: it is empty".to_owned())),
            (
                owners(&[], &[" x"]),
                Some("` x` is no name of an owner: it begins or ends with a space".to_owned()),
            ),
            (
                owners(&["a,b"], &[]),
                Some("`a,b` is no name of an owner: it holds a comma".to_owned()),
            ),
            (
                owners(&["a\u{1b}"], &[]),
                Some("`a\\x1b` is no name of an owner: it holds a control character".to_owned()),
            ),
            (
                Owners::new(many, Vec::new()),
                Some(
                    "the names of all owners of one thing have at most 4096 bytes together, these \
                     have 5000: make a group of them"
                        .to_owned(),
                ),
            ),
        ];
        for (owners, error) in table {
            assert_eq!(owners.verify().err().map(|error| error.to_string()), error);
        }
        assert_eq!(owners(&[], &[]).in_words(), "nobody");
        assert_eq!(owners(&["b", "a"], &["c"]).in_words(), "groups a, b; user c");
    }
}
