//! Edits of groups and environments. Each makes a new revision; none changes a machine.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::JsonSchema;
use model::display::counted;
use model::json::KeyError;
use model::mdb::Machine;
use model::names::check_name;
use model::tree::Time;
use serde::{Deserialize, Serialize};

use super::{ENVIRONMENTS_MAX, EnvironmentState, SharedMachines, State, StoredRevision};
use crate::content::{ContentRevision, NewestContent};
use crate::definition::{Definition, EnvironmentEdit, Source, Subject};
use crate::document::{Group, Kind, Revision, RolloutState};
use crate::gate::Gate;
use crate::steps::Said;

/// Edits of groups and environments.
#[derive(Clone, Debug, Default)]
pub struct Edits {
    pub groups: Vec<Group>,
    pub environments: Vec<EnvironmentEdit>,
    /// True if what an edit leaves out gets its default, rather than staying as it is.
    pub whole: bool,
    /// What is known of filegen-servers.
    pub content: NewestContent,
}

/// Who edits, why and when.
#[derive(Clone, Debug)]
pub struct Editor {
    pub who: String,
    pub why: String,
    pub now: Time,
}

/// What an edit did to an environment or group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EditOutcome {
    pub name: String,
    /// The new revision; `None` if nothing has changed, and for groups.
    pub revision: Option<Revision>,
    /// `created`, `updated` or `unchanged`.
    pub what: String,
    /// What may not be intended.
    pub warnings: Vec<String>,
}

fn invalid(error: &KeyError) -> Said {
    Said::new(400, error.to_string())
}

impl State {
    /// Takes edits of groups and environments, all or none. `mdb` has the machines.
    ///
    /// # Errors
    ///
    /// [`Said`] has the code of HTTP: 400 for an invalid edit, 409 if it was made from an older
    /// revision, or if there would be too many.
    pub fn edit(
        &mut self,
        edits: Edits,
        editor: &Editor,
        mdb: &SharedMachines,
    ) -> Result<Vec<EditOutcome>, Said> {
        let mut next = self.clone();
        let mut outcomes = Vec::new();
        for group in edits.groups {
            outcomes.push(next.set_group(group)?);
        }
        for edit in edits.environments {
            outcomes.push(next.edit_one(edit, edits.whole, editor, mdb, &edits.content)?);
        }
        let counts = [
            ("environments", self.environments.len(), next.environments.len()),
            ("groups", self.groups.len(), next.groups.len()),
        ];
        for (what, before, after) in counts {
            if after > before.max(ENVIRONMENTS_MAX) {
                let message = format!("there can be at most {ENVIRONMENTS_MAX} {what}");
                return Err(Said::new(409, message));
            }
        }
        next.document(None).check().map_err(|error| invalid(&error))?;
        for outcome in &mut outcomes {
            outcome.warnings = next.warnings(&outcome.name, mdb);
        }
        next.forget_old();
        *self = next;
        Ok(outcomes)
    }

    fn set_group(&mut self, group: Group) -> Result<EditOutcome, Said> {
        check_name(&group.name).map_err(|why| Said::new(400, format!("group: {why}")))?;
        let name = group.name.clone();
        let former = self.groups.insert(name.clone(), Arc::new(group));
        let what = match former {
            Some(former) if former == self.groups[&name] => "unchanged",
            Some(_) => "updated",
            None => "created",
        };
        Ok(EditOutcome { name, revision: None, what: what.to_owned(), warnings: Vec::new() })
    }

    fn edit_one(
        &mut self,
        edit: EnvironmentEdit,
        whole: bool,
        editor: &Editor,
        mdb: &SharedMachines,
        known: &NewestContent,
    ) -> Result<EditOutcome, Said> {
        let name = edit.name.clone();
        let former = self.environments.get(&name).cloned().unwrap_or_default();
        let newest = former.newest();
        if let Some(base) = edit.base.filter(|base| *base != newest) {
            let message = match (base, newest) {
                (0, _) => format!("{name} exists already, with revision {newest}"),
                (_, 0) => format!("there is no environment {name}"),
                _ => format!(
                    "{name} has revision {newest} now, and the edit was made from {base}: look at \
                     what has changed, and edit again"
                ),
            };
            return Err(Said::new(409, message));
        }
        let kept = former.definition().filter(|_| !whole);
        let definition = edit.apply(kept).map_err(|error| invalid(&error))?;
        if former.subject().is_some_and(|subject| subject != definition.source.subject()) {
            let why = "an environment is about images, bundles or content for ever: make another";
            return Err(invalid(&KeyError::new(&format!("{name}.source"), why)));
        }
        let outcome = |revision, what: &str| EditOutcome {
            name: name.clone(),
            revision,
            what: what.to_owned(),
            warnings: Vec::new(),
        };
        if former.definition() == Some(&definition) {
            return Ok(outcome(None, "unchanged"));
        }
        let is_new = newest == 0;
        let mut environment = EnvironmentState::clone(&former);
        let content = Self::content_of(&former, &definition, known)?;
        // Its machines have just that.
        let is_there = definition.source == Source::Mdb(true) || content.is_some();
        let images = images_of(&definition, mdb);
        let (author, why) = (editor.who.clone(), editor.why.clone());
        let at = editor.now;
        let kept = Vec::new();
        let order = 0;
        let revision = StoredRevision { definition, author, why, at, images, kept, content, order };
        environment.revisions.insert(newest + 1, revision);
        if is_new && is_there {
            environment.commit(newest + 1, Kind::Mdb, self.next_order());
        }
        self.environments.insert(name.clone(), Arc::new(environment));
        self.note_kept(&name, newest + 1);
        Ok(outcome(Some(newest + 1), if is_new { "created" } else { "updated" }))
    }

    /// Returns the content revision of a new revision: that of the former one, or the newest one of
    /// another server.
    fn content_of(
        former: &EnvironmentState,
        definition: &Definition,
        known: &NewestContent,
    ) -> Result<Option<ContentRevision>, Said> {
        let Some(server) = definition.source.content() else { return Ok(None) };
        let last = former.revisions.last_key_value().map(|(_, last)| last);
        let same = last.filter(|last| last.definition.source == definition.source);
        let unknown = || {
            Said::new(
                409,
                format!(
                    "no content revision of {server} is known: images must have computed files of \
                     it by this name, and it must answer"
                ),
            )
        };
        let content = same.and_then(|last| last.content).or_else(|| known.get(server).copied());
        content.map(Some).ok_or_else(unknown)
    }

    /// Returns what may not be intended about an environment.
    fn warnings(&self, name: &str, mdb: &SharedMachines) -> Vec<String> {
        let Some(environment) = self.environments.get(name) else { return Vec::new() };
        let Some(definition) = environment.definition() else { return Vec::new() };
        let selected: Vec<_> = mdb.values().filter(|one| definition.select.selects(one)).collect();
        let mut warnings = Vec::new();
        if selected.is_empty() {
            warnings.push("it selects no machine of the machine database".to_owned());
        }
        let percent = usize::from(definition.strategy.min_healthy_percent);
        let floor = (selected.len() * percent).div_ceil(100);
        if !selected.is_empty() && floor == selected.len() && definition.strategy.min_batch == 0 {
            warnings.push(format!(
                "{percent} % of {} leave no machine that could be changed, and min_batch is 0",
                counted(selected.len() as u64, "machine")
            ));
        }
        let mut shared: BTreeMap<&str, u64> = BTreeMap::new();
        // Bundles go with each other, and with an image.
        let has_images = |one: &EnvironmentState| one.subject() == Some(Subject::Images);
        let is_other = |(other, state): &(&String, &Arc<EnvironmentState>)| {
            *other != name && has_images(environment) && has_images(state)
        };
        for (other, state) in self.environments.iter().filter(is_other) {
            let Some(theirs) = state.definition() else { continue };
            let both = selected.iter().filter(|one| theirs.select.selects(one)).count() as u64;
            if both > 0 {
                shared.insert(other, both);
            }
        }
        warnings.extend(shared.into_iter().map(|(other, both)| {
            format!(
                "{} are in {other} too: the one that comes to machines first applies",
                counted(both, "machine")
            )
        }));
        warnings
    }

    /// Deletes an environment, and stops rollouts of it alone that nobody has started. Without
    /// `force` no machine may get another image by it.
    ///
    /// # Errors
    ///
    /// [`Said`] has the code of HTTP: 404 for an unknown environment, 409 if something is in the
    /// way.
    pub fn delete(
        &mut self,
        name: &str,
        force: bool,
        mdb: &SharedMachines,
        now: Time,
    ) -> Result<(), Said> {
        if !self.environments.contains_key(name) {
            return Err(Said::new(404, format!("there is no environment {name}")));
        }
        let of_it = self.unfinished().filter(|one| one.rollout.environments().contains(name));
        let of_it: Vec<Arc<super::RolloutRecord>> = of_it.cloned().collect();
        let only = BTreeSet::from([name.to_owned()]);
        let stays = |record: &&Arc<super::RolloutRecord>| {
            record.rollout.kind.is_of_people() || !record.rollout.changing().is_subset(&only)
        };
        if let Some(record) = of_it.iter().find(stays) {
            let id = &record.rollout.id;
            return Err(Said::new(409, format!("{id} is of {name}: stop it first")));
        }
        let mut next = self.clone();
        for record in &of_it {
            next.end(record, RolloutState::Stopped, format!("{name} is deleted"), now);
        }
        next.environments.remove(name);
        next.freezes.remove(name);
        next.document(None).check().map_err(|error| Said::new(409, error.to_string()))?;
        let (before, after) = (Gate::new(self), Gate::new(&next));
        let moves = mdb.values().filter(|one| before.image_of(one) != after.image_of(one));
        let moves = moves.count() as u64;
        if moves > 0 && !force {
            let message = format!(
                "{} would get another image at once: let the machine database require what they \
                 have first, or use --force",
                counted(moves, "machine")
            );
            return Err(Said::new(409, message));
        }
        let limits = |gate: &Gate<'_>, one: &Machine| gate.content_limits(one);
        let freed = mdb.values().filter(|one| limits(&before, one) != limits(&after, one));
        let freed = freed.count() as u64;
        if freed > 0 && !force {
            let message = format!(
                "{} would get new content of computed files without a rollout: use --force",
                counted(freed, "machine")
            );
            return Err(Said::new(409, message));
        }
        *self = next;
        Ok(())
    }

    /// Returns the newest revision of an environment, if nobody has started it yet. One that is not
    /// active any more is left to people.
    #[must_use]
    pub fn not_started(&self, name: &str) -> Option<Revision> {
        let environment = self.environments.get(name)?;
        let newest = environment.newest();
        let is_new = environment.started == 0 && environment.committed == 0;
        let is_due = (environment.active || is_new) && !environment.was_started(newest);
        is_due.then_some(newest)
    }

    /// Makes a new revision of each environment for which the machine database names other images
    /// than its newest revision. A former one that nobody has started goes. Returns the
    /// environments.
    pub fn take_mdb(&mut self, mdb: &SharedMachines, now: Time) -> Vec<(String, Revision)> {
        let mut drafts = Vec::new();
        let names: Vec<String> = self.environments.keys().cloned().collect();
        for name in names {
            let environment = &self.environments[&name];
            let Some((&number, newest)) = environment.revisions.last_key_value() else { continue };
            if newest.definition.source != Source::Mdb(true) {
                continue;
            }
            let images = images_of(&newest.definition, mdb);
            if images == newest.images {
                continue;
            }
            let is_draft = newest.author == MDB_AUTHOR && !environment.was_started(number);
            let revision = StoredRevision {
                definition: newest.definition.clone(),
                author: MDB_AUTHOR.to_owned(),
                why: "the machine database was edited".to_owned(),
                at: now,
                images,
                kept: Vec::new(),
                content: None,
                order: 0,
            };
            let environment = Arc::make_mut(self.environments.entry(name.clone()).or_default());
            if is_draft {
                environment.revisions.remove(&number);
            }
            // The edit was taken back.
            let committed = environment.revisions.get(&environment.committed);
            let is_back = is_draft
                && environment.newest() == environment.committed
                && committed.is_some_and(|one| {
                    one.images == revision.images && one.definition == revision.definition
                });
            if !is_back {
                environment.revisions.insert(number + 1, revision);
                drafts.push((name, number + 1));
            }
        }
        drafts
    }
}

/// The author of revisions that follow from edits of the machine database.
pub const MDB_AUTHOR: &str = "the machine database";

/// Returns the images that a new revision has of its own.
fn images_of(definition: &Definition, mdb: &SharedMachines) -> BTreeMap<String, String> {
    if definition.source != Source::Mdb(true) {
        return BTreeMap::new();
    }
    let selected = mdb.values().filter(|machine| definition.select.selects(machine));
    let named = selected.filter(|machine| !machine.required_image.is_empty());
    named.map(|machine| (machine.hostname.clone(), machine.required_image.clone())).collect()
}
