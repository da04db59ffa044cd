//! What machines are told of a resource, step by step.
// tidy: core

use api::subd::MadeReport;
use model::boot_time::BootTime;
use model::object::Algorithm;

use super::*;

/// The key that the image asks for, and what is there, made under a number by another machine.
struct Says<'a> {
    asked: Option<&'a str>,
    number: u64,
    maker: Option<&'a str>,
    made: Option<(&'a str, Option<&'a str>)>,
    is_unwanted: bool,
}

impl Says<'_> {
    fn report(&self, id: &str) -> FleetResourceReport {
        let made = self.made.map(|(key, outputs)| MadeReport {
            key: Some(key.to_owned()),
            version: Algorithm::Blake3.digest(key.as_bytes()),
            outputs: outputs.map(str::to_owned),
        });
        FleetResourceReport {
            id: id.to_owned(),
            permit: PermitReport {
                number: self.number,
                until: None,
                is_wanted: true,
                is_live: false,
            },
            asked_key: self.asked.map(str::to_owned),
            is_needed: false,
            number: self.number,
            maker: self.maker.map(str::to_owned),
            made,
            is_unwanted: self.is_unwanted,
        }
    }
}

const NOW: Duration = Duration::from_secs(60);

const NOTHING: Says<'_> =
    Says { asked: Some("k1"), number: 0, maker: None, made: None, is_unwanted: false };

/// Whether web2 may make what it asks for.
fn may_make(resources: &FleetResources, report: &FleetResourceReport, since: Duration) -> bool {
    resources.may_make("web2", report, since, |_| false)
}

fn names(names: &[&str]) -> BTreeSet<Arc<str>> {
    names.iter().map(|name| Arc::from(*name)).collect()
}

fn required() -> BTreeSet<String> {
    [String::from("db")].into()
}

#[test]
fn what_the_maker_says_reaches_the_others_once_its_outputs_are_known() {
    let mut resources = FleetResources::default();
    let web2 = [NOTHING.report("db")];
    assert_eq!(resources.take("web2", &web2, &required(), NOW), Heard::default());
    assert!(resources.news("web2", &web2, Some(&required())).is_empty());

    let made = |outputs| Says { number: 1, made: Some(("k1", outputs)), ..NOTHING };
    let heard = resources.take("web1", &[made(None).report("db")], &required(), NOW);
    assert_eq!(heard, Heard { outputs_of: vec!["db".into()], to_tell: BTreeSet::new() });
    assert!(resources.news("web2", &web2, Some(&required())).is_empty());
    let heard = resources.take("web1", &[made(Some("{}")).report("db")], &required(), NOW);
    assert_eq!(heard, Heard { outputs_of: vec![], to_tell: names(&["web2"]) });
    assert!(resources.news("web1", &[made(None).report("db")], Some(&required())).is_empty());
    let shared = SharedResource { key: Some("k1".into()), outputs: "{}".into() };
    let expected = FleetResourceNews {
        id: "db".into(),
        number: 1,
        maker: "web1".into(),
        made: Some(shared),
        is_unwanted: false,
    };
    assert_eq!(resources.news("web2", &web2, Some(&required())), [expected]);
    let told = Says { number: 1, maker: Some("web1"), made: Some(("k1", None)), ..NOTHING };
    assert_eq!(resources.take("web2", &[told.report("db")], &required(), NOW), Heard::default());
    assert!(resources.news("web2", &[told.report("db")], Some(&required())).is_empty());
}

#[test]
fn what_is_older_than_what_is_known_changes_nothing() {
    let mut resources = FleetResources::default();
    let new = Says { number: 5, made: Some(("k2", Some("{}"))), ..NOTHING };
    resources.take("web1", &[new.report("db")], &required(), NOW);
    for (number, maker) in [(4, None), (5, Some("web1")), (0, None)] {
        let old = Says { number, maker, made: Some(("k1", Some("{}"))), ..NOTHING };
        assert_eq!(resources.take("web2", &[old.report("db")], &required(), NOW), Heard::default());
        let news = resources.news("web2", &[old.report("db")], None);
        let keys = news.iter().map(|news| news.made.as_ref().and_then(|made| made.key.as_deref()));
        assert_eq!(keys.collect::<Vec<_>>(), [Some("k2")], "{number}");
    }
    // Its maker has removed it.
    let gone = Says { number: 5, made: None, ..NOTHING };
    assert_eq!(
        resources.take("web1", &[gone.report("db")], &required(), NOW).to_tell,
        names(&["web2"])
    );
}

#[test]
fn a_machine_whose_image_does_not_have_it_makes_nobody_believe_anything() {
    let mut resources = FleetResources::default();
    let liar = Says { number: 5, made: Some(("k2", Some("{}"))), ..NOTHING };
    resources.take("web1", &[liar.report("db")], &BTreeSet::new(), NOW);
    let web2 = [NOTHING.report("db")];
    assert_eq!(resources.take("web2", &web2, &required(), NOW), Heard::default());
    assert!(resources.news("web2", &web2, None).is_empty());
}

#[test]
fn who_asks_for_something_else_gets_no_permit_while_others_ask_for_what_is_there() {
    let mut resources = FleetResources::default();
    let other = Says { asked: Some("k2"), ..NOTHING }.report("db");
    assert!(may_make(&resources, &other, NOW), "nothing is there");
    let maker = Says { number: 1, made: Some(("k1", Some("{}"))), ..NOTHING }.report("db");
    resources.take("web1", std::slice::from_ref(&maker), &required(), NOW);
    resources.take("web2", std::slice::from_ref(&other), &required(), NOW);
    assert!(resources.may_make("web1", &maker, NOW, |_| false));
    assert!(!may_make(&resources, &other, NOW));
    let later = NOW + Duration::from_secs(1);
    assert!(may_make(&resources, &other, later), "who asks for it was not heard since");
    let mut holder = other.clone();
    holder.permit.until = Some(BootTime::default());
    assert!(may_make(&resources, &holder, NOW), "it has the permit");
    // web1 gets the image that web2 gets.
    let follows = Says { asked: Some("k2"), number: 1, made: Some(("k1", None)), ..NOTHING };
    resources.take("web1", &[follows.report("db")], &required(), NOW);
    assert!(!may_make(&resources, &other, NOW), "web1 makes it");
    assert!(may_make(&resources, &other, later));
    assert!(resources.may_make("web2", &other, NOW, |host| host == "web1"), "web1 is fenced");
}

#[test]
fn a_resource_is_unwanted_when_no_image_no_machine_and_no_other_resource_has_it() {
    let mut resources = FleetResources::default();
    let made = |asked| Says { asked, number: 1, made: Some(("k1", Some("{}"))), ..NOTHING };
    let asking = Says { maker: Some("web1"), ..made(Some("k1")) }.report("db");
    let not_asking = made(None).report("db");
    let is_unwanted = |resources: &FleetResources, required: Option<&BTreeSet<String>>| {
        let news = resources.news("web1", std::slice::from_ref(&not_asking), required);
        news.iter().any(|news| news.is_unwanted)
    };
    let none = BTreeSet::new();
    resources.take("web1", std::slice::from_ref(&not_asking), &required(), NOW);
    resources.take("web2", std::slice::from_ref(&asking), &required(), NOW);
    assert!(!is_unwanted(&resources, Some(&none)), "web2 asks for it");
    resources.leave("web2");
    assert!(is_unwanted(&resources, Some(&none)));
    assert!(!is_unwanted(&resources, Some(&required())), "an image has it");
    assert!(!is_unwanted(&resources, None), "it is not known what images have");
    let mut needing = Says { asked: None, ..NOTHING }.report("db");
    needing.is_needed = true;
    resources.take("web3", std::slice::from_ref(&needing), &none, NOW);
    assert!(!is_unwanted(&resources, Some(&none)), "another one needs it");
    needing.is_needed = false;
    resources.take("web3", &[needing], &none, NOW);
    assert!(is_unwanted(&resources, Some(&none)));
    // It is asked for again.
    let told = Says { is_unwanted: true, ..made(None) }.report("db");
    let news = resources.news("web1", &[told], Some(&required()));
    let expected = FleetResourceNews {
        id: "db".into(),
        number: 0,
        maker: String::new(),
        made: None,
        is_unwanted: false,
    };
    assert_eq!(news, [expected]);
}
