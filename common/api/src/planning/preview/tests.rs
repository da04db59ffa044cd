//! What operators are told before an update.

use std::sync::Arc;

use super::*;
use crate::planning::PlanKey;
use model::filter::Filter;
use model::image::{Content, FORMAT};
use model::object::Algorithm;
use model::plan::{Need, Operation};
use model::tree::text::from_text;

fn image(triggers: &str) -> RequiredImage {
    let tree = from_text(Algorithm::Blake3, "").unwrap();
    let content = Content {
        format: FORMAT,
        name: ImageName::new("test/1").unwrap(),
        root: tree.digest(),
        filter: Some(Filter::new::<&str>([]).unwrap()),
        triggers: Triggers::from_json(triggers).unwrap(),
        computed: Vec::new(),
        health_check: None,
        signers: Vec::new(),
    };
    RequiredImage::new(content, tree)
}

fn object(number: u8) -> ObjectId {
    ObjectId::Blake3([number; 32])
}

/// A plan that takes these paths away, and needs objects 1 to 3 of 10, 20 and 30 bytes.
fn planned(paths: &[&str]) -> Planned {
    let remove = |path: &&str| Operation {
        path: path.parse().unwrap(),
        action: Action::Remove,
        reason: vec![Difference::Extra],
    };
    let plan = Plan { operations: paths.iter().map(remove).collect(), blocked: Vec::new() };
    let need = |number: u8| Need { size_bytes: u64::from(number) * 10, files: 1 };
    Planned {
        key: PlanKey { image: object(9), scan: 1, computed: 0 },
        digest: object(9),
        needs: Arc::new((1..=3).map(|number| (object(number), need(number))).collect()),
        computed: Arc::default(),
        objects: [].into(),
        is_high_impact: false,
        dangers: vec!["it would take away the only kernel (/boot/x)".to_owned()],
        plan: Arc::new(plan),
    }
}

#[test]
fn says_what_happens_to_paths_and_services() {
    let planned = planned(&["/db/x", "/boot/x"]);
    let cached = [2, 3, 7].map(object).into_iter().collect();
    let former = FormerImage::default();
    let preview = |triggers| Preview::new(&image(triggers), &planned, &cached, &former);
    let restart = r#"[{"MatchLines": ["/db"], "Service": "db", "HighImpact": true},
        {"MatchLines": ["/boot"], "Service": "subd"}]"#;
    let head = "remove /db/x (extra)\nremove /boot/x (extra)\n\
                UNSAFE it would take away the only kernel (/boot/x)\n";
    let tail = "2 changes: remove 2\nreasons: extra 2\nto fetch: 1 object, 10 bytes\n";
    let middle = "before the change: stop db\nafter the change: start db\n\
                  at the end: restart subd\n\
                  HIGH IMPACT: the machine's disruption command is asked first\n";
    assert_eq!(preview(restart).text(), format!("{head}{middle}{tail}"));
    let reboot = r#"[{"MatchLines": ["/boot"], "Service": "reboot"}]"#;
    let middle = "at the end: reboot the machine\n\
                  HIGH IMPACT: the machine's disruption command is asked first\n";
    assert_eq!(preview(reboot).text(), format!("{head}{middle}{tail}"));
    let same = Preview { same: true, ..preview("[]") };
    assert_eq!(same.text(), "The machine equals test/1.\n");
}

#[test]
fn says_which_tasks_are_started_and_stopped() {
    let task = |name: &str| {
        let lines = format!(r#"["/etc/dominator/tasks.d/{name}.json", "/opt/{name}"]"#);
        format!(r#"{{"MatchLines": {lines}, "Service": "{name}", "Kind": "task"}}"#)
    };
    let triggers = |names: &[&str]| {
        let all: Vec<String> = names.iter().map(|name| task(name)).collect();
        format!("[{}]", all.join(","))
    };
    let from = Some(ImageName::new("test/0").unwrap());
    let former = Triggers::from_json(&triggers(&["old", "same", "web"])).unwrap();
    let former = FormerImage { image: from, triggers: former, unknown: None };
    let image = image(&triggers(&["new", "same", "web"]));
    let planned = planned(&["/opt/web"]);
    let text = Preview::new(&image, &planned, &ObjectSet::default(), &former).text();
    let restart = "restart task web (unless it ignores changes)\n";
    let lines = format!("start task new\nstop task old\n{restart}");
    assert!(text.contains(&lines), "{text}");
    let unknown = FormerImage { unknown: Some("gone".to_owned()), ..FormerImage::default() };
    let text = Preview::new(&image, &planned, &ObjectSet::default(), &unknown).text();
    assert!(text.contains(restart) && !text.contains("start task new"), "{text}");
}

#[test]
fn what_the_former_image_would_stop_is_told_or_that_it_is_not_known() {
    let planned = planned(&["/db/x"]);
    let triggers = Triggers::from_json(r#"[{"MatchLines": ["/db"], "Service": "old"}]"#).unwrap();
    let from = Some(ImageName::new("test/0").unwrap());
    let known = FormerImage { image: from.clone(), triggers, unknown: None };
    let summary = PlanSummary::of(&image("[]"), &planned, &known);
    assert_eq!(service_lines(&summary.services), ["before the change: stop old"]);
    let unknown =
        FormerImage { image: from, unknown: Some("gone".to_owned()), ..FormerImage::default() };
    let text = Preview::new(&image("[]"), &planned, &ObjectSet::default(), &unknown).text();
    let line = "NOT KNOWN: the triggers of test/0: gone; what only they name is not told\n";
    assert!(text.contains(line), "{text}");
}

#[test]
fn what_is_cached_is_not_fetched() {
    let planned = planned(&[]);
    let lack = FetchTotals::of(&planned);
    // Numbers of cached objects, objects and bytes that are fetched.
    let table: [(&[u8], u32, u64); 5] = [
        (&[], 3, 60),
        (&[1], 2, 50),
        (&[4, 5, 6, 7], 3, 60),
        (&[0, 1, 2, 3, 4], 0, 0),
        (&[2, 3], 1, 10),
    ];
    for (cached, objects, bytes) in table {
        let cached: ObjectSet = cached.iter().copied().map(object).collect();
        assert_eq!(lack.beside(&planned, &cached), (objects, bytes), "{cached:?}");
    }
}

#[test]
fn changes_are_counted_by_kind_and_by_reason() {
    let operation =
        |path: &str, action, reason| Operation { path: path.parse().unwrap(), action, reason };
    let node = model::tree::Node::Directory(model::tree::Metadata::new(0o755, 0, 0));
    let replace = Action::Replace { node: node.clone(), displaced: Vec::new() };
    let plan = Plan {
        operations: vec![
            operation("/a", Action::Create(node.clone()), vec![Difference::Missing]),
            operation("/b", replace, vec![Difference::Kind, Difference::Mode]),
            operation("/c", Action::Change(node), vec![Difference::Mode]),
        ],
        blocked: Vec::new(),
    };
    let changes = ChangeCounts::of(&plan);
    assert_eq!(changes.count(), 3);
    assert_eq!(changes.kinds(), "create 1, replace 1, change 1");
    assert_eq!(changes.reasons(), "missing 1, kind 1, mode 2");
}
