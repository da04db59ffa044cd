//! Environments that gate content revisions of filegen-servers.

use std::collections::{BTreeMap, BTreeSet};

use model::object::ObjectId;
use rollouts::advance::advance;
use rollouts::content::{ContentRevision, NewestContent};
use rollouts::document::{Analysis, Kind, MachineTaskState};
use rollouts::gate::Gate;
use rollouts::plan::plan;
use rollouts::state::{Edits, SharedMachines, State};
use rollouts::view::{ImageNotes, Question, Seen, View};
use serde_json::{Value, json};

use crate::environments::{at, mdb, said, shown, start};

const SERVER: &str = "files:6972";

fn content(number: u64) -> ContentRevision {
    ContentRevision { numbering: 9, number }
}

fn newest(number: u64) -> NewestContent {
    [(SERVER.to_owned(), content(number))].into()
}

/// Machines have what they may have at once, but for one that fails with content revision 6. Those
/// with names in `db` have no computed files.
struct Served {
    limits: BTreeMap<String, Vec<ContentRevision>>,
    newest: u64,
}

impl View for Served {
    fn machine(&self, _: &str) -> Option<Seen> {
        Some(Seen {
            image: "a".to_owned(),
            left_out: BTreeSet::new(),
            state: MachineTaskState::Synced,
            ill: BTreeSet::new(),
            reachable: true,
            unknown: false,
            held_out: false,
        })
    }

    fn left_out(&self, _: &str) -> Option<BTreeMap<String, String>> {
        Some(BTreeMap::new())
    }

    fn digest(&self, _: &str) -> Option<ObjectId> {
        None
    }

    fn notes(&self, _: &str) -> Option<ImageNotes> {
        None
    }

    fn content(
        &self,
        hostname: &str,
        server: &str,
        content: ContentRevision,
    ) -> Option<MachineTaskState> {
        assert_eq!(server, SERVER);
        let limits = self.limits.get(hostname).filter(|_| !hostname.starts_with("db"))?;
        Some(match limits.contains(&content) {
            false => MachineTaskState::Starting,
            true if content.number == 6 && hostname == "web2" => MachineTaskState::Failed,
            true => MachineTaskState::Synced,
        })
    }

    fn newest_content(&self, _: &str) -> Option<ContentRevision> {
        Some(content(self.newest))
    }

    fn analysis(&mut self, _: Question<'_>) -> Option<Analysis> {
        None
    }

    fn healthy_for_s(&mut self, _: u64, _: &str, healthy: bool) -> u64 {
        u64::from(healthy) * 1_000
    }
}

fn limits(state: &State, mdb: &SharedMachines) -> BTreeMap<String, Vec<ContentRevision>> {
    let gate = Gate::new(state);
    let of_one = |host: &String| gate.content_limits(&mdb[host]).remove(SERVER);
    mdb.keys().filter_map(|host| Some((host.clone(), of_one(host)?))).collect()
}

/// Takes rollouts as far as they go, and returns the content revision of each machine.
fn go_on(state: &mut State, mdb: &SharedMachines, newest: u64) -> String {
    for _ in 0..20 {
        let limits = limits(state, mdb);
        advance(state, mdb, &mut Served { limits, newest }, at(0).now);
    }
    let text = |(host, limits): (String, Vec<ContentRevision>)| {
        let numbers: Vec<String> = limits.iter().map(|limit| limit.number.to_string()).collect();
        format!("{host} {}", numbers.join("+"))
    };
    limits(state, mdb).into_iter().map(text).collect::<Vec<_>>().join(", ")
}

fn edit(state: &mut State, edit: Value, known: &NewestContent) -> Result<u64, (u16, String)> {
    let environments = vec![serde_json::from_value(edit).unwrap()];
    let edits = Edits { environments, content: known.clone(), ..Edits::default() };
    let outcomes = state.edit(edits, &at(0), &mdb("web1 a, web2 a, web3 a, db1 a"));
    let outcomes = outcomes.map_err(|said| (said.code, said.message))?;
    Ok(outcomes[0].revision.unwrap_or_default())
}

fn dns() -> Value {
    json!({"name": "dns", "select": {"hosts": ["*"]}, "source": {"content": SERVER},
        "strategy": {"min_healthy_percent": 80, "canary": 1}})
}

#[test]
fn a_content_revision_waits_for_a_rollout_and_goes_back() {
    let mdb = mdb("web1 a, web2 a, web3 a, db1 a");
    let mut state = State::default();
    assert_eq!(edit(&mut state, dns(), &newest(4)), Ok(1));
    // Machines have what there is.
    assert_eq!(go_on(&mut state, &mdb, 4), "db1 4, web1 4, web2 4, web3 4");
    assert_eq!(state.take_content(&newest(4), at(0).now), []);
    assert_eq!(state.take_content(&newest(5), at(0).now), [("dns".to_owned(), 2)]);
    assert_eq!(go_on(&mut state, &mdb, 5), "db1 4, web1 4, web2 4, web3 4");
    let planned = plan(&state, &mdb, "dns", 2, |_| None);
    let classes: Vec<_> =
        planned.classes.iter().map(|one| (&*one.from, &*one.to, one.machines)).collect();
    assert_eq!(classes, [("files:6972/4", "files:6972/5", 4)]);
    assert!(!planned.digest.is_empty() && planned.unknown_images.is_empty());
    let number = start(&mut state, "dns@2", Kind::User).unwrap();
    // The canary is a machine that has such files.
    let limits = limits(&state, &mdb);
    advance(&mut state, &mdb, &mut Served { limits, newest: 5 }, at(0).now);
    assert_eq!(Vec::from_iter(&state.environments["dns"].moved), [(&"web1".to_owned(), &2)]);
    assert_eq!(go_on(&mut state, &mdb, 5), "db1 5, web1 5, web2 5, web3 5");
    assert_eq!(shown(&state, number), "succeeded: all steps are done");

    // A machine that fails takes all back.
    state.take_content(&newest(6), at(0).now);
    let number = start(&mut state, "dns@3", Kind::User).unwrap();
    assert_eq!(go_on(&mut state, &mdb, 6), "db1 5, web1 5, web2 5, web3 5");
    let failed = "rolled_back: dns failed: failed: 1 machine, 0 may: web2";
    assert_eq!(shown(&state, number), failed);
    // What was started since may have changed machines: they have nothing older to go back to.
    let message = "machines have the content before the last change only: restore the former \
                   configuration of the filegen-server of dns";
    for older in ["dns@0", "dns@1", "dns@3"] {
        assert_eq!(start(&mut state, older, Kind::Rollback), said(409, message), "{older}");
    }
}

#[test]
fn an_operator_takes_content_back_by_one_content_revision() {
    let mdb = mdb("web1 a, web3 a");
    let mut state = State::default();
    edit(&mut state, dns(), &newest(4)).unwrap();
    state.take_content(&newest(5), at(0).now);
    start(&mut state, "dns@2", Kind::User).unwrap();
    assert_eq!(go_on(&mut state, &mdb, 5), "web1 5, web3 5");
    // A newer one that waits does not matter.
    state.take_content(&newest(6), at(0).now);
    let back = start(&mut state, "dns", Kind::Rollback).unwrap();
    assert_eq!(go_on(&mut state, &mdb, 6), "web1 4, web3 4");
    assert_eq!(shown(&state, back), "succeeded: all steps are done");
    assert_eq!(start(&mut state, "dns@1", Kind::Rollback).unwrap_err().code, 409);
}

#[test]
fn machines_that_leave_an_environment_are_in_its_plan() {
    let mdb = mdb("web1 a, web3 a");
    let mut state = State::default();
    edit(&mut state, dns(), &newest(4)).unwrap();
    state.take_content(&newest(5), at(0).now);
    let mut fewer = dns();
    fewer["select"] = json!({"hosts": ["web1"]});
    edit(&mut state, fewer, &newest(5)).unwrap();
    let planned = plan(&state, &mdb, "dns", 3, |_| None);
    let classes: Vec<_> = planned.classes.iter().map(|one| (&*one.from, &*one.to)).collect();
    assert_eq!(classes, [("files:6972/4", ""), ("files:6972/4", "files:6972/5")]);
    let number = start(&mut state, "dns@3", Kind::User).unwrap();
    assert_eq!(go_on(&mut state, &mdb, 5), "web1 5");
    assert_eq!(shown(&state, number), "succeeded: all steps are done");
    // Deleting it frees what waits.
    let refused = state.delete("dns", false, &mdb, at(0).now).unwrap_err();
    let message =
        "1 machine would get new content of computed files without a rollout: use --force";
    assert_eq!((refused.code, refused.message.as_str()), (409, message));
}

#[test]
fn a_server_that_was_restored_from_a_backup_brings_no_content_by_an_old_number() {
    let mdb = mdb("web1 a");
    let mut state = State::default();
    edit(&mut state, dns(), &newest(5)).unwrap();
    state.set_active("dns", false).unwrap();
    state.note_members(&mdb, at(0).now);
    assert_eq!(state.take_content(&newest(3), at(0).now), [("dns".to_owned(), 2)]);
    let may_have = |state: &State, number| limits(state, &mdb)["web1"][0].allows(content(number));
    assert!(may_have(&state, 3) && !may_have(&state, 4), "4 is made again, with other content");
    // A machine that joins while it is not active is gated too.
    let two = self::mdb("web1 a, web2 a");
    assert_eq!(limits(&state, &two).len(), 2);
}

#[test]
fn content_that_is_replaced_meanwhile_fails_the_step() {
    let mdb = mdb("web1 a, web3 a");
    let mut state = State::default();
    edit(&mut state, dns(), &newest(4)).unwrap();
    // A draft that nobody has started is replaced.
    state.take_content(&newest(5), at(0).now);
    assert_eq!(state.take_content(&newest(6), at(0).now), [("dns".to_owned(), 3)]);
    assert_eq!(Vec::from_iter(state.environments["dns"].revisions.keys()), [&1, &3]);
    let number = start(&mut state, "dns@3", Kind::User).unwrap();
    assert_eq!(state.take_content(&newest(7), at(0).now), [("dns".to_owned(), 4)]);
    assert_eq!(go_on(&mut state, &mdb, 7), "web1 4, web3 4");
    let cause = "files:6972 has content revision 7 now: start the revision with that";
    assert_eq!(shown(&state, number), format!("rolled_back: dns failed: {cause}"));
    // A server that has begun anew with its numbers is another one.
    let other = ContentRevision { numbering: 10, number: 2 };
    state.take_content(&[(SERVER.to_owned(), other)].into(), at(0).now);
    let limits = limits(&state, &mdb);
    assert!(!limits["web1"][0].allows(other) && limits["web1"][0].allows(content(3)));
}

#[test]
fn what_cannot_be_gated_is_refused() {
    let mut state = State::default();
    let unknown = "no content revision of files:6972 is known: images must have computed files of \
                   it by this name, and it must answer";
    assert_eq!(edit(&mut state, dns(), &NewestContent::new()), Err((409, unknown.to_owned())));
    let table = [
        (
            json!({"source": {"content": "files"}}),
            "dns.source.content: expected HOST:PORT, as \
            images name the filegen-server",
        ),
        (
            json!({"strategy": {"min_image_age_s": 1}}),
            "dns.strategy: min_image_age_s and requires_from are for images",
        ),
        (json!({"disjoint": true}), "dns.disjoint: only bundles can be disjoint"),
    ];
    for (change, message) in table {
        let mut dns = dns();
        dns.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        assert_eq!(edit(&mut state, dns, &newest(4)), Err((400, message.to_owned())));
    }
    edit(&mut state, dns(), &newest(4)).unwrap();
    let mut images = dns();
    images["source"] = json!({"image": "a"});
    let message = "dns.source: an environment is about images, bundles or content for ever: make \
                   another";
    assert_eq!(edit(&mut state, images, &newest(4)), Err((400, message.to_owned())));
    // Another edit keeps the content.
    let mut urgent = dns();
    urgent["strategy"] = json!({"soak_s": 1});
    assert_eq!(edit(&mut state, urgent, &newest(5)), Ok(2));
    assert_eq!(state.environments["dns"].revisions[&2].content, Some(content(4)));
}
