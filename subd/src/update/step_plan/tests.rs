//! Tests of how a plan becomes steps.

use model::escape::ByteText;
use model::object::Algorithm;
use model::plan::{Blocked, Difference, Obstacle};
use model::tree::{Computed, File, Metadata, Symlink, Time};

use super::*;

fn path(text: &str) -> TreePath {
    text.parse().unwrap()
}

fn directory() -> Node {
    Node::Directory(Metadata::new(0o755, 0, 0))
}

fn file(content: &str) -> Node {
    Node::Leaf(Leaf::File(File {
        metadata: Metadata::new(0o644, 0, 0),
        mtime: Time::default(),
        size_bytes: content.len() as u64,
        object: Algorithm::Blake3.digest(content.as_bytes()).into(),
    }))
}

fn link(target: &str) -> Node {
    Node::Leaf(Leaf::HardLink(path(target)))
}

fn symlink(target: &[u8]) -> Node {
    let metadata = Metadata::new(SYMLINK_MODE, 0, 0);
    Node::Leaf(Leaf::Symlink(Symlink { metadata, target: ByteText(target.to_vec()) }))
}

fn create(node: Node) -> Action {
    Action::Create(node)
}

fn replace(node: Node, displaced: &[&str]) -> Action {
    Action::Replace { node, displaced: displaced.iter().map(|text| path(text)).collect() }
}

fn plan(operations: &[(&str, Action)]) -> Plan {
    let operation = |(text, action): &(&str, Action)| Operation {
        path: path(text),
        action: action.clone(),
        reason: vec![Difference::Content],
    };
    Plan { operations: operations.iter().map(operation).collect(), blocked: Vec::new() }
}

fn planned(operations: &[(&str, Action)]) -> Result<StepPlan, PlanFault> {
    plan_steps(&plan(operations), |path| path.as_bytes().starts_with(b"/kept").then_some("kept"))
}

/// One line for each staged thing and each step.
fn lines(step_plan: &StepPlan) -> Vec<String> {
    let at = |place: &SlotPath| format!("{}:{}", place.slot, place.below);
    let staged = step_plan.staged.iter().map(|staged| {
        let what = match &staged.what {
            StagedEntry::Entry { node, takes_object: true } => format!("take {}", node.kind()),
            StagedEntry::Entry { node, takes_object: false } => node.kind().to_owned(),
            StagedEntry::LinkToStaged(place) => format!("link {}", at(place)),
            StagedEntry::LinkToLive(path) => format!("link {path}"),
        };
        format!("stage {} {} {what}", at(&staged.place), staged.path)
    });
    let steps = step_plan.steps.iter().map(|step| match step {
        PlannedStep::Appear { path, slot } => format!("appear {slot} {path}"),
        PlannedStep::Exchange { path, slot, displaced } => {
            format!("exchange {slot} {path} {displaced:?}")
        }
        PlannedStep::Vanish { path, slot } => format!("vanish {slot} {path}"),
        PlannedStep::Change { path, .. } => format!("change {path}"),
    });
    staged.chain(steps).collect()
}

#[test]
fn a_new_directory_is_staged_with_all_that_it_holds() {
    let step_plan = planned(&[
        ("/new", create(directory())),
        ("/new/a", create(file("one"))),
        ("/new/sub", create(directory())),
        ("/new/sub/b", create(file("one"))),
        ("/old", Action::Change(directory())),
        ("/old/c", create(symlink(b"x"))),
        ("/swap", replace(directory(), &[])),
        ("/swap/d", create(link("/new/a"))),
        ("/swap/e", create(link("/stays"))),
    ]);
    assert_eq!(
        lines(&step_plan.unwrap()),
        [
            "stage 0:/ /new directory",
            "stage 0:/a /new/a file",
            "stage 0:/sub /new/sub directory",
            "stage 0:/sub/b /new/sub/b take file",
            "stage 5:/ /old/c symlink",
            "stage 6:/ /swap directory",
            "stage 6:/d /swap/d link 0:/a",
            "stage 6:/e /swap/e link /stays",
            "appear 0 /new",
            "change /old",
            "appear 5 /old/c",
            "exchange 6 /swap []",
        ]
    );
}

#[test]
fn removals_and_displacements_keep_their_order() {
    let step_plan = planned(&[
        ("/d/x", Action::Remove),
        ("/d", Action::Remove),
        ("/e", replace(file("e"), &["/e/f", "/e/f/g"])),
        ("/h", replace(link("/e"), &[])),
    ]);
    assert_eq!(
        lines(&step_plan.unwrap()),
        [
            "stage 2:/ /e take file",
            "stage 3:/ /h link 2:/",
            "vanish 0 /d/x",
            "vanish 1 /d",
            "exchange 2 /e [\"/e/f\", \"/e/f/g\"]",
            "exchange 3 /h []",
        ]
    );
}

#[test]
fn refuses_what_contradicts_itself() {
    let computed = Node::Leaf(Leaf::Computed(Computed {
        metadata: Metadata::new(0o644, 0, 0),
        source: "generator:6972".to_owned(),
    }));
    let odd_mode = Node::Directory(Metadata::new(0o40755, 0, 0));
    let no_file = "invalid operation on /b: its target is not a file at that point of the plan";
    #[rustfmt::skip]
    let table: Vec<(Vec<(&str, Action)>, &str)> = vec![
        (vec![("/", Action::Remove)], "invalid operation on /: the root can only get other metadata"),
        (vec![("/.subd/x", create(directory()))], "/.subd/x must not be touched: it belongs to subd"),
        (vec![("/kept/x", Action::Remove)], "/kept/x must not be touched: kept"),
        (vec![("/k", replace(symlink(b"t"), &["/kept"]))],
         "invalid operation on /k: a displaced path does not lie below it"),
        (vec![("/k", replace(symlink(b"t"), &["/k"]))],
         "invalid operation on /k: a displaced path does not lie below it"),
        (vec![("/k", replace(directory(), &["/k/x"]))],
         "invalid operation on /k: a directory cannot replace a directory"),
        (vec![("/a", create(symlink(b"")))], "invalid operation on /a: it is not a valid symlink"),
        (vec![("/a", create(odd_mode))], "invalid operation on /a: its mode has unknown bits"),
        (vec![("/a", create(computed))],
         "invalid operation on /a: the content of the computed file was not filled in"),
        (vec![("/a", Action::Change(link("/b")))],
         "invalid operation on /a: a hard link has no metadata of its own"),
        (vec![("/a", Action::Remove), ("/a", create(directory()))],
         "invalid operation on /a: the plan has another operation on this path"),
        (vec![("/a", create(directory())), ("/a/b", Action::Remove)],
         "invalid operation on /a/b: it lies in a directory that the plan makes"),
        (vec![("/a", create(directory())), ("/a/b/c", create(directory()))],
         "invalid operation on /a/b/c: nothing makes its directory"),
        (vec![("/a/b", create(directory())), ("/a", create(directory()))],
         "invalid operation on /a/b: another operation removes its directory"),
        (vec![("/a", create(file("a"))), ("/a/b", create(directory()))],
         "invalid operation on /a/b: another operation removes its directory"),
        (vec![("/a", Action::Remove), ("/a/b", Action::Remove)],
         "invalid operation on /a/b: another operation removes its directory"),
        (vec![("/a/b", create(directory())), ("/a", Action::Remove)],
         "invalid operation on /a/b: another operation removes its directory"),
        (vec![("/a", Action::Remove), ("/b", create(link("/a")))], no_file),
        (vec![("/b", create(link("/a"))), ("/a", Action::Remove)], no_file),
        (vec![("/b", replace(link("/a"), &[])), ("/a", replace(file("x"), &[]))], no_file),
        (vec![("/b", create(link("/a"))), ("/a", create(file("x")))], no_file),
        (vec![("/b", replace(link("/b"), &[]))], no_file),
        (vec![("/a", replace(link("/c"), &[])), ("/b", create(link("/a")))], no_file),
        (vec![("/a", replace(symlink(b"t"), &["/a/f"])), ("/b", create(link("/a/f")))], no_file),
    ];
    for (operations, error) in table {
        assert_eq!(planned(&operations).unwrap_err().to_string(), error);
    }
}

#[test]
fn refuses_a_plan_that_is_blocked() {
    let plan = Plan {
        operations: Vec::new(),
        blocked: vec![Blocked { path: path("/mnt"), why: Obstacle::MountPoint }],
    };
    let error = plan_steps(&plan, |_| None).unwrap_err();
    let text = "the plan is blocked at /mnt: it is or holds a mount point";
    assert_eq!(error.to_string(), text);
}
