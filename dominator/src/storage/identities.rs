//! By what each machine was last known, a row for each.

use std::collections::BTreeMap;
use std::sync::Arc;

use redb::{ReadableDatabase as _, ReadableTable as _, TableDefinition};

use super::{State, StateError};
use crate::core::identity::KnownIdentity;
use crate::core::order::Order;

/// JSON by host name.
pub(super) const IDENTITIES: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("identities");

/// What is wrong with a row.
const ROW: &str = "identities";

impl State {
    /// By what each machine was last known.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn identities(&self) -> Result<BTreeMap<Arc<str>, KnownIdentity>, StateError> {
        let rows = self.with("read", |database| {
            let table = database.begin_read()?.open_table(IDENTITIES)?;
            let mut rows: Vec<(Arc<str>, Vec<u8>)> = Vec::new();
            for row in table.iter()? {
                let (hostname, known) = row?;
                rows.push((hostname.value().into(), known.value().to_vec()));
            }
            Ok(rows)
        })?;
        let parsed = rows.into_iter().map(|(hostname, known)| {
            let known = serde_json::from_slice(&known);
            known.map(|known| (hostname, known)).map_err(|source| self.damaged(ROW, source))
        });
        parsed.collect()
    }

    /// Keeps by what these machines were last known, or nothing any more, and the order that it
    /// follows from if there is one; all of it is on the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`StateError`]; nothing is on the disk then.
    pub fn keep_identities(
        &self,
        known: &[(Arc<str>, Option<KnownIdentity>)],
        order: Option<&Order>,
    ) -> Result<(), StateError> {
        let mut rows = Vec::new();
        for (hostname, known) in known {
            let known = known.as_ref().map(serde_json::to_vec).transpose();
            rows.push((hostname, known.map_err(|source| self.damaged(ROW, source))?));
        }
        self.transact(order, |write| {
            let mut table = write.open_table(IDENTITIES)?;
            for (hostname, known) in rows {
                match known {
                    Some(known) => table.insert(&**hostname, &known[..])?,
                    None => table.remove(&**hostname)?,
                };
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(machine_id: &str) -> Option<KnownIdentity> {
        Some(KnownIdentity { machine_id: machine_id.into(), is_own: true, trust: None })
    }

    #[test]
    fn rows_are_kept_changed_and_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let state = State::open(directory.path()).unwrap();
        assert_eq!(state.identities().unwrap(), BTreeMap::new());
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        state.keep_identities(&[(a.clone(), known("1")), (b.clone(), known("2"))], None).unwrap();
        state.keep_identities(&[(a, None), (b.clone(), known("3"))], None).unwrap();
        drop(state);
        let state = State::open(directory.path()).unwrap();
        assert_eq!(state.identities().unwrap(), BTreeMap::from([(b, known("3").unwrap())]));
    }
}
