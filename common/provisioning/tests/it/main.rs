//! Resource files, bindings, order, and decisions.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod bindings;
mod decisions;
mod fleet;
mod images;
mod kept;
mod machine;
mod orders;
mod properties;
mod protocol;
mod resources;
mod states;
mod versions;

use std::collections::BTreeSet;

use provisioning::plan::{Orphan, Problem, Status};
use provisioning::protocol::Answer;
use provisioning::{Bindings, Call, Next, Plan, Resources, State, plan};
use serde_json::{Map, Value, json};

/// Reads resources, each an object without its kind and id: `kind.id` is its key.
pub fn resources(texts: &[(&str, Value)]) -> Resources {
    let files: Vec<(String, String)> = texts
        .iter()
        .map(|(name, value)| {
            let (kind, id) = name.split_once('.').unwrap();
            let mut fields = value.as_object().cloned().unwrap_or_default();
            fields.insert("kind".to_owned(), json!(kind));
            fields.insert("id".to_owned(), json!(id));
            (format!("{id}.json"), Value::Object(fields).to_string())
        })
        .collect();
    Resources::parse(files.iter().map(|(name, text)| (name.as_str(), text.as_str()))).unwrap()
}

/// `aws` makes databases and queues, `ftl` makes modules.
pub fn bindings() -> Bindings {
    Bindings::parse(
        r#"
        [[provisioner]]
        name = "aws"
        kinds = ["database", "queue"]
        user = "cloud"
        [[provisioner]]
        name = "ftl"
        kinds = ["module"]
        user = "root"
        "#,
    )
    .unwrap()
}

/// One resource and the calls about it, as `aws [a b] [a]`.
pub fn shown(call: &Call) -> String {
    let request = call.request();
    let wanted = request.desired.iter().map(|want| want.resource.id.clone());
    let there = request.previous.iter().map(|old| match old.finished {
        true => old.resource.id.clone(),
        false => format!("{}?", old.resource.id),
    });
    let wanted: Vec<String> = wanted.collect();
    let there: Vec<String> = there.collect();
    let verb = match call {
        Call::Provision(call) => format!("{}: {}", call.wave, call.provisioner),
        Call::Status(Status { token, provisioner, .. }) => format!("{provisioner} status {token}"),
    };
    format!("{verb} [{}] [{}]", wanted.join(" "), there.join(" "))
}

/// The calls that would be made.
pub fn planned(plan: &Plan) -> Vec<String> {
    plan.calls.iter().map(|call| shown(&Call::Provision(call.clone()))).collect()
}

pub fn problems(plan: &Plan) -> Vec<String> {
    plan.problems.iter().map(|Problem { at, error }| format!("{at}: {error}")).collect()
}

pub fn orphans(plan: &Plan) -> Vec<String> {
    plan.orphans.iter().map(|Orphan { id, reason, .. }| format!("{id}: {reason}")).collect()
}

pub fn answer(value: &Value) -> Answer {
    Answer::parse(value.to_string().as_bytes()).unwrap()
}

pub fn success(outputs: &Value) -> Answer {
    answer(&json!({"tasks": [{"success": {"outputs": outputs}}]}))
}

/// Answers all calls with success until nothing more is to be done; returns the calls.
pub fn provision(resources: &Resources, state: &mut State) -> Vec<String> {
    provision_with(resources, state, |_| Ok(success(&json!({}))))
}

/// As [`provision`], with answers.
pub fn provision_with(
    resources: &Resources,
    state: &mut State,
    mut answer: impl FnMut(&Call) -> Result<Answer, String>,
) -> Vec<String> {
    let mut made = Vec::new();
    state.retry();
    loop {
        let plan = plan(resources, &bindings(), state);
        match plan.next(state) {
            Next::Calls(calls) => {
                for call in calls {
                    made.push(shown(&call));
                    state.begin(&call);
                    let answer = answer(&call);
                    state.end(&call, answer);
                }
            }
            Next::Finished => {
                state.settle(resources);
                return made;
            }
            Next::Failed => return made,
            Next::Refused | Next::Awaits => panic!("{plan:?}"),
        }
        assert!(made.len() < 10_000, "{made:?}");
    }
}

pub fn failures(state: &State) -> Vec<String> {
    state.failures().iter().map(|one| format!("{}: {}", one.id, one.error)).collect()
}

/// The outputs of a resource.
pub fn outputs(state: &State, id: &str) -> Option<Map<String, Value>> {
    state.outputs(id).map(|(_, outputs)| outputs.clone())
}

pub fn ids(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}
