//! Selects the revocation lists of each authority.
//!
//! TLS uses the first list whose issuer has the name of the certificate's issuer, and refuses the
//! certificate if that issuer has not signed the list. But authorities can share a name, such as an
//! authority and its successor. So each authority gets the newest list that it signed itself, and
//! no list of another key.
// tidy: core

use std::cmp::Reverse;
use std::collections::BTreeMap;

use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::oid_registry::OID_X509_EXT_ISSUER_DISTRIBUTION_POINT;
use x509_parser::prelude::{
    CertificateRevocationList, FromDer as _, ParsedExtension, X509Certificate, X509Extension,
};

/// A revocation list, parsed.
pub(super) struct List<'a> {
    der: &'a CertificateRevocationListDer<'static>,
    parsed: CertificateRevocationList<'a>,
}

/// A list that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("list {number} cannot be used: {why}")]
pub(super) struct ListError {
    number: usize,
    why: &'static str,
}

/// The lists for one authority.
pub(super) struct Chosen {
    /// One for each issuer and kind, those of the authority first.
    pub(super) lists: Vec<CertificateRevocationListDer<'static>>,
    /// True if there are others under its name, by another key.
    pub(super) has_namesake: bool,
}

/// How a list relates to one authority; in the order of their use.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Owner<'a> {
    Own,
    /// It has the name of the authority, and its key is unknown: if the key is another, all
    /// certificates of the authority are refused.
    Unsure(Option<&'a [u8]>),
    /// It has another name, and maybe the key with this identifier: it is from an authority below.
    Other(&'a [u8], Option<&'a [u8]>),
}

/// Parses `lists`.
pub(super) fn read<'a>(
    lists: &'a [CertificateRevocationListDer<'static>],
) -> Result<Vec<List<'a>>, ListError> {
    let one = |(index, der): (usize, &'a CertificateRevocationListDer<'static>)| {
        let bad = |why| ListError { number: index + 1, why };
        let (_, parsed) = CertificateRevocationList::from_der(der)
            .map_err(|_| bad("it is no list of revoked certificates"))?;
        if parsed.version().is_none() {
            return Err(bad("it is of version 1, which has no number; openssl makes version 2 \
                            with the settings crlnumber and crl_extensions"));
        }
        Ok(List { der, parsed })
    };
    lists.iter().enumerate().map(one).collect()
}

/// Selects the lists for `authority`, one of `all`.
pub(super) fn choose(
    lists: &[List<'_>],
    authority: &X509Certificate<'_>,
    all: &[X509Certificate<'_>],
) -> Chosen {
    let mut newest: BTreeMap<_, &List<'_>> = BTreeMap::new();
    let mut has_namesake = false;
    for list in lists {
        let Some(owner) = list.owner(authority, all) else {
            has_namesake = true;
            continue;
        };
        // A list for a part of the certificates does not replace the others.
        let former = newest.entry((owner, list.scope())).or_insert(list);
        if list.age() > former.age() {
            *former = list;
        }
    }
    let mut chosen: Vec<_> = newest.into_iter().collect();
    // Of two authorities with one name below this one, the newer list comes first.
    chosen.sort_by_key(|((owner, _), list)| (rank(owner), Reverse(list.age())));
    let lists = chosen.into_iter().map(|(_, list)| list.der.clone()).collect();
    Chosen { lists, has_namesake }
}

/// Returns true if one of `between` has the name of `authority`, but another key.
pub(super) fn has_namesake(authority: &CertificateDer<'_>, between: &[CertificateDer<'_>]) -> bool {
    let Ok((_, authority)) = X509Certificate::from_der(authority) else { return true };
    // An unreadable certificate cannot issue others.
    between.iter().filter_map(|der| X509Certificate::from_der(der).ok()).any(|(_, one)| {
        one.subject().as_raw() == authority.subject().as_raw()
            && one.public_key().raw != authority.public_key().raw
    })
}

fn rank(owner: &Owner<'_>) -> u8 {
    match owner {
        Owner::Own => 0,
        Owner::Unsure(_) => 1,
        Owner::Other(..) => 2,
    }
}

impl List<'_> {
    /// Returns how the list relates to `authority`; `None` if another authority with its name
    /// signed it.
    fn owner(
        &self,
        authority: &X509Certificate<'_>,
        all: &[X509Certificate<'_>],
    ) -> Option<Owner<'_>> {
        let key_id = self.key_id();
        if !self.is_named_after(authority) {
            return Some(Owner::Other(self.parsed.issuer().as_raw(), key_id));
        }
        let wanted = key_id_of(authority);
        // A list with the right key identifier and a bad signature counts too: it must not be
        // ignored silently.
        if self.is_signed_by(authority) || (key_id.is_some() && key_id == wanted) {
            return Some(Owner::Own);
        }
        let is_other = key_id.is_some() && wanted.is_some();
        if is_other || all.iter().any(|one| self.is_named_after(one) && self.is_signed_by(one)) {
            return None;
        }
        Some(Owner::Unsure(key_id))
    }

    fn is_named_after(&self, authority: &X509Certificate<'_>) -> bool {
        self.parsed.issuer().as_raw() == authority.subject().as_raw()
    }

    fn is_signed_by(&self, authority: &X509Certificate<'_>) -> bool {
        self.parsed.verify_signature(authority.public_key()).is_ok()
    }

    /// Returns the stated identifier of the signing key.
    fn key_id(&self) -> Option<&[u8]> {
        self.parsed.extensions().iter().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::AuthorityKeyIdentifier(id) => {
                id.key_identifier.as_ref().map(|id| id.0)
            }
            _ => None,
        })
    }

    /// Returns the part of the certificates that it covers; `None` for all.
    fn scope(&self) -> Option<&[u8]> {
        let is_scope = |one: &&X509Extension<'_>| one.oid == OID_X509_EXT_ISSUER_DISTRIBUTION_POINT;
        self.parsed.extensions().iter().find(is_scope).map(|one| one.value)
    }

    /// A sort key; newer lists have greater ones.
    fn age(&self) -> impl Ord + '_ {
        (self.parsed.crl_number(), self.parsed.last_update().timestamp())
    }
}

fn key_id_of<'a>(authority: &'a X509Certificate<'_>) -> Option<&'a [u8]> {
    authority.extensions().iter().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0),
        _ => None,
    })
}
