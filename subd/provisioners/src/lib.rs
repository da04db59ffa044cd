//! Plugins for provisioning that ship with the project.
//!
//! * [`file`](mod@file): `dom-provisioner-file` makes files.
//! * [`command`]: `dom-provisioner-command` runs commands.
//!
//! Both do their work at once, give no tokens, and keep nothing.

pub mod command;
pub mod file;

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::process::ExitCode;

use model::unknown_keys;
use provisioning::protocol::{Change, Operation, Outputs, PlanAnswer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The longest request, in bytes.
const REQUEST_BYTES_MAX: u64 = 256 << 20;

/// A resource, as a plugin is told of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Item {
    pub id: String,
    pub key: String,
    pub spec: Map<String, Value>,
    /// The outputs of what it needs, by id; only of what is desired.
    #[serde(default)]
    pub inputs: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
struct Request {
    desired: Vec<Item>,
    previous: Vec<Item>,
}

/// What a plugin does for one resource.
pub trait Provisioner {
    /// Says what [`Provisioner::make`] would do.
    ///
    /// # Errors
    ///
    /// Why it would be refused.
    fn plan(&self, item: &Item, previous: &[Item]) -> Result<(Operation, String), String>;

    /// Makes the resource. `previous` is what was asked for before under the same id.
    ///
    /// # Errors
    ///
    /// Why it cannot be made.
    fn make(&self, item: &Item, previous: &[Item]) -> Result<Outputs, String>;

    /// Destroys the resource; it may be gone already.
    ///
    /// # Errors
    ///
    /// Why it cannot be destroyed.
    fn destroy(&self, item: &Item) -> Result<(), String>;
}

/// Runs a plugin, with the arguments and the input of this process.
pub fn main(provisioner: &dyn Provisioner) -> ExitCode {
    let verb = std::env::args().nth(1).unwrap_or_default();
    let said = answer(provisioner, &verb).and_then(|answer| {
        let text = format!("{answer}\n");
        std::io::stdout().write_all(text.as_bytes()).map_err(|error| error.to_string())
    });
    match said {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn answer(provisioner: &dyn Provisioner, verb: &str) -> Result<Value, String> {
    match verb {
        "plan" => {
            let changes = changes(provisioner, &read_request()?);
            serde_json::to_value(PlanAnswer { changes }).map_err(|error| error.to_string())
        }
        "provision" => Ok(json!({"tasks": tasks(provisioner, &read_request()?)})),
        // It gives no tokens, so that each is unknown.
        "status" => Ok(json!({"tasks": [{"unknown": {}}]})),
        _ => Err("usage: plan, provision or status, with a request on standard input: see \
                  docs/PROVISIONING.md"
            .to_owned()),
    }
}

fn read_request() -> Result<Request, String> {
    let mut text = String::new();
    let read = std::io::stdin().take(REQUEST_BYTES_MAX).read_to_string(&mut text);
    read.map_err(|error| format!("cannot read the request: {error}"))?;
    serde_json::from_str(&text).map_err(|error| format!("cannot read the request: {error}"))
}

impl Request {
    /// Returns what was asked for before under an id.
    fn previous(&self, id: &str) -> Vec<Item> {
        self.previous.iter().filter(|old| old.id == id).cloned().collect()
    }

    /// Returns the ids of what must go.
    fn removed(&self) -> BTreeSet<&str> {
        let wanted = |id: &str| self.desired.iter().any(|item| item.id == id);
        self.previous.iter().map(|old| old.id.as_str()).filter(|id| !wanted(id)).collect()
    }
}

fn changes(provisioner: &dyn Provisioner, request: &Request) -> Vec<Change> {
    let wanted = request.desired.iter().map(|item| {
        let id = item.id.clone();
        match provisioner.plan(item, &request.previous(&item.id)) {
            Ok((op, text)) => Change { id, op, text, error: None },
            Err(error) => {
                Change { id, op: Operation::None, text: String::new(), error: Some(error) }
            }
        }
    });
    let removed = request.removed().into_iter().map(|id| Change {
        id: id.to_owned(),
        op: Operation::Delete,
        text: "destroy it".to_owned(),
        error: None,
    });
    wanted.chain(removed).collect()
}

fn tasks(provisioner: &dyn Provisioner, request: &Request) -> Vec<Value> {
    let wanted = request.desired.iter().map(|item| {
        let made = provisioner.make(item, &request.previous(&item.id));
        task(&item.id, made.map(|outputs| json!({&item.id: outputs})))
    });
    let removed = request.removed().into_iter().map(|id| {
        let destroyed = request.previous(id).iter().try_for_each(|old| provisioner.destroy(old));
        task(id, destroyed.map(|()| json!({})))
    });
    wanted.chain(removed).collect()
}

fn task(id: &str, outputs: Result<Value, String>) -> Value {
    match outputs {
        Ok(outputs) => json!({"ids": [id], "success": {"outputs": outputs}}),
        Err(error) => json!({"ids": [id], "failed": {"error": error}}),
    }
}

/// Reads the specification of a resource.
fn specification<T: DeserializeOwned>(item: &Item) -> Result<T, String> {
    serde_json::from_value(Value::Object(item.spec.clone())).map_err(|error| {
        let problem = error.to_string();
        format!("spec: {}", unknown_keys::explain(&problem).unwrap_or(problem))
    })
}
