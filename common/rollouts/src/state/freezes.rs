//! Freezes: until they end, rollouts change no more machines of an environment. What goes back, and
//! what is urgent, is not held up.

use std::sync::Arc;

use model::display::utc;
use model::tree::Time;
use serde::{Deserialize, Serialize};

use super::{Editor, State};
use crate::steps::Said;
use crate::window::opening;

/// Stands for all environments.
pub const ALL: &str = "*";

/// Why and until when nothing changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freeze {
    pub who: String,
    pub why: String,
    pub since: Time,
    /// Until somebody ends it, if it is `None`.
    pub until: Option<Time>,
}

impl State {
    /// Freezes an environment, or all.
    ///
    /// # Errors
    ///
    /// [`Said`] with code 404 if there is no such environment, and 400 if it would be over already.
    pub fn freeze(&mut self, name: &str, until: Option<Time>, by: &Editor) -> Result<String, Said> {
        self.expect_environment(name)?;
        if until.is_some_and(|until| until <= by.now) {
            return Err(Said::new(400, "the end of the freeze is over already"));
        }
        let (who, why, since) = (by.who.clone(), by.why.clone(), by.now);
        let freeze = Arc::new(Freeze { who, why, since, until });
        self.freezes.insert(name.to_owned(), freeze);
        let until = until.map_or_else(|| "somebody ends it".to_owned(), utc);
        Ok(format!("{} frozen until {until}", subject_is(name)))
    }

    /// Ends a freeze. The time that steps may take begins anew.
    ///
    /// # Errors
    ///
    /// [`Said`] with code 404 if there is no such environment, and 409 if it is not frozen.
    pub fn unfreeze(&mut self, name: &str, by: &Editor) -> Result<String, Said> {
        self.expect_environment(name)?;
        if self.freezes.remove(name).is_none() {
            return Err(Said::new(409, format!("{} not frozen", subject_is(name))));
        }
        self.begin_anew(name, by.now);
        Ok(format!("{} not frozen any more", subject_is(name)))
    }

    fn expect_environment(&self, name: &str) -> Result<(), Said> {
        match name == ALL || self.environments.contains_key(name) {
            true => Ok(()),
            false => Err(Said::new(404, format!("there is no environment `{name}`"))),
        }
    }

    /// Returns since when rollouts may change machines of an environment, which is always if it is
    /// `None`.
    ///
    /// # Errors
    ///
    /// Why they may not: it is frozen, or outside of the windows of its newest revision.
    pub fn opening(&self, name: &str, now: Time) -> Result<Option<Time>, String> {
        let frozen = [ALL, name].into_iter().filter_map(|name| self.freezes.get(name));
        let mut frozen = frozen.filter(|freeze| freeze.until.is_none_or(|until| now < until));
        if let Some(freeze) = frozen.next() {
            let until = freeze.until.map_or_else(String::new, |at| format!(" until {}", utc(at)));
            return Err(format!("frozen{until} by {}: {}", freeze.who, freeze.why));
        }
        let definition = self.environments.get(name).and_then(|one| one.definition());
        let windows = definition.map_or(&[][..], |one| &one.strategy.windows);
        opening(windows, now).map_err(|closed| closed.to_string())
    }

    /// Ends the freezes that are over.
    pub(crate) fn end_freezes(&mut self, now: Time) {
        let is_over = |freeze: &Freeze| freeze.until.is_some_and(|until| until <= now);
        let over = self.freezes.iter().filter(|(_, freeze)| is_over(freeze));
        let over: Vec<String> = over.map(|(name, _)| name.clone()).collect();
        for name in over {
            self.freezes.remove(&name);
            self.begin_anew(&name, now);
        }
    }

    /// Lets the time begin anew that steps on machines may take, after a freeze.
    fn begin_anew(&mut self, name: &str, now: Time) {
        for record in self.rollouts.values_mut().filter(|record| !record.is_ended()) {
            let record = Arc::make_mut(record);
            let steps = record.rollout.steps.iter();
            let held = steps.filter(|step| step.state.is_on_machines());
            let held = held.filter(|step| name == ALL || step.environment == name);
            record.since.extend(held.map(|step| (step.id.clone(), now)));
        }
    }
}

/// Begins a sentence about an environment, or all.
fn subject_is(name: &str) -> String {
    if name == ALL { "all environments are".to_owned() } else { format!("{name} is") }
}
