//! What a machine keeps of a resource of the fleet, step by step.

use model::boot_time::BootTime;
use model::image::ImageName;
use model::object::{Algorithm, ObjectId};
use provisioning::Call;
use provisioning::image::Definition;
use provisioning::machine::fleet::{FleetNews, Shared};
use provisioning::machine::{Machine, Todo};
use provisioning::protocol::Answer;
use serde_json::{Value, json};

fn digest(text: &str) -> ObjectId {
    Algorithm::Blake3.digest(text.as_bytes())
}

fn boot(boot_id: &str, seconds: u64) -> BootTime {
    BootTime { boot_id: boot_id.to_owned(), ms: seconds * 1_000 }
}

/// An image with a database of this size, for each machine or for the fleet.
fn definition(per: &str, size: u64) -> Definition {
    let bindings = "[[provisioner]]\nname = \"sql\"\nkinds = [\"sql\"]\nuser = \"root\"\n";
    let db = json!({"id": "db", "kind": "sql", "per": per, "on_removal": "destroy",
                    "sensitive": ["password"], "spec": {"size": size}});
    let fields = json!({"bindings": bindings, "files": {"db.json": db.to_string()}, "plugins": {}});
    serde_json::from_value(fields).unwrap()
}

fn provision(machine: &mut Machine, name: &str, definition: &Definition) {
    let image = ImageName::new(&format!("test/{name}")).unwrap();
    machine.provision(&image, digest(name), definition, "web1");
}

/// Carries out the one call that is next.
fn make(machine: &mut Machine) -> Call {
    let Todo::Calls(calls) = machine.next() else { panic!("{:?}", machine.next()) };
    let call = calls.into_iter().next().unwrap();
    machine.change_state(|state| state.begin(&call));
    let outputs = json!({"db": {"port": 5432, "password": "x"}});
    let answer = json!({"tasks": [{"success": {"outputs": outputs}}]}).to_string();
    let answer = Answer::parse(answer.as_bytes()).map_err(|error| error.to_string());
    machine.change_state(|state| state.end(&call, answer));
    call
}

/// A machine that has made the database with a permit in the boot `1`, and has its image.
fn maker() -> Machine {
    let mut machine = Machine::default();
    provision(&mut machine, "one", &definition("fleet", 1));
    assert_eq!(machine.next(), Todo::Nothing, "it has no permit");
    machine.take_permit("db", 7, &boot("1", 300), &boot("1", 0)).unwrap();
    make(&mut machine);
    machine.activated(digest("one"), &definition("fleet", 1));
    machine
}

fn news(machine: &Machine, number: u64) -> FleetNews {
    let key = machine.fleet().remove(0).asked_key;
    let outputs = json!({"port": 5432}).as_object().unwrap().clone();
    let shared = Some(Shared { key, outputs });
    FleetNews { id: "db".into(), number, maker: "web2".into(), shared, is_unwanted: false }
}

fn outputs(machine: &Machine) -> Value {
    machine.outputs().remove("db").map_or(Value::Null, |outputs| outputs.values)
}

#[test]
fn secret_outputs_stay_with_the_machine_that_made_them_and_go_nowhere_else() {
    let mut machine = maker();
    let told = machine.fleet().remove(0).shared.unwrap().outputs;
    assert_eq!(Value::from(told), json!({"port": 5432}));
    // It is rebooted, and another one gets the permit.
    assert!(machine.look_at_permits(&boot("2", 0)));
    let news = news(&machine, 8);
    machine.take_news(news).unwrap();
    assert_eq!(outputs(&machine), json!({"port": 5432, "password": "x"}));
    assert_eq!(machine.next(), Todo::Nothing);
}

#[test]
fn who_takes_over_asks_its_plugin_once_and_knows_what_there_was() {
    let mut machine = Machine::default();
    provision(&mut machine, "one", &definition("fleet", 1));
    let news = news(&machine, 7);
    machine.take_news(news).unwrap();
    machine.activated(digest("one"), &definition("fleet", 1));
    assert_eq!(outputs(&machine), json!({"port": 5432}));
    // For the same, in case that the other one has changed it since.
    let mut same = machine.clone();
    same.take_permit("db", 8, &boot("1", 300), &boot("1", 0)).unwrap();
    let call = make(&mut same);
    assert_eq!(call.request().previous.len(), 1);
    assert_eq!(same.next(), Todo::Nothing);
    // For another size.
    provision(&mut machine, "two", &definition("fleet", 2));
    assert_eq!(machine.next(), Todo::Nothing, "it has no permit");
    machine.take_permit("db", 8, &boot("1", 300), &boot("1", 0)).unwrap();
    let call = make(&mut machine);
    let finished = call.request().previous.iter().filter(|old| old.finished);
    let sizes: Vec<Value> = finished.map(|old| old.resource.spec["size"].clone()).collect();
    assert_eq!(sizes, [json!(1)]);
}

#[test]
fn a_resource_of_this_machine_is_not_taken_for_one_of_the_fleet() {
    let mut machine = Machine::default();
    provision(&mut machine, "own", &definition("machine", 1));
    make(&mut machine);
    machine.activated(digest("own"), &definition("machine", 1));
    provision(&mut machine, "one", &definition("fleet", 1));
    let news = news(&machine, 7);
    machine.take_news(news).unwrap();
    assert_eq!(outputs(&machine), json!({"port": 5432, "password": "x"}));
    let told = machine.target().unwrap();
    assert!(format!("{told:?}").contains("give the new one another id"), "{told:?}");
}

#[test]
fn a_call_ends_before_its_permit_and_is_not_begun_without() {
    let mut machine = Machine::default();
    provision(&mut machine, "one", &definition("fleet", 1));
    machine.take_permit("db", 7, &boot("1", 300), &boot("1", 0)).unwrap();
    let Todo::Calls(calls) = machine.next() else { panic!("{:?}", machine.next()) };
    machine.change_state(|state| state.begin(&calls[0]));
    let ends_at = |now| machine.call_ends_at_ms(&calls[0], &boot("1", now));
    assert_eq!(ends_at(0), Ok(Some(290_000)));
    assert!(ends_at(290).is_err());
    let mut late = maker();
    late.look_at_permits(&boot("1", 285));
    provision(&mut late, "two", &definition("fleet", 2));
    assert_eq!(late.next(), Todo::Nothing, "the permit ends too soon");
}
