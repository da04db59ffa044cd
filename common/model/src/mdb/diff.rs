//! The difference between two machine databases.

use serde::{Deserialize, Serialize};

use super::{Machine, Machines};
use crate::JsonSchema;

/// The difference between two machine databases; hosts are sorted by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MdbDiff {
    /// Machines that are only in the new one.
    pub added: Vec<Machine>,
    /// Machines that are only in the old one.
    pub removed: Vec<Machine>,
    /// Machines with different records.
    pub changed: Vec<ChangedMachine>,
}

/// A machine with different records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangedMachine {
    pub hostname: String,
    /// The changed fields, sorted by name.
    pub fields: Vec<ChangedField>,
}

/// A field with different values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangedField {
    /// The name of the field, as in the text of the database.
    pub name: String,
    /// Its value before, as JSON.
    pub old: String,
    /// Its value now, as JSON.
    pub new: String,
}

impl MdbDiff {
    /// Compares `old` and `new`.
    #[must_use]
    pub fn between(old: &Machines, new: &Machines) -> Self {
        let only = |these: &Machines, those: &Machines| -> Vec<Machine> {
            let only = these.iter().filter(|(hostname, _)| !those.contains_key(*hostname));
            only.map(|(_, machine)| machine.clone()).collect()
        };
        let both = old.iter().filter_map(|(hostname, old)| Some((old, new.get(hostname)?)));
        let changed = both.filter(|(old, new)| old != new).map(|(old, new)| ChangedMachine {
            hostname: old.hostname.clone(),
            fields: fields(old, new),
        });
        Self { added: only(new, old), removed: only(old, new), changed: changed.collect() }
    }

    /// Returns true if nothing differs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }

    /// Formats one line for each machine: `+ web1 web/2`, `- web2 web/1` and `~ web3 RequiredImage:
    /// "web/1" -> "web/2"`.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let machine = |sign: char, machine: &Machine| {
            let line = format!("{sign} {} {}", machine.hostname, machine.required_image);
            line.trim_end().to_owned()
        };
        let removed = self.removed.iter().map(move |gone| machine('-', gone));
        let added = self.added.iter().map(move |new| machine('+', new));
        let changed = self.changed.iter().map(|changed| {
            let field =
                |field: &ChangedField| format!("{}: {} -> {}", field.name, field.old, field.new);
            let fields: Vec<String> = changed.fields.iter().map(field).collect();
            format!("~ {} {}", changed.hostname, fields.join(", "))
        });
        removed.chain(added).chain(changed)
    }
}

fn fields(old: &Machine, new: &Machine) -> Vec<ChangedField> {
    let values = |machine: &Machine| match serde_json::to_value(machine) {
        Ok(serde_json::Value::Object(values)) => values,
        other => unreachable!("a machine is an object of plain values: {other:?}"),
    };
    let (old, new) = (values(old), values(new));
    let mut fields: Vec<ChangedField> = old
        .iter()
        .map(|(name, old)| (name, old, &new[name]))
        .filter(|(_, old, new)| old != new)
        .map(|(name, old, new)| ChangedField {
            name: name.clone(),
            old: old.to_string(),
            new: new.to_string(),
        })
        .collect();
    fields.sort_by(|one, other| one.name.cmp(&other.name));
    fields
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mdb::parse;

    #[test]
    fn tells_what_came_what_went_and_what_changed() {
        let old = r#"[{"Hostname": "a", "RequiredImage": "x"}, {"Hostname": "b"},
            {"Hostname": "c", "RequiredImage": "x", "Tags": {"rack": "4"}}]"#;
        let new = r#"[{"Hostname": "a", "RequiredImage": "x"}, {"Hostname": "d"},
            {"Hostname": "c", "RequiredImage": "y", "Tags": {"rack": "5"}},
            {"Hostname": "e", "RequiredImage": "x"}]"#;
        let (old, new) = (parse(old).unwrap(), parse(new).unwrap());
        let edit = MdbDiff::between(&old, &new);
        let lines: Vec<String> = edit.lines().collect();
        let changed = r#"~ c RequiredImage: "x" -> "y", Tags: {"rack":"4"} -> {"rack":"5"}"#;
        assert_eq!(lines, ["- b", "+ d", "+ e x", changed]);
        assert!(MdbDiff::between(&old, &old).is_empty());
        assert!(!edit.is_empty());
    }
}
