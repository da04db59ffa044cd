//! A stolen dominator: a client that knows all calls and sends what it likes.

use std::sync::Arc;

use api::planning::{PlanJob, PlanKey};
use api::subd::{
    Activity, Commit, CommitRequest, ExpectedState, Fetch, FetchRequest, OfferImage,
    OfferImageRequest, Poll, PollReply, PollRequest, Prepare, PrepareRequest, SetConfiguration,
    SetConfigurationRequest, UpdateOutcome,
};
use api::{fault::FaultCode, method::Method};
use model::filter::{Filter, Patterns};
use model::image::required::RequiredImage;
use model::path::TreePath;
use model::plan::{Action, Difference, Operation};
use model::scope::{Coverage, ScanSettings};
use model::tree::{Computed, File, Leaf, Metadata, Node, Symlink, TreeBuilder};
use rpc::client::{CallError, Client};
use rpc::trees::TreeReader;
use testing::eventually;

use super::*;

/// Who sends what it likes to one machine.
pub(super) struct Thief {
    sub: Client,
    server: Client,
    source: String,
    runtime: tokio::runtime::Runtime,
    reader: Arc<TreeReader>,
    last_id: u64,
}

impl Thief {
    pub(super) fn of(site: &Site) -> Self {
        let server = site.fleet.addresses().imageserver;
        Self {
            sub: client_of(site.fleet.subs[0].address, site.fleet.security()),
            server: client_of(server, site.fleet.security()),
            source: server.to_string(),
            runtime: tokio::runtime::Runtime::new().unwrap(),
            reader: Arc::new(TreeReader::new(1)),
            last_id: 1 << 60,
        }
    }

    fn next(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub(super) fn call<M: Method>(&self, request: &M::Request) -> Result<M::Reply, CallError> {
        self.runtime.block_on(self.sub.call::<M>(request))
    }

    fn poll_until(&self, is_so: impl Fn(&PollReply) -> bool) -> PollReply {
        loop {
            let reply = self.call::<Poll>(&PollRequest::default()).unwrap();
            if is_so(&reply) {
                return reply;
            }
            let request = PollRequest { have: Some(reply.version), wait_ms: 5_000 };
            self.call::<Poll>(&request).unwrap();
        }
    }

    fn scan_as(&self, settings: &ScanSettings) -> PollReply {
        let scan = Some(settings.clone());
        let request = SetConfigurationRequest { scan, limits: None };
        self.call::<SetConfiguration>(&request).unwrap();
        self.poll_until(|reply| reply.scan.is_some())
    }

    pub(super) fn required(&self, image: &str) -> RequiredImage {
        let image = name(image);
        let got = self.reader.image(&self.server, &image, std::time::Duration::ZERO);
        RequiredImage::clone(&self.runtime.block_on(got).unwrap())
    }

    pub(super) fn offer(&self, image: &RequiredImage) -> Result<(), String> {
        let request = OfferImageRequest {
            content: image.content.clone(),
            signatures: image.signatures.clone(),
            sources: vec![self.source.clone()],
        };
        refused(self.call::<OfferImage>(&request).map(|_| ()))
    }

    /// The order of an honest dominator, with all objects fetched.
    fn order(&mut self, image: &RequiredImage) -> PrepareRequest {
        let reply = self.scan_as(&image.scan);
        let scan = reply.scan.clone().unwrap();
        let tree = self.runtime.block_on(self.reader.from_sub(&self.sub, scan.root, None)).unwrap();
        let job = PlanJob {
            key: PlanKey { image: image.digest, scan: 1, computed: 0 },
            tree,
            scan: Arc::new(scan.clone()),
            exclusions: Patterns::new::<&str>([]).unwrap(),
            image: Arc::new(image.clone()),
            computed: Arc::default(),
            refused: Arc::default(),
        };
        let planned = job.run().unwrap();
        let fetch_id = self.next();
        let (sources, objects) = (vec![self.source.clone()], Arc::clone(&planned.objects));
        let fetch = FetchRequest { fetch_id, sources, objects, ahead: false };
        self.call::<Fetch>(&fetch).unwrap();
        let is_over = |reply: &PollReply| {
            reply.last_fetch.as_ref().is_some_and(|last| last.fetch_id == fetch_id)
        };
        self.poll_until(is_over);
        PrepareRequest {
            update_id: self.next(),
            expects: ExpectedState {
                instance: reply.version.instance,
                root: scan.root,
                scope: scan.scope,
            },
            image: image.name().clone(),
            image_digest: image.digest,
            plan: Arc::clone(&planned.plan),
            triggers: image.content.triggers.clone(),
            health_check: image.content.health_check.clone(),
            force_disruption: true,
            expires_seconds: 60,
        }
    }

    /// The order of an honest dominator that has filled the image's computed files in with `file`.
    pub(super) fn order_with(&mut self, image: &RequiredImage, file: &File) -> PrepareRequest {
        let mut builder = TreeBuilder::new(image.tree.algorithm());
        for (path, node) in image.tree.nodes() {
            let node = match node {
                Node::Leaf(Leaf::Computed(Computed { metadata, .. })) => {
                    Node::Leaf(Leaf::File(File { metadata, ..file.clone() }))
                }
                other => other,
            };
            builder.insert(path, node).unwrap();
        }
        self.order(&RequiredImage { tree: builder.finish().unwrap(), ..image.clone() })
    }

    /// Sends a Prepare and a Commit, and waits until the update is done.
    pub(super) fn carry_out(&self, request: &PrepareRequest) {
        let update_id = request.update_id;
        self.call::<Prepare>(request).unwrap();
        self.poll_until(|reply| reply.activity == Activity::Prepared { update_id });
        self.call::<Commit>(&CommitRequest { update_id }).unwrap();
        let ended = |reply: &PollReply| {
            let last = reply.last_update.as_ref();
            reply.activity == Activity::Idle && last.is_some_and(|last| last.update_id == update_id)
        };
        let outcome = self.poll_until(ended).last_update.unwrap().outcome;
        assert_eq!(outcome, UpdateOutcome::Done);
    }

    /// Sends a Prepare and a Commit; both must be refused.
    #[track_caller]
    pub(super) fn expect_refused(&self, request: &PrepareRequest, why: &str) {
        let prepared = refused(self.call::<Prepare>(request).map(|_| ())).unwrap_err();
        assert!(prepared.contains(why), "{prepared}");
        let commit = CommitRequest { update_id: request.update_id };
        let committed = self.call::<Commit>(&commit).unwrap_err();
        assert_eq!(committed.code(), Some(FaultCode::NotFound), "{committed:?}");
    }
}

/// The text of a refusal for want of trust; any other failure is one of the test.
fn refused(result: Result<(), CallError>) -> Result<(), String> {
    result.map_err(|error| {
        assert_eq!(error.code(), Some(FaultCode::Untrusted), "{error:?}");
        model::display::error_chain(&error)
    })
}

fn replace(path: &str, leaf: Leaf) -> Operation {
    let action = Action::Replace { node: Node::Leaf(leaf), displaced: Vec::new() };
    let reason = vec![Difference::Content];
    Operation { path: TreePath::new(path).unwrap(), action, reason }
}

/// The operations of an order, to falsify them.
fn operations(order: &mut PrepareRequest) -> &mut Vec<Operation> {
    &mut Arc::make_mut(&mut order.plan).operations
}

fn link_to_evil(path: &str) -> Operation {
    let metadata = Metadata::new(0o777, 0, 0);
    let target = model::escape::ByteText(b"evil".to_vec());
    let node = Node::Leaf(Leaf::Symlink(Symlink { metadata, target }));
    let reason = vec![Difference::Missing];
    Operation { path: TreePath::new(path).unwrap(), action: Action::Create(node), reason }
}

#[test]
fn a_stolen_dominator_installs_nothing_that_is_not_signed() {
    let mut site = Site::start();
    // What is signed when it is added, by one key, is not enough; then the other signs elsewhere.
    site.add_signed("web/1", "1");
    site.converge("web/1");
    site.add_signed("web/2", "2");
    site.converge("web/2");
    site.expect("2");
    let services = site.services();
    site.fleet.dominator.stop().unwrap();

    site.add("web/3", "3", false);
    site.add_signed("web/4", "4");
    let mut thief = Thief::of(&site);
    let (unsigned, honest) = (thief.required("web/3"), thief.required("web/4"));
    let now =
        model::signing::Statement::clone(&honest.signatures[0].check().unwrap().statement).signed;

    // OpenSSH takes what imagetool has signed.
    site.expect_valid(&honest.signatures[0], "alice");

    // Nobody signed it; or one did, or one did twice, or somebody else.
    let none = thief.offer(&unsigned).unwrap_err();
    assert!(none.contains("web/3 has 0 of 2 signatures that count"), "{none}");
    let order = thief.order(&unsigned);
    thief.expect_refused(&order, "no signatures of web/3 were offered");
    let image = site.image("web/3");
    let by = |who, signed| site.signature(who, &image, signed);
    #[rustfmt::skip]
    let table = [
        (vec![by("alice", now)], "1 of 2"),
        (vec![by("alice", now), by("alice", now + 1)], "1 of 2"),
        (vec![by("alice", now), by("mallory", now)], "1 of 2"),
        (vec![by("mallory", now), by("mallory", now)], "0 of 2"),
        (honest.signatures.clone(), "0 of 2"),
    ];
    for (signatures, found) in table {
        let offered = RequiredImage { signatures, ..unsigned.clone() };
        let why = thief.offer(&offered).unwrap_err();
        assert!(why.contains(&format!("{found} signatures that count")), "{why}");
        thief.expect_refused(&order, "no signatures of web/3 were offered");
    }
    // What is signed, under the name and the signatures of another; and for another machine.
    let mut renamed = unsigned.clone();
    renamed.content.name = name("web/4");
    renamed.signatures = honest.signatures.clone();
    assert!(thief.offer(&renamed).unwrap_err().contains("0 of 2"));

    // What is signed, and something else.
    thief.offer(&honest).unwrap();
    let order = thief.order(&honest);
    let more = |path: &str| {
        let mut order = order.clone();
        operations(&mut order).push(link_to_evil(path));
        order
    };
    thief.expect_refused(&more("/evil"), "/evil would not be as it is signed (extra)");
    thief.expect_refused(&more("/etc/evil"), "/etc/evil would not be as it is signed (extra)");
    let mut less = order.clone();
    operations(&mut less).retain(|operation| operation.path.to_string() != "/program");
    thief.expect_refused(&less, "/program would not be as it is signed (content");
    let json = TRIGGERS.replace("}]", r#"}, {"MatchLines": ["/"], "Service": "evil"}]"#);
    let mut trigger = order.clone();
    trigger.triggers = model::trigger::Triggers::from_json(&json).unwrap();
    thief.expect_refused(&trigger, "the triggers of the update are not those that are signed");
    let mut check = order.clone();
    let command = vec!["/bin/sh".to_owned()];
    let evil = model::image::HealthCheck { command, within_seconds: 1, undo: false };
    check.health_check = Some(evil);
    thief.expect_refused(&check, "the health checks of the update are not those");
    let mut other = order;
    other.image = name("web/3");
    thief.expect_refused(&other, "no signatures of web/3 were offered");

    // A machine that scans less, or more, than the image asks is not compared.
    for lines in [&["/var/log/.*", "/etc/.*"][..], &[]] {
        let mut scanned = honest.clone();
        let coverage = Coverage::Full(Filter::new(lines).unwrap());
        scanned.scan = ScanSettings { coverage, ..ScanSettings::default() };
        let mut order = thief.order(&scanned);
        // What it keeps is refused before.
        operations(&mut order).retain(|operation| operation.path.to_string() == "/program");
        thief.expect_refused(&order, "the machine does not scan with the settings of web/4");
    }

    // What was signed before what the machine has; also if subd dies in between.
    let old = thief.required("web/1");
    let again = |signed| {
        let image = site.image("web/1");
        vec![site.signature("alice", &image, signed), site.signature("bob", &image, signed)]
    };
    let old = RequiredImage { signatures: again(now - 1_000), ..old };
    assert!(thief.offer(&old).unwrap_err().contains("and a newer one was accepted before"));
    site.fleet.subs[0].daemon.kill().unwrap();
    site.fleet.subs[0].daemon.start_again().unwrap();
    site.fleet.wait_ready().unwrap();
    assert!(thief.offer(&old).unwrap_err().contains("and a newer one was accepted before"));
    let order = thief.order(&old);
    thief.expect_refused(&order, "no signatures of web/1 were offered");
    site.expect("2");
    assert_eq!(site.services(), services, "no service was touched");

    // The honest update passes, by an honest dominator.
    drop(thief);
    site.fleet.dominator.start_again().unwrap();
    site.fleet.wait_ready().unwrap();
    site.converge("web/4");
    site.expect("4");
    // Whoever has the keys sends the machine back: by signing the old image again.
    let image = site.image("web/1");
    site.put("web/1", vec![site.signature("alice", &image, now + 60)]);
    site.put("web/1", vec![site.signature("bob", &image, now + 60)]);
    site.converge("web/1");
    site.expect("1");
    // What drifts is repaired, as ever.
    fs::write(site.root().join("program"), "evil").unwrap();
    eventually("the program is repaired", || site.file("program") == "program of 1");
    site.fleet.stop().unwrap();
}

#[test]
fn a_computed_file_lends_its_content_to_nothing_that_is_signed() {
    let mut site = Site::start();
    site.fleet.dominator.stop().unwrap();
    // The content of `/etc/motd` is not signed; that of `/program` is.
    site.add("evil/1", "evil", false);
    fs::write(site.at("tree/etc/motd"), "placeholder").unwrap();
    fs::write(site.at("computed"), "/etc/motd files:6972\n").unwrap();
    site.add_computed("web/1", "1");
    site.sign_elsewhere("web/1");
    let mut thief = Thief::of(&site);
    let image = thief.required("web/1");
    let program = TreePath::new("/program").unwrap();
    let signed = image.tree.file(&program).unwrap();
    let evil = thief.required("evil/1").tree.file(&program).unwrap();
    thief.offer(&image).unwrap();
    // First it gets content that is signed for another path: it may have any.
    let order = thief.order_with(&image, &signed);
    thief.carry_out(&order);
    assert_eq!(site.file("etc/motd"), "program of 1");
    site.expect("1");
    // Then that other path becomes a name of it, and it gets what nobody has signed.
    let motd = TreePath::new("/etc/motd").unwrap();
    let mut order = thief.order_with(&image, &evil);
    let link = || replace("/program", Leaf::HardLink(motd.clone()));
    let content = replace("/etc/motd", Leaf::File(evil.clone()));
    *operations(&mut order) = vec![link(), content.clone()];
    let refused = thief.call::<Prepare>(&order).unwrap_err();
    assert_eq!(refused.code(), Some(FaultCode::BadRequest), "{refused:?}");
    let refused = model::display::error_chain(&refused);
    assert!(
        refused.contains("invalid operation on /program: its target is not a file"),
        "{refused}"
    );
    *operations(&mut order) = vec![content, link()];
    thief.expect_refused(&order, "/program would not be as it is signed (");
    site.expect("1");
    drop(thief);
    site.fleet.stop().unwrap();
}
