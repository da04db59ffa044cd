//! What owners of environments may do without the power of a method.
//!
//! An owner may say what the machines of the environment have, and bring it to them. Which machines
//! it selects, what it depends on, its group and who must agree need the power: an owner could take
//! the machines of others, or go round a vote.
// tidy: core

use api::access::{Identity, OwnedItem, Owners, authorize, authorize_owners};
use api::dominator::rollouts::{EditEnvironments, OrderEnvironment, OrderRollout, StartRollout};
use api::method::Method;
use rollouts::definition::{Definition, EnvironmentEdit};
use rollouts::state::{Edits, State};
use rollouts::steps::Said;

/// Who calls, and what is remembered: orders about environments are checked against both.
#[derive(Clone, Copy)]
pub struct Orderer<'a> {
    identity: &'a Identity,
    state: &'a State,
}

fn denied(error: impl std::fmt::Display) -> Said {
    Said::new(403, error.to_string())
}

fn owners_of(definition: &Definition) -> Owners {
    Owners::new(definition.owner_groups.clone(), definition.owner_users.clone())
}

impl<'a> Orderer<'a> {
    /// Returns the caller with this identity.
    #[must_use]
    pub fn new(identity: &'a Identity, state: &'a State) -> Self {
        Self { identity, state }
    }

    fn definition(&self, name: &str) -> Option<&'a Definition> {
        self.state.environments.get(name)?.definition()
    }

    /// Expects the power to call `M`, or all environments to be owned. Nobody owns one that there
    /// is not.
    fn expect<M: Method>(&self, names: &[&str]) -> Result<(), Said> {
        if self.identity.may_call(M::NAME) {
            return Ok(());
        }
        if names.is_empty() {
            return self.expect_power::<M>("no environment");
        }
        for name in names {
            let what = format!("environment {name}");
            let owned = self.definition(name).map(|definition| {
                let owners = owners_of(definition);
                OwnedItem { what: what.clone(), owners }
            });
            let owned: Vec<OwnedItem> = owned.into_iter().collect();
            authorize(M::NAME, M::ACCESS, self.identity, &what, &owned).map_err(denied)?;
        }
        Ok(())
    }

    /// Expects the power to call `M`, for something that has no owners.
    fn expect_power<M: Method>(&self, what: &str) -> Result<(), Said> {
        authorize(M::NAME, M::ACCESS, self.identity, what, &[]).map_err(denied)
    }

    /// Expects that the caller may make these edits.
    ///
    /// # Errors
    ///
    /// [`Said`] with code 400 for names that cannot be owners, and 403.
    pub fn expect_may_edit(&self, edits: &Edits) -> Result<(), Said> {
        for edit in &edits.environments {
            let groups = edit.owner_groups.clone().unwrap_or_default();
            let owners = Owners::new(groups, edit.owner_users.clone().unwrap_or_default());
            owners.verify().map_err(|error| Said::new(400, format!("{}: {error}", edit.name)))?;
        }
        if self.identity.may_call(EditEnvironments::NAME) {
            return Ok(());
        }
        if let Some(group) = edits.groups.first() {
            let what = format!("group {}", group.name);
            self.expect_power::<EditEnvironments>(&what)?;
        }
        edits.environments.iter().try_for_each(|edit| self.expect_may_edit_one(edit, edits.whole))
    }

    fn expect_may_edit_one(&self, edit: &EnvironmentEdit, whole: bool) -> Result<(), Said> {
        let name = edit.name.as_str();
        self.expect::<EditEnvironments>(&[name])?;
        let Some(former) = self.definition(name) else { return Ok(()) };
        // What is no definition is refused later, with the place.
        let kept = Some(former).filter(|_| !whole);
        let Ok(wanted) = edit.clone().apply(kept) else { return Ok(()) };
        let changed = [
            ("select", former.select != wanted.select),
            ("group", former.group != wanted.group),
            ("depends_on", former.depends_on != wanted.depends_on),
            ("approval", former.approval != wanted.approval),
        ];
        if let Some((key, _)) = changed.iter().find(|(_, is_changed)| *is_changed) {
            let who = self.identity.in_words().unwrap_or_default();
            let method = EditEnvironments::NAME;
            let why = format!("an owner may not change it: that needs the power {method}");
            return Err(denied(format!("{name}.{key}: {who}: {why}")));
        }
        let own = OwnedItem { what: format!("environment {name}"), owners: owners_of(former) };
        let owners = owners_of(&wanted);
        authorize_owners(EditEnvironments::NAME, self.identity, &[], &own, &owners).map_err(denied)
    }

    /// Expects that the caller may give orders about an environment. To delete one needs the power.
    ///
    /// # Errors
    ///
    /// [`Said`] with code 403.
    pub fn expect_may_order(&self, name: &str, deletes: bool) -> Result<(), Said> {
        match deletes {
            true => self.expect_power::<OrderEnvironment>(&format!("environment {name}")),
            false => self.expect::<OrderEnvironment>(&[name]),
        }
    }

    /// Expects that the caller may start a rollout of these environments, each as `NAME@REVISION`:
    /// the revisions of others do not change by it.
    ///
    /// # Errors
    ///
    /// [`Said`] with code 403.
    pub fn expect_may_start(&self, environments: &[String]) -> Result<(), Said> {
        let names = environments.iter().map(|text| text.split('@').next().unwrap_or_default());
        self.expect::<StartRollout>(&names.collect::<Vec<_>>())
    }

    /// Expects that the caller may stop, cancel, roll back or resolve this rollout.
    ///
    /// # Errors
    ///
    /// [`Said`] with code 403, also for a rollout that there is not.
    pub fn expect_may_order_rollout(&self, id: &str) -> Result<(), Said> {
        let record = self.state.find(id).ok();
        let steps = record.iter().flat_map(|record| &record.rollout.steps);
        let changing = steps.filter(|step| step.revision != step.from);
        let names: Vec<&str> = changing.map(|step| step.environment.as_str()).collect();
        self.expect::<OrderRollout>(&names)
    }
}

#[cfg(test)]
mod tests {
    use rollouts::document::Group;
    use rollouts::state::{Editor, StartOrder};
    use serde_json::{Value, json};

    use super::*;

    fn edits(edit: Value) -> Edits {
        Edits { environments: vec![serde_json::from_value(edit).unwrap()], ..Edits::default() }
    }

    /// Two environments, `web` of the group `webs`, and rollouts of `web`, `db` and both.
    fn state() -> State {
        let mut state = State::default();
        let by = Editor { who: "root".into(), why: "so".into(), now: Default::default() };
        let mut edit = |edit: Value| state.edit(edits(edit), &by, &Default::default()).unwrap();
        let select = json!({"hosts": ["web*"]});
        edit(json!({"name": "web", "select": select, "source": {"image": "a"},
            "owner_groups": ["webs"]}));
        edit(json!({"name": "db", "select": {"hosts": ["db*"]}, "source": {"image": "a"}}));
        for names in [&["web@1"][..], &["db@1"], &["web@1", "db@1"]] {
            let environments = names.iter().map(|&name| name.to_owned()).collect();
            state.start(&StartOrder { environments, ..StartOrder::default() }, &by).unwrap();
        }
        state
    }

    fn identity(groups: &[&str], powers: &[&str]) -> Identity {
        Identity {
            user: Some("ann".to_owned()),
            groups: groups.iter().map(|&group| group.to_owned()).collect(),
            powers: api::access::Powers::new(powers.iter().copied()),
            ..Identity::default()
        }
    }

    #[test]
    fn owners_say_what_machines_have_and_not_which_machines_or_who_agrees() {
        let state = state();
        let owner = identity(&["webs", "ops"], &[]);
        let edit = |keys: Value| {
            let mut edit = json!({"name": "web", "source": {"image": "b"}});
            edit.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
            let said = Orderer::new(&owner, &state).expect_may_edit(&edits(edit));
            said.err().map_or_else(String::new, |said| format!("{} {}", said.code, said.message))
        };
        let key = |key: &str| {
            format!(
                "403 web.{key}: ann: an owner may not change it: that needs the power \
                 Dominator.EditEnvironments"
            )
        };
        #[rustfmt::skip]
        let table = [
            (json!({}), String::new()),
            (json!({"strategy": {"soak_s": 9}, "start": "auto"}), String::new()),
            (json!({"select": {"hosts": ["web*"]}}), String::new()),
            (json!({"select": {"hosts": ["*"]}}), key("select")),
            (json!({"group": "prod"}), key("group")),
            (json!({"depends_on": ["db"]}), key("depends_on")),
            (json!({"approval": {"voters": ["ann"]}}), key("approval")),
            (json!({"owner_groups": ["webs", "ops"], "owner_users": ["ann"]}), String::new()),
            (json!({"owner_users": ["ben"]}),
                "403 ann may not make user ben an owner of environment web: an owner can give it \
                 to groups that they are in and to themselves; for others it needs the power \
                 Dominator.EditEnvironments, or an owner of a directory above it".to_owned()),
            (json!({"owner_users": [" "]}),
                "400 web: ` ` is no name of an owner: it begins or ends with a space".to_owned()),
        ];
        for (keys, want) in table {
            assert_eq!(edit(keys.clone()), want, "{keys}");
        }
        let group = Group { name: "prod".into(), depends_on: Vec::new(), approval: None };
        let groups = Edits { groups: vec![group], ..Edits::default() };
        let new = edits(json!({"name": "new", "select": {}, "source": {"image": "a"}}));
        let codes = |identity: &Identity| {
            [&groups, &new].map(|edits| {
                let said = Orderer::new(identity, &state).expect_may_edit(edits);
                said.map_err(|said| said.code)
            })
        };
        assert_eq!(codes(&owner), [Err(403), Err(403)]);
        assert_eq!(codes(&identity(&[], &["Dominator.Edit*"])), [Ok(()), Ok(())]);
    }

    #[test]
    fn owners_give_orders_about_what_is_theirs() {
        let state = state();
        let may = |identity: &Identity| {
            let orderer = Orderer::new(identity, &state);
            let start = |names: &[&str]| {
                let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
                orderer.expect_may_start(&names).is_ok()
            };
            let orders = [("web", false), ("web", true), ("db", false), ("*", false)];
            let ordered = orders.map(|(name, deletes)| orderer.expect_may_order(name, deletes));
            let started = [&["web@1"][..], &["db@1"], &["web@1", "db@1"], &["no@1"], &[]];
            let stopped = ["r1", "r2", "r3", "r9"].map(|id| orderer.expect_may_order_rollout(id));
            (ordered.map(|one| one.is_ok()), started.map(start), stopped.map(|one| one.is_ok()))
        };
        let none = ([false; 4], [false; 5], [false; 4]);
        assert_eq!(may(&identity(&["ops"], &[])), none);
        let machine =
            Identity { kind: api::access::IdentityKind::Machine, ..identity(&["webs"], &[]) };
        assert_eq!(may(&machine), none);
        let of_web = (
            [true, false, false, false],
            [true, false, false, false, false],
            [true, false, false, false],
        );
        assert_eq!(may(&identity(&["webs"], &[])), of_web);
        let all = ([true; 4], [true; 5], [true; 4]);
        assert_eq!(may(&identity(&[], &["Dominator.*"])), all);
    }
}
