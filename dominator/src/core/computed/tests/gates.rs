//! Content revisions that wait for environments.
// tidy: core

use api::dominator::content::{ContentOrder, ContentStage};
use rollouts::content::ContentRevision;
use rollouts::document::MachineTaskState::{Failed, Starting, Synced};

use super::rollout::{Fleet, revision};
use super::*;
use crate::core::computed::gates::ContentGates;

fn limit(number: u64) -> ContentRevision {
    ContentRevision { numbering: NUMBERING, number }
}

/// Lets these machines have content up to these revisions.
fn gate(fleet: &mut Fleet, limits: &[(&str, u64)]) {
    let of_server = |number: u64| [(SOURCE.to_owned(), vec![limit(number)])].into();
    let gates: ContentGates =
        limits.iter().map(|(host, number)| ((*host).to_owned(), of_server(*number))).collect();
    fleet.asked.0.set_gates(gates, now(fleet.at));
}

/// The content that a machine is to have.
fn content(fleet: &Fleet, host: &str) -> Option<ObjectId> {
    fleet.asked.known(host).first().map(|(_, id)| *id)
}

#[test]
fn a_content_revision_goes_to_a_machine_when_its_environment_lets_it() {
    let mut fleet = Fleet::new(6);
    let held = [("h00000", 1), ("h00001", 1), ("h00002", 1)];
    gate(&mut fleet, &held);
    fleet.edit("2");
    // It is tried on others, and is open for these when it is verified there.
    assert_eq!(fleet.trying(&revision(2)), ["h00003", "h00004", "h00005"]);
    fleet.in_sync(&fleet.trying(&revision(2)));
    assert_eq!(fleet.stage(&revision(2)), Some(ContentStage::Open));
    assert_eq!((fleet.having("1 nyc"), fleet.having("2 nyc")), (3, 3));
    let text = "content of files:6972/2 waits, which comes with a rollout of an environment";
    assert_eq!(fleet.asked.0.known("h00000").held.as_deref(), Some(text));
    let state = |fleet: &Fleet, host: &str, number: u64| {
        fleet.asked.0.content_state(host, SOURCE, limit(number))
    };
    assert_eq!(state(&fleet, "h00000", 1), Some(Synced));
    assert_eq!(state(&fleet, "nobody", 1), None);
    // A new machine waits, if it is one of these.
    let mut with_new = held.to_vec();
    with_new.push(("new", 1));
    gate(&mut fleet, &with_new);
    for host in ["new", "other"] {
        fleet.asked.want(host, "nyc", &["/x"], fleet.at);
    }
    fleet.ask();
    assert_eq!((content(&fleet, "new"), content(&fleet, "other")), (None, Some(id("2 nyc"))));
    assert_eq!(fleet.asked.unknown("new"), [("/x".to_owned(), text.to_owned())]);

    // A rollout brings it to one of them.
    assert_eq!(state(&fleet, "h00000", 2), Some(Starting), "it has not heard of it");
    gate(&mut fleet, &[("h00000", 2), held[1], held[2], ("new", 2)]);
    assert_eq!((content(&fleet, "h00000"), content(&fleet, "h00001")).0, Some(id("2 nyc")));
    assert_eq!(content(&fleet, "new"), Some(id("2 nyc")));
    assert_eq!((content(&fleet, "h00001"), fleet.having("1 nyc")), (Some(id("1 nyc")), 2));
    assert_eq!(state(&fleet, "h00000", 2), Some(Starting), "it is not verified");
    fleet.in_sync(&["h00000".to_owned()]);
    assert_eq!(state(&fleet, "h00000", 2), Some(Synced));
    // After a restart it stays there, also while the server has not told anything.
    fleet.restart();
    gate(&mut fleet, &[("h00000", 2), held[1], held[2]]);
    assert_eq!((fleet.having("1 nyc"), fleet.having("2 nyc")), (2, 4));
    // And back.
    gate(&mut fleet, &held);
    assert_eq!(content(&fleet, "h00000"), Some(id("1 nyc")));
    assert_eq!(state(&fleet, "h00000", 1), Some(Starting));
    fleet.in_sync(&fleet.hosts());
    assert_eq!(state(&fleet, "h00000", 1), Some(Synced));
    // No order of an operator passes an environment.
    fleet.asked.0.order(&revision(2), ContentOrder::Stop, "so", now(fleet.at)).unwrap();
    fleet.asked.0.order(&revision(2), ContentOrder::Open, "so", now(fleet.at)).unwrap();
    assert_eq!((fleet.having("1 nyc"), fleet.having("2 nyc")), (3, 3));
    // Without an environment it goes everywhere.
    gate(&mut fleet, &[]);
    assert_eq!(fleet.having("2 nyc"), 6);
}

#[test]
fn a_machine_of_an_environment_on_which_content_fails_has_failed() {
    let mut fleet = Fleet::new(4);
    let all = fleet.hosts();
    let limits =
        |numbers: [u64; 4]| -> Vec<(String, u64)> { all.iter().cloned().zip(numbers).collect() };
    let set = |fleet: &mut Fleet, numbers: [u64; 4]| {
        let limits = limits(numbers);
        let limits: Vec<(&str, u64)> =
            limits.iter().map(|(host, number)| (host.as_str(), *number)).collect();
        gate(fleet, &limits);
    };
    set(&mut fleet, [1; 4]);
    fleet.edit("bad");
    assert_eq!(fleet.trying(&revision(2)), [""; 0], "nobody may have it");
    set(&mut fleet, [2, 1, 1, 1]);
    assert_eq!(fleet.trying(&revision(2)), all[..1]);
    fleet.fail(&all[..1]);
    let state =
        |fleet: &Fleet, number: u64| fleet.asked.0.content_state("h00000", SOURCE, limit(number));
    assert_eq!((state(&fleet, 2), content(&fleet, "h00000")), (Some(Failed), Some(id("1 nyc"))));
    // The rollout goes back; a later one tries it again.
    set(&mut fleet, [1; 4]);
    fleet.in_sync(&all[..1]);
    assert_eq!(state(&fleet, 1), Some(Synced));
    set(&mut fleet, [2, 1, 1, 1]);
    assert_eq!(state(&fleet, 2), Some(Starting));
    // What is stopped has failed everywhere.
    fleet.asked.0.order(&revision(2), ContentOrder::Stop, "so", now(fleet.at)).unwrap();
    set(&mut fleet, [2, 2, 1, 1]);
    let other = fleet.asked.0.content_state("h00001", SOURCE, limit(2));
    assert_eq!(other, Some(Failed));
}

#[test]
fn a_machine_has_content_when_it_was_made_and_verified() {
    let mut fleet = Fleet::new(2);
    let state =
        |fleet: &Fleet, number: u64| fleet.asked.0.content_state("h00000", SOURCE, limit(number));
    gate(&mut fleet, &[("h00000", 2), ("h00001", 1)]);
    assert_eq!(state(&fleet, 2), Some(Synced), "there is no other content");
    // The server has told of the revision, and has not made its content yet, or cannot.
    (fleet.version, fleet.revision) = ("2".to_owned(), 2);
    fleet.tell_generators(Vec::new());
    assert_eq!(state(&fleet, 2), Some(Starting));
    let batch = fleet.asked.0.next_batch(&SOURCE.into(), now(fleet.at)).unwrap();
    fleet.asked.0.failed(&batch, "no such variable", now(fleet.at), 500);
    assert_eq!(state(&fleet, 2), Some(Failed));
    fleet.at += 600;
    fleet.ask();
    assert_eq!(state(&fleet, 2), Some(Starting));
    fleet.in_sync(&["h00000".to_owned()]);
    assert_eq!(state(&fleet, 2), Some(Synced));
    // Two environments: what the other one does not let through has not come.
    let both = |number| [(SOURCE.to_owned(), vec![limit(2), limit(number)])].into();
    let gates = [("h00000".to_owned(), both(2)), ("h00001".to_owned(), both(1))];
    fleet.asked.0.set_gates(gates.into(), now(fleet.at));
    assert_eq!(state(&fleet, 2), Some(Synced));
    assert_eq!(fleet.asked.0.content_state("h00001", SOURCE, limit(2)), Some(Starting));
}

#[test]
fn gates_hold_for_machines_and_servers_that_become_known_later() {
    let mut fleet = Fleet::new(2);
    fleet.edit("2");
    fleet.in_sync(&fleet.hosts());
    assert_eq!(fleet.having("2 nyc"), 2);
    // The dominator is restarted, and a rollout goes back before the server answers.
    let stored = fleet.hosts().into_iter().map(|host| {
        let files = fleet.asked.0.stored(&host);
        (host, files)
    });
    let stored = stored.collect();
    let mut asked = Asked(ComputedTable::new(stored, fleet.asked.0.changes.stored()));
    let of_server = |number| [(SOURCE.to_owned(), vec![limit(number)])].into();
    let gates = |number| fleet.hosts().into_iter().map(|host| (host, of_server(number))).collect();
    asked.0.set_gates(gates(2), now(0));
    let state = |asked: &Asked, host, number| asked.0.content_state(host, SOURCE, limit(number));
    assert_eq!(state(&asked, "h00000", 2), Some(Starting), "its image is not loaded");
    asked.want("h00000", "nyc", &["/x"], 0);
    asked.0.set_gates(gates(1), now(1));
    asked.want("h00001", "nyc", &["/x"], 1);
    assert_eq!(state(&asked, "h00000", 1), Some(Starting), "the server has not answered");
    assert_eq!(asked.known("h00000")[0].1, id("2 nyc"));
    asked.set_generators(&generators(2, &[("/x", "2", 2)]), 2);
    let content = ["h00000", "h00001"].map(|host| asked.known(host)[0].1);
    assert_eq!(content, [id("1 nyc"); 2]);
    // What may go to them again does, one after the other.
    asked.in_sync(3);
    asked.0.set_gates(gates(2), now(3));
    let content = ["h00000", "h00001"].map(|host| asked.known(host)[0].1);
    assert_eq!(content, [id("2 nyc"), id("1 nyc")]);
    asked.in_sync(4);
    assert_eq!(asked.known("h00001")[0].1, id("2 nyc"));
    // First content is not taken while it is not known of which revision it is.
    let mut asked = Asked(ComputedTable::default());
    asked.0.set_gates([("a".to_owned(), of_server(1))].into(), now(0));
    asked.want("a", "nyc", &["/x"], 0);
    asked.answer(0, 0, |_, _| Some("new".to_owned()));
    assert_eq!((asked.known("a"), asked.0.ask_at(SOURCE)), (vec![], Some(VALID_SHORTEST)));
}
