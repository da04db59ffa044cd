//! What owners of environments may do without the power of a method.
//!
//! An owner may say what the machines of the environment have, and bring it to them. Which machines
//! it selects, what it depends on, its group and who must agree need the power: an owner could take
//! the machines of others, or go round a vote.
// tidy: core

use api::access::{Identity, OwnedItem, Owners, authorize, authorize_owners};
use api::dominator::rollouts::{
    EditEnvironments, EnvironmentOrder, OrderEnvironment, OrderRollout, StartRollout,
};
use api::method::Method;
use rollouts::definition::{Definition, EnvironmentEdit};
use rollouts::state::{Edits, StartOrder, State};
use rollouts::steps::Said;

/// Checks what a caller may do, given what is remembered of environments and rollouts.
#[derive(Clone, Copy)]
pub struct OwnerCheck<'a> {
    identity: &'a Identity,
    state: &'a State,
}

fn denied(error: impl std::fmt::Display) -> Said {
    Said::new(403, error.to_string())
}

fn owners_of(definition: &Definition) -> Owners {
    Owners::new(definition.owner_groups.clone(), definition.owner_users.clone())
}

impl<'a> OwnerCheck<'a> {
    /// Returns the check of the caller with this identity.
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
        // An edit that makes no definition is refused later, with the place.
        let kept = Some(former).filter(|_| !whole);
        let Ok(wanted) = edit.clone().apply(kept) else { return Ok(()) };
        self.expect_same::<EditEnvironments>(name, former, &wanted)?;
        let own = OwnedItem { what: format!("environment {name}"), owners: owners_of(former) };
        let owners = owners_of(&wanted);
        authorize_owners(EditEnvironments::NAME, self.identity, &[], &own, &owners).map_err(denied)
    }

    /// Expects a definition not to differ from the newest one in what owners may not change.
    fn expect_same<M: Method>(
        &self,
        name: &str,
        newest: &Definition,
        wanted: &Definition,
    ) -> Result<(), Said> {
        let changed = [
            ("select", newest.select != wanted.select),
            ("group", newest.group != wanted.group),
            ("depends_on", newest.depends_on != wanted.depends_on),
            ("approval", newest.approval != wanted.approval),
        ];
        let Some((key, _)) = changed.iter().find(|(_, is_changed)| *is_changed) else {
            return Ok(());
        };
        let what = format!("{name}.{key}");
        Err(self.needs_power::<M>(&what, "an owner may not change it"))
    }

    fn needs_power<M: Method>(&self, what: &str, why: &str) -> Said {
        let who = self.identity.in_words().unwrap_or_default();
        denied(format!("{what}: {who}: {why}: that needs the power {}", M::NAME))
    }

    /// Expects that the caller may give this order about an environment. To delete one needs the
    /// power, and so does to end or replace a freeze by somebody else.
    ///
    /// # Errors
    ///
    /// [`Said`] with code 403.
    pub fn expect_may_order(&self, name: &str, order: EnvironmentOrder) -> Result<(), Said> {
        let of_freeze = match order {
            EnvironmentOrder::Delete { .. } => {
                return self.expect_power::<OrderEnvironment>(&format!("environment {name}"));
            }
            EnvironmentOrder::Freeze { .. } | EnvironmentOrder::Unfreeze => true,
            EnvironmentOrder::Activate | EnvironmentOrder::Deactivate => false,
        };
        self.expect::<OrderEnvironment>(&[name])?;
        let own_name = self.identity.in_words();
        let freeze = self.state.freezes.get(name).filter(|_| of_freeze);
        match freeze.filter(|freeze| Some(&freeze.who) != own_name.as_ref()) {
            Some(freeze) if !self.identity.may_call(OrderEnvironment::NAME) => {
                let why = format!("{} has frozen it", freeze.who);
                Err(self.needs_power::<OrderEnvironment>(name, &why))
            }
            _ => Ok(()),
        }
    }

    /// Expects that the caller may start this rollout: the revisions of environments that are not
    /// named do not change by it. An owner may not bring an old revision back that differs from the
    /// newest one in what owners may not change, nor pass over freezes and deprecations.
    ///
    /// # Errors
    ///
    /// [`Said`] with code 403.
    pub fn expect_may_start(&self, order: &StartOrder) -> Result<(), Said> {
        let named = order.environments.iter();
        let named = named.map(|text| text.split_once('@').unwrap_or((text, "")));
        let named: Vec<(&str, &str)> = named.collect();
        let names: Vec<&str> = named.iter().map(|(name, _)| *name).collect();
        self.expect::<StartRollout>(&names)?;
        if self.identity.may_call(StartRollout::NAME) {
            return Ok(());
        }
        for (flag, is_set) in
            [("--urgent", order.urgent), ("--allow-deprecated", order.allow_deprecated)]
        {
            if is_set {
                return Err(self.needs_power::<StartRollout>(flag, "it is not for owners"));
            }
        }
        for (name, number) in named {
            let Some(environment) = self.state.environments.get(name) else { continue };
            let former = environment.former.last().copied();
            let Some(number) = number.parse().ok().or(former) else { continue };
            let newest = environment.definition();
            // Number 0 is what the machine database says.
            let stored = environment.revisions.get(&number);
            if let (Some(newest), Some(stored)) = (newest, stored) {
                self.expect_same::<StartRollout>(name, newest, &stored.definition)?;
            }
        }
        Ok(())
    }

    /// Expects that the caller may stop, cancel, roll back or resolve this rollout.
    ///
    /// # Errors
    ///
    /// [`Said`] with code 403, also for a rollout that there is not.
    pub fn expect_may_order_rollout(&self, id: &str) -> Result<(), Said> {
        let record = self.state.find(id).ok();
        let changing = record.map(|record| record.rollout.changing()).unwrap_or_default();
        self.expect::<OrderRollout>(&changing.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use rollouts::document::Group;
    use rollouts::state::Editor;
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
            let said = OwnerCheck::new(&owner, &state).expect_may_edit(&edits(edit));
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
                let said = OwnerCheck::new(identity, &state).expect_may_edit(edits);
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
            let check = OwnerCheck::new(identity, &state);
            let start = |names: &[&str]| {
                let environments = names.iter().map(|&name| name.to_owned()).collect();
                let order = StartOrder { environments, ..StartOrder::default() };
                check.expect_may_start(&order).is_ok()
            };
            let delete = EnvironmentOrder::Delete { force: false };
            let activate = EnvironmentOrder::Activate;
            let orders = [("web", activate), ("web", delete), ("db", activate), ("*", activate)];
            let ordered = orders.map(|(name, order)| check.expect_may_order(name, order));
            let started = [&["web@1"][..], &["db@1"], &["web@1", "db@1"], &["no@1"], &[]];
            let stopped = ["r1", "r2", "r3", "r9"].map(|id| check.expect_may_order_rollout(id));
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
    #[test]
    fn owners_bring_back_no_other_machines_and_pass_over_nothing() {
        let mut state = state();
        let by = Editor { who: "root".into(), why: "so".into(), now: Default::default() };
        let approval = json!({"voters": ["root"], "min_approvals": 1});
        let second = json!({"name": "web", "source": {"image": "b"}, "approval": approval});
        state.edit(edits(second), &by, &Default::default()).unwrap();
        state.freeze("web", None, &by).unwrap();
        let owner = identity(&["webs"], &[]);
        let check = OwnerCheck::new(&owner, &state);
        let said = |result: Result<(), Said>| result.map_err(|said| said.message);
        let start = |what: &str, urgent, allow_deprecated| {
            let environments = vec![what.to_owned()];
            let order =
                StartOrder { environments, urgent, allow_deprecated, ..StartOrder::default() };
            said(check.expect_may_start(&order))
        };
        let needs = |what: &str, method: &str| {
            Err(format!("{what}: that needs the power Dominator.{method}"))
        };
        let old = "web.approval: ann: an owner may not change it";
        assert_eq!(start("web@1", false, false), needs(old, "StartRollout"));
        assert_eq!(start("web@2", false, false), Ok(()));
        let urgent = "--urgent: ann: it is not for owners";
        assert_eq!(start("web@2", true, false), needs(urgent, "StartRollout"));
        let deprecated = "--allow-deprecated: ann: it is not for owners";
        assert_eq!(start("web@2", false, true), needs(deprecated, "StartRollout"));
        // Another freeze would take the place of the first.
        let freeze = EnvironmentOrder::Freeze { until: None };
        let frozen = "web: ann: root has frozen it";
        assert_eq!(said(check.expect_may_order("web", freeze)), needs(frozen, "OrderEnvironment"));
        let unfreeze = EnvironmentOrder::Unfreeze;
        assert_eq!(
            said(check.expect_may_order("web", unfreeze)),
            needs(frozen, "OrderEnvironment")
        );
        state.freeze("web", None, &Editor { who: "ann".into(), ..by }).unwrap();
        assert!(OwnerCheck::new(&owner, &state).expect_may_order("web", unfreeze).is_ok());
    }
}
