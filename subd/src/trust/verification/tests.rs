//! Tests of what is accepted: a table of attacks, and plans that are changed by chance.

use std::sync::Arc;

use api::subd::ExpectedState;
use certs::signing_key::SigningKey;
use model::escape::ByteText;
use model::image::composition::{compose, nothing};
use model::image::{ComputedRule, FORMAT, HealthCheck};
use model::object::{Algorithm, ObjectId};
use model::plan::{RefusedChange, RefusedKind};
use model::signing::{ContentSigner, ContentsStatement, Statement};
use model::tree::text::{from_text, to_text};
use model::tree::{Metadata, Symlink, Time};
use model::trigger::Triggers;
use proptest::prelude::*;

use super::*;
use crate::trust::contents::AcceptedContent;
use crate::trust::offered_images::OfferedImages;

/// Made by `ssh-keygen`; nobody uses them.
const KEYS: [&str; 2] = [
    include_str!("../../../../common/certs/tests/keys/alice"),
    include_str!("../../../../common/certs/tests/keys/bob"),
];

const NOW: u64 = 1_000;

const SIGNED: &str = "\
d 755 0:0 /etc
f 644 0:0 1.000000000 5 @1 /etc/a
f 644 0:0 1.000000000 5 @2 /etc/b
h /etc/c -> /etc/b
l 0:0 /etc/l -> a
d 755 0:0 /usr
f 4755 0:0 1.000000000 5 @3 /usr/s
d 700 0:0 /usr/x
f 644 0:0 1.000000000 5 @4 /usr/x/y
";

const TRIGGERS: &str = r#"[{"MatchLines": ["/etc/a"], "Service": "a"}]"#;

/// The tree of a text, in which `@` and a digit stand for an object.
fn tree(text: &str) -> Tree {
    let expand =
        |text: String, digit: u8| text.replace(&format!("@{digit}"), &object(digit).to_string());
    from_text(Algorithm::Blake3, &(0..=9).fold(text.to_owned(), expand)).unwrap()
}

fn object(byte: u8) -> ObjectId {
    ObjectId::Blake3([byte; 32])
}

fn path(text: &str) -> TreePath {
    text.parse().unwrap()
}

/// Everything that verification needs.
struct World {
    image: RequiredImage,
    contents: Vec<Signature>,
    scan: Snapshot,
    refused: RefusedChanges,
    exclusions: Patterns,
    keys: TrustedKeys,
    last: Option<AcceptedImage>,
    allow_older: bool,
}

fn content(name: &str, tree: &Tree) -> Content {
    Content {
        format: FORMAT,
        name: name.parse().unwrap(),
        root: tree.digest(),
        filter: Some(model::filter::Filter::new(["/home/.*"]).unwrap()),
        triggers: Triggers::from_json(TRIGGERS).unwrap(),
        computed: model::image::computed_rules(tree),
        health_check: None,
        signers: Vec::new(),
    }
}

fn sign(content: &Content, who: usize, signed: u64, expires: Option<u64>) -> Signature {
    let (image, digest) = (content.name.clone(), content.digest());
    let key = SigningKey::read(KEYS[who], None).unwrap();
    key.sign(&Statement { image, digest, signed, expires }).unwrap()
}

fn snapshot(have: &Tree, image: &RequiredImage, exclusions: &Patterns) -> Snapshot {
    let scope = Scope::of(&image.scan, exclusions.lines());
    Snapshot {
        settings: Arc::new(image.scan.clone()),
        scope,
        revision: 1,
        tree: Some(have.clone()),
        report: Some(ScanReport::of(scope, have)),
        left_alone: Vec::new(),
        index: std::sync::OnceLock::new(),
    }
}

impl World {
    fn new(have: &Tree, want: &Tree) -> Self {
        Self::of(have, want, content("web/8", want))
    }

    fn of(have: &Tree, want: &Tree, content: Content) -> Self {
        let signatures = vec![sign(&content, 0, 900, None), sign(&content, 1, 800, Some(2_000))];
        let image = RequiredImage::new(content, want.clone()).with_signatures(signatures);
        let exclusions = Patterns::new::<&str>([]).unwrap();
        let scan = snapshot(have, &image, &exclusions);
        let line = |who: &&str| SigningKey::read(who, None).unwrap().public_line().unwrap();
        let lines: Vec<String> = KEYS.iter().map(line).collect();
        let keys = TrustedKeys::read(&lines.join("\n"), 2).unwrap();
        let refused = RefusedChanges::default();
        let (last, allow_older) = (None, false);
        let contents = Vec::new();
        Self { image, contents, scan, refused, exclusions, keys, last, allow_older }
    }

    fn have(&self) -> &Tree {
        self.scan.tree.as_ref().unwrap()
    }

    /// The plan that a good dominator makes.
    fn plan(&self) -> Plan {
        let want = required_tree(&self.image, &self.exclusions).unwrap();
        let report = self.scan.report.as_ref().unwrap();
        plan_between(self.have(), &want, report, &self.refused).without_blocked()
    }

    fn request(&self, plan: Plan) -> PrepareRequest {
        let expects =
            ExpectedState { instance: 1, root: self.have().digest(), scope: self.scan.scope };
        PrepareRequest {
            update_id: 7,
            expects,
            image: self.image.name().clone(),
            image_digest: self.image.digest,
            plan: plan.into(),
            triggers: self.image.content.triggers.clone(),
            health_check: self.image.content.health_check.clone(),
            force_disruption: false,
            expires_seconds: 60,
        }
    }

    fn verify(&self, request: &PrepareRequest) -> Result<VerifiedUpdate, Refusal> {
        let Self { image, contents, scan, refused, exclusions, .. } = self;
        let case = UpdateCase { request, image, contents, scan, refused, exclusions };
        let (keys, allow_older, last) = (&self.keys, self.allow_older, self.last.as_ref());
        let names = &["web1.example".to_owned(), "10.0.0.1".to_owned()];
        verify_update(&case, &SigningPolicy { keys, needed: 2, now: NOW, allow_older, last, names })
    }

    fn verify_plan(&self, plan: Plan) -> Result<VerifiedUpdate, Refusal> {
        self.verify(&self.request(plan))
    }
}

fn accepted(image: &str, digest: ObjectId, signed: u64) -> AcceptedImage {
    let image: ImageName = image.parse().unwrap();
    let part = AcceptedPart { image: image.clone(), digest, signed };
    let (parts, lines) = ([digest].into(), [(FULL.to_owned(), part)].into());
    AcceptedImage { image, digest, signed, parts, lines, contents: Default::default() }
}

fn drifted() -> Tree {
    tree(&SIGNED.replace("/etc/l -> a", "/etc/l -> b").replace("@1", "@9"))
}

#[test]
fn an_honest_update_is_accepted_and_says_what_may_fire() {
    let world = World::new(&drifted(), &tree(SIGNED));
    let verified = world.verify_plan(world.plan()).unwrap();
    let digest = world.image.digest;
    let accepted = accepted("web/8", digest, 800);
    assert_eq!(
        verified,
        VerifiedUpdate { accepted, changed: vec![path("/etc/a"), path("/etc/l")] }
    );
    // A plan that says that only times differ fires what the paths fire.
    let mut quiet = world.plan();
    quiet.operations.iter_mut().for_each(|operation| operation.reason = vec![Difference::Mtime]);
    assert_eq!(world.verify_plan(quiet).unwrap().changed, verified.changed);
    // Nothing to do is fine, too: the machine learns the triggers.
    let same = World::new(&tree(SIGNED), &tree(SIGNED));
    assert_eq!(same.verify_plan(same.plan()).unwrap().changed, []);
}

#[test]
fn what_is_not_the_images_own_is_refused() {
    let world = World::new(&drifted(), &tree(SIGNED));
    let honest = || world.request(world.plan());
    let other = |what| Refusal::Other { what, image: "web/8".parse().unwrap() };
    let check = HealthCheck { command: vec!["/x".to_owned()], within_seconds: 1, undo: false };
    let more = TRIGGERS.replace("}]", "}, {\"MatchLines\": [\"/\"], \"Service\": \"b\"}]");
    #[rustfmt::skip]
    let table = [
        (PrepareRequest { image: "web/9".parse().unwrap(), ..honest() }, "name and digest"),
        (PrepareRequest { image_digest: object(1), ..honest() }, "name and digest"),
        (PrepareRequest { triggers: Triggers::default(), ..honest() }, "triggers"),
        (PrepareRequest { triggers: Triggers::from_json(&more).unwrap(), ..honest() }, "triggers"),
        (PrepareRequest { health_check: Some(check), ..honest() }, "health checks"),
    ];
    for (request, what) in table {
        assert_eq!(world.verify(&request), Err(other(what)));
    }
}

#[test]
fn plans_that_lead_elsewhere_are_refused() {
    let world = World::new(&drifted(), &tree(SIGNED));
    let file = |byte, mode| match tree(SIGNED).file(&path("/etc/a")) {
        Some(mut file) => {
            file.object = object(byte).into();
            file.metadata = Metadata::new(mode, 0, 0);
            Node::Leaf(Leaf::File(file))
        }
        None => panic!("it is there"),
    };
    let with = |path: &str, action| {
        let mut plan = world.plan();
        let reason = vec![Difference::Content];
        plan.operations.push(Operation { path: path.parse().unwrap(), action, reason });
        world.verify_plan(plan).unwrap_err().to_string()
    };
    let replace = |node| Action::Replace { node, displaced: Vec::new() };
    let elsewhere = |path: &str, why: &str| {
        format!("with this plan {path} would not be as it is signed ({why})")
    };
    #[rustfmt::skip]
    let table = [
        ("/usr/x/evil", Action::Create(file(7, 0o755)), elsewhere("/usr/x/evil", "extra")),
        ("/usr/x/y", replace(file(7, 0o644)), elsewhere("/usr/x/y", "content")),
        ("/usr/x", Action::Change(Node::Directory(Metadata::new(0o777, 0, 0))), elsewhere("/usr/x", "mode")),
        ("/etc/c", replace(file(2, 0o644)), elsewhere("/etc/c", "links")),
        ("/usr/x/y", Action::Remove, elsewhere("/usr/x/y", "missing")),
        ("/home/x", Action::Create(file(7, 0o755)), "the plan does not fit the machine".to_owned()),
    ];
    for (at, action, refusal) in table {
        assert_eq!(with(at, action), refusal, "{at}");
    }
    // Not all of the way.
    let mut half = world.plan();
    half.operations.pop();
    let (at, why) = (path("/etc/l"), "target".to_owned());
    assert_eq!(world.verify_plan(half), Err(Refusal::Elsewhere { path: at, why, more: 0 }));
}

/// To make room on a full disk.
#[test]
fn extras_alone_may_be_removed_on_a_machine_that_has_the_image() {
    let more = "l 0:0 /etc/l -> b\nf 644 0:0 1.000000000 5 @5 /etc/z\n";
    let have = tree(&SIGNED.replace("l 0:0 /etc/l -> a\n", more));
    let mut world = World::new(&have, &tree(SIGNED));
    let removal = |at: &str| Operation {
        path: path(at),
        action: Action::Remove,
        reason: vec![Difference::Mtime],
    };
    let plan_of = |paths: &[&str]| Plan {
        operations: paths.iter().map(|at| removal(at)).collect(),
        blocked: Vec::new(),
    };
    let elsewhere = |at: &str, why: &str, more| {
        Err(Refusal::Elsewhere { path: path(at), why: why.to_owned(), more })
    };
    assert_eq!(world.verify_plan(plan_of(&["/etc/z"])), elsewhere("/etc/l", "target", 0));
    let digest = world.image.digest;
    let last = accepted("web/8", digest, 800);
    world.last = Some(last.clone());
    let changed = vec![path("/etc/z")];
    let verified = VerifiedUpdate { accepted: last.clone(), changed };
    assert_eq!(world.verify_plan(plan_of(&["/etc/z"])), Ok(verified));
    assert_eq!(world.verify_plan(plan_of(&[])), elsewhere("/etc/l", "target", 1));
    let refused = world.verify_plan(plan_of(&["/etc/z", "/usr/x/y"]));
    assert!(matches!(refused, Err(Refusal::Elsewhere { .. })), "{refused:?}");
    // Of an image that the machine is to get, extras are removed with all other changes only.
    world.last = Some(AcceptedImage { digest: object(1), signed: 700, ..last });
    assert_eq!(world.verify_plan(plan_of(&["/etc/z"])), elsewhere("/etc/l", "target", 0));
}

/// A directory that the image does not have, and that stays because it holds kept content.
const KEPT: &str = "d 700 0:0 /srv\nd 700 0:0 /srv/app\n";

/// `have` with the first `count` paths of that.
fn and_kept(have: &Tree, count: usize) -> Tree {
    let mut builder = TreeBuilder::new(Algorithm::Blake3);
    for (path, node) in have.nodes().chain(tree(KEPT).nodes().skip(1).take(count)) {
        builder.insert(path, node).unwrap();
    }
    builder.finish().unwrap()
}

/// A machine that has that, too.
fn with_kept(have: &Tree, want: &Tree) -> World {
    let mut world = World::new(&and_kept(have, 2), want);
    world.scan.report.as_mut().unwrap().kept_directories = vec![path("/srv/app")];
    world
}

#[test]
fn what_stays_though_it_is_not_signed_stays_as_it_is() {
    let world = with_kept(&drifted(), &tree(SIGNED));
    assert!(world.verify_plan(world.plan()).is_ok());
    for (at, node) in [
        ("/srv", Metadata::new(0o777, 0, 0)),
        ("/srv/app", Metadata::new(0o755, 1_000, 0)),
        ("/srv/app", Metadata::new(0o755, 0, 0)),
    ] {
        let mut plan = world.plan();
        let (action, reason) = (Action::Change(Node::Directory(node)), vec![Difference::Mode]);
        plan.operations.push(Operation { path: path(at), action, reason });
        assert_eq!(world.verify_plan(plan), Err(Refusal::NotSigned { path: path(at) }));
    }
}

#[test]
fn what_others_can_reach_is_not_changed_in_place() {
    let have =
        SIGNED.replace("f 644 0:0 1.000000000 5 @2 /etc/b", "f 600 0:0 1.000000000 5 @2 /etc/b");
    let mut world = World::new(&tree(&have), &tree(SIGNED));
    let plan = world.plan();
    assert!(matches!(&*plan.operations, [Operation { action: Action::Change(_), .. }]));
    assert!(world.verify_plan(plan.clone()).is_ok());
    world.scan.report.as_mut().unwrap().externally_linked = vec![path("/etc/b")];
    assert!(world.verify_plan(world.plan()).is_ok());
    let mut by_link = plan.clone();
    by_link.operations[0].path = path("/etc/c");
    for plan in [plan, by_link] {
        let path = plan.operations[0].path.clone();
        let why = "it has names that are not signed";
        assert_eq!(world.verify_plan(plan), Err(Refusal::InPlace { path, why }));
    }
    let unlike = [("/usr/s", "f 4755 0:0", "f 755 0:0"), ("/etc/b", "f 644 0:0", "f 666 0:0")];
    for (at, signed, found) in unlike {
        let lines = SIGNED.lines().map(|line| match line.ends_with(at) {
            true => line.replace(signed, found) + "\n",
            false => format!("{line}\n"),
        });
        let world = World::new(&tree(&lines.collect::<String>()), &tree(SIGNED));
        let mut plan = world.plan();
        plan.operations.retain(|operation| operation.path == path(at));
        let node = Node::Leaf(Leaf::File(tree(SIGNED).file(&path(at)).unwrap()));
        plan.operations[0].action = Action::Change(node);
        let (path, why) = (path(at), "it has privileges, or others than root could write to it");
        assert_eq!(world.verify_plan(plan), Err(Refusal::InPlace { path, why }));
    }
}

#[test]
fn a_machine_that_scans_otherwise_is_not_compared() {
    let mut world = World::new(&drifted(), &tree(SIGNED));
    let plan = world.plan();
    let settings = |lines: &[&str]| {
        let filter = model::filter::Filter::new(lines).unwrap();
        let coverage = model::scope::Coverage::Full(filter);
        model::scope::ScanSettings { coverage, ..model::scope::ScanSettings::default() }
    };
    for lines in [&["/home/.*", "/etc/a"][..], &[]] {
        let settings = settings(lines);
        world.scan.scope = Scope::of(&settings, &[]);
        world.scan.settings = Arc::new(settings);
        let image = "web/8".parse().unwrap();
        assert_eq!(world.verify_plan(plan.clone()), Err(Refusal::Scope { image }), "{lines:?}");
    }
}

#[test]
fn the_machine_goes_back_only_if_it_may() {
    let mut world = World::new(&drifted(), &tree(SIGNED));
    let plan = world.plan();
    let last = |digest, signed| accepted("web/9", digest, signed);
    let digest = world.image.digest;
    let table = [
        ("older was accepted", last(object(9), 799), false, Ok(800)),
        ("as old was accepted", last(object(9), 800), false, Err(())),
        ("as old, and it may", last(object(9), 800), true, Ok(800)),
        ("this one, as old", last(digest, 800), false, Ok(800)),
        ("newer was accepted", last(object(9), 801), false, Err(())),
        ("newer, and it may", last(object(9), 801), true, Ok(800)),
        ("this one, signed later then", last(digest, 950), false, Ok(950)),
        ("an expiry has passed by the record", last(object(9), 2_000), true, Err(())),
        ("but the machine has it", last(digest, 2_000), false, Ok(2_000)),
    ];
    for (what, accepted, allow_older, expected) in table {
        (world.last, world.allow_older) = (Some(accepted), allow_older);
        let verified = world.verify_plan(plan.clone());
        assert_eq!(
            verified.map(|verified| verified.accepted.signed).map_err(|_| ()),
            expected,
            "{what}"
        );
    }
    world.allow_older = false;
    world.last = Some(last(object(9), 800));
    assert_eq!(
        world.verify_plan(plan.clone()).unwrap_err().to_string(),
        "web/8 was signed at 1970-01-01T00:13:20Z, and one of the same second was accepted before \
         (web/9, signed at 1970-01-01T00:13:20Z): sign it again if the machine is to go back"
    );
    world.last = Some(last(object(9), 801));
    assert_eq!(
        world.verify_plan(plan).unwrap_err().to_string(),
        "web/8 was signed at 1970-01-01T00:13:20Z, and a newer one was accepted before (web/9, \
         signed at 1970-01-01T00:13:21Z): sign it again if the machine is to go back"
    );
}

#[test]
fn of_computed_files_all_but_the_content_is_signed() {
    let rule = "g 640 0:0 files:6972 /etc/computed\n";
    let signed = tree(&(SIGNED.to_owned() + rule));
    let world = World::new(&tree(SIGNED), &signed);
    let want = [ComputedRule { path: path("/etc/computed"), source: "files:6972".to_owned() }];
    assert_eq!(world.image.content.computed, want);
    let brought = |mode, uid| {
        let file = model::tree::File {
            metadata: Metadata::new(mode, uid, 0),
            mtime: Time::default(),
            size_bytes: 3,
            object: object(77).into(),
        };
        let action = Action::Create(Node::Leaf(Leaf::File(file)));
        let reason = vec![Difference::Missing];
        let operations = vec![Operation { path: path("/etc/computed"), action, reason }];
        world.verify_plan(Plan { operations, blocked: Vec::new() }).map(|verified| verified.changed)
    };
    let refused = Err(Refusal::Computed { path: path("/etc/computed") });
    assert_eq!(brought(0o640, 0), Ok(vec![path("/etc/computed")]));
    assert_eq!(brought(0o4755, 0), refused);
    assert_eq!(brought(0o640, 1), refused);
    assert_eq!(world.verify_plan(Plan::default()).map(|_| Vec::new()), refused);
}

#[test]
fn content_must_be_signed_if_the_image_names_signers_of_it() {
    let want = tree(&(SIGNED.to_owned() + "g 640 0:0 files:6972 /etc/computed\n"));
    let key = SigningKey::read(KEYS[0], None).unwrap();
    let line = key.public_line().unwrap();
    let signer = ContentSigner::read_list(&line).unwrap();
    let content = Content { format: 2, signers: signer, ..content("web/8", &want) };
    content.verify(&want).unwrap();
    let mut world = World::of(&tree(SIGNED), &want, content);
    let file = model::tree::File {
        metadata: Metadata::new(0o640, 0, 0),
        mtime: Time::default(),
        size_bytes: 3,
        object: object(77).into(),
    };
    let action = Action::Create(Node::Leaf(Leaf::File(file)));
    let computed = path("/etc/computed");
    let operation = Operation { path: computed.clone(), action, reason: vec![Difference::Missing] };
    let plan = Plan { operations: vec![operation], blocked: Vec::new() };
    let why = "no signature of this content was given".to_owned();
    let refused = Err(Refusal::Content { path: computed.clone(), why });
    assert_eq!(world.verify_plan(plan.clone()), refused);
    let files = vec![(computed.clone(), object(77))];
    let machine = "web1.example".to_owned();
    let statement = ContentsStatement { machine, issued: 990, expires: 1_100, files };
    world.contents = vec![key.sign_contents(&statement).unwrap()];
    let contents = world.verify_plan(plan).unwrap().accepted.contents;
    let machine = "web1.example".to_owned();
    let key = world.image.content.signers[0].key.clone();
    let known = AcceptedContent { object: object(77), issued: 990, key, machine };
    assert_eq!(contents, AcceptedContents::from([(computed, known)]));
}

/// What the machine has instead of the image: what becomes of some of its paths.
fn drift() -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
    prop::collection::vec((any::<prop::sample::Index>(), 0..6_u8), 0..5)
}

fn drifting(signed: &Tree, drift: &[(prop::sample::Index, u8)]) -> Tree {
    let mut builder = TreeBuilder::new(Algorithm::Blake3);
    for (path, node) in signed.nodes() {
        builder.insert(path, node).unwrap();
    }
    for (index, kind) in drift {
        let paths: Vec<TreePath> = builder.iter().map(|(path, _)| path.clone()).collect();
        let path = index.get(&paths).clone();
        let is_directory = matches!(builder.get(&path), Some(Node::Directory(_)));
        match kind {
            0 if !is_directory => drop(builder.remove(&path)),
            1 => {
                let beside = path.join(b"new").unwrap();
                if is_directory {
                    builder.replace(beside, node(*kind));
                }
            }
            2 if !is_directory => drop(builder.replace(path, node(*kind))),
            _ => {
                if let Some(mut node) = builder.remove(&path) {
                    if let Some(metadata) = node.metadata_mut() {
                        metadata.uid = u32::from(*kind);
                    }
                    builder.replace(path, node);
                }
            }
        }
    }
    builder.finish().unwrap_or_else(|_| signed.clone())
}

/// Something that a plan may bring.
fn node(kind: u8) -> Node {
    let metadata = Metadata::new(0o644, 0, 0);
    match kind % 3 {
        0 => Node::Directory(Metadata::new(0o755, 0, 0)),
        1 => {
            let metadata = Metadata::new(0o777, 0, 0);
            Node::Leaf(Leaf::Symlink(Symlink { metadata, target: ByteText(vec![b'x', kind]) }))
        }
        _ => Node::Leaf(Leaf::File(model::tree::File {
            metadata,
            mtime: Time { seconds: 1, nanoseconds: 0 },
            size_bytes: 5,
            object: object(kind).into(),
        })),
    }
}

/// How a stolen dominator changes a plan.
#[derive(Clone, Debug)]
enum Change {
    Drop(prop::sample::Index),
    Twice(prop::sample::Index),
    Swap(prop::sample::Index, prop::sample::Index),
    Node(prop::sample::Index, u8),
    Metadata(prop::sample::Index, u8),
    Elsewhere(prop::sample::Index, prop::sample::Index),
    Insert(prop::sample::Index, prop::sample::Index, u8),
}

fn change() -> impl Strategy<Value = Change> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        index().prop_map(Change::Drop),
        index().prop_map(Change::Twice),
        (index(), index()).prop_map(|(one, two)| Change::Swap(one, two)),
        (index(), any::<u8>()).prop_map(|(at, kind)| Change::Node(at, kind)),
        (index(), any::<u8>()).prop_map(|(at, kind)| Change::Metadata(at, kind)),
        (index(), index()).prop_map(|(at, to)| Change::Elsewhere(at, to)),
        (index(), index(), any::<u8>()).prop_map(|(at, to, kind)| Change::Insert(at, to, kind)),
    ]
}

fn changed(plan: &mut Plan, change: &Change, paths: &[TreePath]) {
    let operations = &mut plan.operations;
    let count = operations.len();
    match change {
        Change::Insert(at, to, kind) => {
            let node = node(*kind);
            let action = match kind % 4 {
                0 => Action::Remove,
                1 => Action::Change(node),
                2 => Action::Replace { node, displaced: Vec::new() },
                _ => Action::Create(node),
            };
            let path = to.get(paths);
            let path = if kind % 4 == 3 { path.join(b"evil").unwrap() } else { path.clone() };
            let reason = vec![Difference::Content];
            operations.insert(at.index(count + 1), Operation { path, action, reason });
        }
        _ if count == 0 => {}
        Change::Drop(at) => drop(operations.remove(at.index(count))),
        Change::Twice(at) => operations.push(operations[at.index(count)].clone()),
        Change::Swap(one, two) => operations.swap(one.index(count), two.index(count)),
        Change::Elsewhere(at, to) => operations[at.index(count)].path = to.get(paths).clone(),
        Change::Node(at, kind) => match &mut operations[at.index(count)].action {
            Action::Create(old) | Action::Change(old) | Action::Replace { node: old, .. } => {
                *old = node(*kind);
            }
            Action::Remove => {}
        },
        Change::Metadata(at, kind) => match &mut operations[at.index(count)].action {
            Action::Create(old) | Action::Change(old) | Action::Replace { node: old, .. } => {
                if let Some(metadata) = old.metadata_mut() {
                    metadata.mode = u32::from(*kind);
                }
            }
            Action::Remove => {}
        },
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Whatever is done to a plan: it is accepted if, and only if, it leads to the signed tree, and
    /// leaves what the machine keeps as it is.
    #[test]
    fn a_plan_is_accepted_only_if_it_leads_to_the_signed_tree(
        drift in drift(),
        changes in prop::collection::vec(change(), 0..4),
        kept in any::<bool>(),
    ) {
        let signed = tree(SIGNED);
        let have = drifting(&signed, &drift);
        let world = if kept { with_kept(&have, &signed) } else { World::new(&have, &signed) };
        let mut plan = world.plan();
        prop_assert!(world.verify_plan(plan.clone()).is_ok(), "the honest plan");
        // Directories that hold nothing else may go as well.
        let whole = and_kept(&signed, 2);
        let counts = 0..=if kept { 2 } else { 0 };
        let right: Vec<String> = counts.map(|count| to_text(&and_kept(&signed, count))).collect();
        let paths: Vec<TreePath> = whole.nodes().map(|(path, _)| path).collect();
        changes.iter().for_each(|change| changed(&mut plan, change, &paths));
        let leads = apply(world.have(), &plan).map(|after| to_text(&after));
        let is_right = leads.is_ok_and(|after| right.contains(&after));
        let verified = world.verify_plan(plan);
        match &verified {
            Err(Refusal::NotSigned { .. } | Refusal::InPlace { .. }) => {}
            _ => prop_assert_eq!(verified.is_ok(), is_right, "{:?}", verified),
        }
        prop_assert!(verified.is_err() || is_right);
    }
}

#[test]
fn only_what_this_machine_found_to_be_blocked_may_differ() {
    let have = tree(
        "d 755 0:0 /etc\nf 644 0:0 1.000000000 5 @1 /etc/a\nf 644 0:0 1.000000000 5 @1 /etc/b\n",
    );
    let want = tree(
        "d 755 0:0 /etc\nf 644 0:0 1.000000000 5 @2 /etc/a\nf 644 0:0 1.000000000 5 @2 /etc/b\n",
    );
    let mut world = World::new(&have, &want);
    let whole = world.plan();
    let refuse = |path: &str| RefusedChange {
        path: path.parse().unwrap(),
        kind: RefusedKind::Any,
        why: "it is busy".to_owned(),
    };
    let without = |path: &str| {
        let mut plan = whole.clone();
        plan.operations.retain(|operation| operation.path.to_string() != path);
        plan
    };
    let other = |path: &str| {
        let mut plan = whole.clone();
        for operation in &mut plan.operations {
            if let (true, Action::Replace { node: Node::Leaf(Leaf::File(file)), .. }) =
                (operation.path.to_string() == path, &mut operation.action)
            {
                file.object = Algorithm::Blake3.digest(b"evil").into();
            }
        }
        plan
    };
    let verify = |world: &World, plan: Plan| {
        let verified = world.verify(&world.request(plan));
        let changed = |update: VerifiedUpdate| format!("{:?}", update.changed);
        verified.map_or_else(|refusal| refusal.to_string(), changed)
    };
    let nothing_refused = "with this plan /etc/a would not be as it is signed (content)";
    assert_eq!(verify(&world, without("/etc/a")), nothing_refused);
    world.refused = [refuse("/etc/a")].into_iter().collect();
    let (a, b): (TreePath, TreePath) = ("/etc/a".parse().unwrap(), "/etc/b".parse().unwrap());
    assert_eq!(verify(&world, without("/etc/a")), format!("{:?}", [&b]));
    // What was refused may be tried again; its triggers fire all the same.
    assert_eq!(verify(&world, whole.clone()), format!("{:?}", [&a, &b]));
    let elsewhere = |path: &str, why: &str| {
        format!("with this plan {path} would not be as it is signed ({why})")
    };
    assert_eq!(verify(&world, without("/etc/b")), elsewhere("/etc/b", "content"));
    assert_eq!(verify(&world, other("/etc/a")), elsewhere("/etc/a", "it is busy"));
    assert_eq!(verify(&world, other("/etc/b")), elsewhere("/etc/b", "content"));
}

/// A bundle with one file, signed by both at this time.
fn bundle(name: &str, file: &str, signed: u64) -> Arc<RequiredImage> {
    let tree = tree(&format!("f 644 0:0 1.000000000 5 @7 {file}\n"));
    let triggers = Triggers::default();
    let content = Content { filter: None, triggers, ..content(name, &tree) };
    let signatures = (0..2).map(|who| sign(&content, who, signed, None)).collect();
    Arc::new(RequiredImage::new(content, tree).with_signatures(signatures))
}

/// A base that was signed at 800.
fn base() -> Arc<RequiredImage> {
    Arc::new(World::new(&tree(SIGNED), &tree(SIGNED)).image)
}

/// What a machine accepts that has accepted `last`.
fn accept(
    parts: &[&Arc<RequiredImage>],
    last: Option<&AcceptedImage>,
) -> Result<AcceptedImage, Refusal> {
    let world = World::new(&tree(SIGNED), &tree(SIGNED));
    let image = compose(parts.iter().copied().cloned().collect());
    let (keys, names) = (&world.keys, &[]);
    let policy = SigningPolicy { keys, needed: 2, now: NOW, allow_older: false, last, names };
    verify_image(&image.unwrap(), &policy)
}

/// What the file has after this was accepted.
fn recorded(accepted: AcceptedImage, before: &AcceptedImage) -> AcceptedImage {
    let mut lines = before.lines.clone();
    merge_lines(&mut lines, &accepted.lines);
    AcceptedImage { lines, ..accepted }
}

#[test]
fn each_part_is_as_new_as_the_last_one_in_its_place() {
    let (logd, newer) = (bundle("a/logd/7", "/logd", 500), bundle("a/logd/8", "/logd", 600));
    let old = bundle("hotfix/ssl-1", "/ssl", 100);
    let is_older = |result: Result<AcceptedImage, Refusal>| {
        assert!(matches!(result, Err(Refusal::Older { .. })), "{result:?}");
    };
    let first = accept(&[&base(), &logd], None).unwrap();
    let (image, digest) = (base().name().clone(), base().digest);
    let part = AcceptedPart { image, digest, signed: 800 };
    assert_eq!((first.signed, &first.lines["/"]), (800, &part));
    assert_eq!(first.lines.keys().collect::<Vec<_>>(), ["/", "a/logd"]);
    let second = accept(&[&base(), &newer], Some(&first)).unwrap();
    let second = recorded(second, &first);
    is_older(accept(&[&base(), &logd], Some(&second)));
    // It leaves, and comes back as it was.
    let without = recorded(accept(&[&base()], Some(&second)).unwrap(), &second);
    is_older(accept(&[&base(), &logd], Some(&without)));
    assert!(accept(&[&base(), &newer], Some(&without)).is_ok());
    // A bundle of another directory may be old beside an image with a filter, and not without.
    assert!(accept(&[&base(), &old], Some(&without)).is_ok());
    is_older(accept(&[&old], Some(&without)));
    is_older(accept(&[&old, &newer], Some(&without)));
}

#[test]
fn what_is_left_out_does_not_count_as_accepted() {
    let taken = bundle("b/etc", "/usr", 900);
    let accepted = accept(&[&base(), &taken], None).unwrap();
    assert_eq!(accepted.parts, [base().digest].into());
    assert_eq!(accepted.lines.keys().collect::<Vec<_>>(), ["/"]);
    // It must be signed all the same.
    let unsigned = RequiredImage::clone(&taken).with_signatures(Vec::new());
    let refused = accept(&[&base(), &Arc::new(unsigned)], None);
    assert!(matches!(refused, Err(Refusal::Unendorsed { .. })), "{refused:?}");
}

#[test]
fn a_record_of_an_earlier_release_keeps_its_time() {
    let text = format!(r#"{{"image": "a/logd/8", "digest": "{}", "signed": 950}}"#, object(3));
    let last: AcceptedImage = serde_json::from_str(&text).unwrap();
    let last = last.with_lines();
    for parts in [&[&base()][..], &[&base(), &bundle("a/logd/7", "/logd", 940)]] {
        let refused = accept(parts, Some(&last));
        assert!(matches!(refused, Err(Refusal::Older { .. })), "{refused:?}");
    }
}

#[test]
fn only_bundles_that_the_machine_has_leave_with_their_files() {
    let (logd, other) = (bundle("a/logd/7", "/logd", 500), bundle("b/1", "/other", 600));
    let stranger = bundle("c/1", "/shadow", 900);
    let composed = |parts: &[&Arc<RequiredImage>]| {
        let parts = [nothing()].into_iter().chain(parts.iter().copied().cloned());
        compose(parts.collect()).unwrap()
    };
    let last = accept(&[&nothing(), &logd, &other], None).unwrap();
    assert_eq!(last.image.as_str(), "(nothing) + a/logd/7 + b/1");
    assert_eq!(last.lines.keys().collect::<Vec<_>>(), ["a/logd", "b"]);
    let mut offered = OfferedImages::default();
    for one in [&logd, &other, &stranger] {
        offered.insert(RequiredImage::clone(one));
    }
    let files = "f 644 0:0 1.000000000 5 @7 /logd\nf 644 0:0 1.000000000 5 @7 /other\n";
    let shadow = "f 644 0:0 1.000000000 5 @7 /shadow\n";
    // What a dominator has scanned, what it removes, and whether that is accepted.
    let world = |image: RequiredImage, scanned: &[&Arc<RequiredImage>], have: &str| {
        let scanned = scanned.iter().copied().cloned().collect();
        let scan = image.with_leaving(scanned).unwrap();
        let (have, exclusions) = (tree(have), Patterns::new::<&str>([]).unwrap());
        let scan = snapshot(&have, &scan, &exclusions);
        let has = |bundle: &Content| last.has_bundle(bundle);
        let leaving = offered.leaving(&image, &scan.settings, has);
        let image = image.with_leaving(leaving).unwrap();
        let last = Some(last.clone());
        World { image, scan, last, ..World::new(&tree(SIGNED), &tree(SIGNED)) }
    };
    let removing = |paths: &[&str]| {
        let remove = |text: &&str| Operation {
            path: path(text),
            action: Action::Remove,
            reason: Default::default(),
        };
        Plan { operations: paths.iter().map(remove).collect(), blocked: Vec::new() }
    };
    let one = world(composed(&[&other]), &[&logd], files);
    assert_eq!(Vec::from_iter(one.plan().changed_paths()), [&path("/logd")]);
    assert_eq!(one.verify_plan(removing(&["/logd"])).unwrap().accepted.lines.len(), 1);
    for paths in [&["/logd", "/other"][..], &["/other"], &[]] {
        let refused = one.verify_plan(removing(paths));
        assert!(matches!(refused, Err(Refusal::Elsewhere { .. })), "{refused:?}");
    }
    let all = world(RequiredImage::clone(&nothing()), &[&logd, &other], files);
    let accepted = all.verify_plan(removing(&["/logd", "/other"])).unwrap().accepted;
    assert_eq!((accepted.image.as_str(), accepted.lines.len()), ("(nothing)", 0));
    // The machine never had the other bundle.
    let more = world(composed(&[&other]), &[&logd, &stranger], &format!("{files}{shadow}"));
    let refused = more.verify_plan(removing(&["/logd", "/shadow"]));
    assert!(matches!(refused, Err(Refusal::Scope { .. })), "{refused:?}");
    // A sparse image that comes first is no bundle.
    let alone = accept(&[&logd], None).unwrap();
    assert!(last.has_bundle(&logd.content) && !alone.has_bundle(&logd.content));
    // What the machine has can be offered to leave, whoever has signed it.
    let offer = |image: &RequiredImage| {
        let world = World::new(&tree(SIGNED), &tree(SIGNED));
        let (keys, last, names) = (&world.keys, Some(&last), &[]);
        let policy = SigningPolicy { keys, needed: 2, now: NOW, allow_older: false, last, names };
        verify_offer(&image.content, &[], &policy)
    };
    assert_eq!(offer(&logd), Ok(()));
    assert!(matches!(offer(&stranger), Err(Refusal::Unendorsed { .. })));
}
