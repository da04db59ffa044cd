//! Zones of trust: what each authority may vouch for.
//!
//! An authority without a zone may vouch for everything. An authority with a zone may vouch only
//! for callers of the methods and for servers of the names that the zone lists, whatever their
//! certificates contain.
// tidy: core

use serde::Deserialize;

use api::access::{Powers, identity};
use api::certificate::Certificate;

/// The zone of one authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// The authority: its common name, or `sha256:` and the digest of its certificate.
    authority: String,
    /// The methods that its callers may call.
    pub methods: Powers,
    /// Patterns of the names of its servers; `*` stands for any characters.
    servers: Vec<String>,
}

/// Why zones are not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ZonesError {
    /// The text is not a list of zones in TOML.
    #[error("{0}")]
    Text(String),
    #[error(
        "a zone is of the authority `{0}`, which is not in ca.pem: a zone that limits nothing is \
         a mistake"
    )]
    Stray(String),
    /// There is no zone. A truncated file must not look as if nothing were limited.
    #[error("it names no zone: copy it again, or remove it if no authority is to be limited")]
    Nothing,
    #[error("two zones are of the authority `{0}`: make them one")]
    Twice(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default)]
    zone: Vec<Written>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    authority: String,
    #[serde(default)]
    methods: Vec<String>,
    #[serde(default)]
    servers: Vec<String>,
}

/// Parses `zones.toml`.
pub fn parse(text: &str) -> Result<Vec<Zone>, ZonesError> {
    let document: Document = toml::from_str(text)
        .map_err(|error| ZonesError::Text(error.to_string().trim_end().to_owned()))?;
    let zones = document.zone.into_iter().map(|written| {
        let bad = written.methods.iter().find(|pattern| pattern.split('.').count() != 2);
        if let Some(pattern) = bad {
            let text = format!("invalid pattern of methods `{pattern}`: write Service.Method");
            return Err(ZonesError::Text(text));
        }
        let methods = Powers::new(written.methods);
        Ok(Zone { authority: written.authority, methods, servers: written.servers })
    });
    zones.collect()
}

/// Returns the zone of each of `authorities`, in their order.
///
/// # Errors
///
/// Fails if a zone is for none of them, or two are for the same.
pub fn assign(
    zones: &[Zone],
    authorities: &[Certificate],
) -> Result<Vec<Option<Zone>>, ZonesError> {
    if let Some(stray) = zones.iter().find(|zone| !authorities.iter().any(|one| zone.is_of(one))) {
        return Err(ZonesError::Stray(stray.authority.clone()));
    }
    let of = |authority: &Certificate| {
        let mut found = zones.iter().filter(|zone| zone.is_of(authority));
        let first = found.next().cloned();
        match found.next() {
            Some(second) => Err(ZonesError::Twice(second.authority.clone())),
            None => Ok(first),
        }
    };
    authorities.iter().map(of).collect()
}

impl Zone {
    fn is_of(&self, authority: &Certificate) -> bool {
        self.authority == authority.common_name || self.authority == authority.fingerprint
    }

    /// Returns true if the authority may vouch for the server `name`.
    #[must_use]
    pub fn has_server(&self, name: &str) -> bool {
        let name = name.to_ascii_lowercase();
        self.servers.iter().any(|pattern| {
            identity::matches(pattern.to_ascii_lowercase().as_bytes(), name.as_bytes())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::access::Identity;

    fn authority(name: &str, print: &str) -> Certificate {
        Certificate {
            common_name: name.to_owned(),
            issuer: name.to_owned(),
            hosts: Vec::new(),
            identity: Identity::default(),
            not_before: 0,
            not_after: 1,
            serial: "1".to_owned(),
            fingerprint: format!("sha256:{print}"),
            key: "sha256:00".to_owned(),
            is_authority: true,
        }
    }

    const TEXT: &str = "[[zone]]\nauthority = 'web'\nmethods = ['Subd.*', 'Dominator.ListSubs']\n\
                        [[zone]]\nauthority = 'sha256:bb'\nservers = ['*.lab.test', '10.1.*']\n";

    #[test]
    fn a_zone_allows_what_it_lists() {
        let zones = parse(TEXT).unwrap();
        let all = [authority("main", "aa"), authority("lab", "bb"), authority("web", "cc")];
        let assigned = assign(&zones, &all).unwrap();
        assert_eq!(assigned, [None, Some(zones[1].clone()), Some(zones[0].clone())]);
        let [lab, web] = [&zones[1], &zones[0]];
        let methods = ["Subd.Poll", "Dominator.ListSubs", "Dominator.Retry"];
        assert_eq!(methods.map(|method| web.methods.has(method)), [true, true, false]);
        assert_eq!(methods.map(|method| lab.methods.has(method)), [false; 3]);
        let servers = ["a.lab.test", "A.LAB.TEST", "10.1.2.3", "lab.test", "10.2.1.1", ""];
        let want = [true, true, true, false, false, false];
        assert_eq!(servers.map(|name| lab.has_server(name)), want);
        assert_eq!(servers.map(|name| web.has_server(name)), [false; 6]);
    }

    #[test]
    fn what_limits_nothing_or_says_too_much_is_refused() {
        let zones = parse(TEXT).unwrap();
        let all = [authority("web", "cc")];
        assert_eq!(assign(&zones, &all), Err(ZonesError::Stray("sha256:bb".to_owned())));
        let all = [authority("web", "bb")];
        assert_eq!(assign(&zones, &all), Err(ZonesError::Twice("sha256:bb".to_owned())));
        for text in ["[[zone]]\n", "x = 1", "[[zone]]\nauthority = 'a'\nmethod = ['x']", "[["] {
            assert!(matches!(parse(text), Err(ZonesError::Text(_))), "{text}");
        }
        let error = parse("[[zone]]\nauthority = 'a'\nmethods = ['Subd']").unwrap_err();
        let text = "invalid pattern of methods `Subd`: write Service.Method";
        assert_eq!(error.to_string(), text);
        assert_eq!(parse("# nothing\n"), Ok(Vec::new()));
    }
}
