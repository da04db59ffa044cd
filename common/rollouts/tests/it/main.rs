//! What is decided about rollouts.

#![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

mod automatic;
mod batches;
mod contents;
mod documents;
mod environments;
mod fleet;
mod kept;
mod lifecycle;
mod locks;
mod pace;
mod selectors;
mod steps;
mod votes;
mod windows;

use std::collections::BTreeMap;

use rollouts::{Answer, Document, decide};
use serde_json::{Value, json};

/// Decides about a document.
fn answer(document: &Value) -> Answer {
    decide(&Document::parse(&document.to_string()).unwrap())
}

/// Returns `ID STATE: CAUSE` of the rollout and of each step.
fn states(answer: &Answer) -> String {
    let Some(rollout) = &answer.rollout else { return "no rollout\n".to_owned() };
    let name = |value: Value| value.as_str().unwrap().to_owned();
    let line = |id: &str, state: Value, cause: &str| {
        format!("{id} {}: {cause}", name(state)).trim_end_matches(": ").to_owned() + "\n"
    };
    let mut text = line(&rollout.id, json!(rollout.state), &rollout.cause);
    for step in &rollout.steps {
        text += &line(&step.id, json!(step.state), &step.cause);
    }
    text
}

/// Returns a machine that environment `e` selects, with one task of it.
fn machine(host: &str, revision: u64, state: &str) -> Value {
    let tasks = json!([{"environment": "e", "revision": revision, "state": state}]);
    json!({"host": host, "environments": ["e"], "tasks": tasks})
}

/// Returns the bundles that are left out of an image: `l4` fits nowhere, `l3` not with `i1`.
fn left_out(image: &str) -> BTreeMap<String, String> {
    let parts: Vec<&str> = image.split(" + ").collect();
    let fits = |bundle: &str| bundle != "l4" && !(bundle == "l3" && parts.contains(&"i1"));
    let left_out = parts.iter().filter(|bundle| parts.len() > 1 && !fits(bundle));
    left_out.map(|bundle| ((*bundle).to_owned(), "/x is taken".to_owned())).collect()
}
