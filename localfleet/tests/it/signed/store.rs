//! A stolen image server: somebody has written into its store.

use api::dominator::Status;
use imageserver::store::layout::{IMAGES, OBJECTS, image_path, object_path};
use imageserver::store::record::Record;
use model::image::{Content, Notes};
use testing::eventually;

use super::*;

impl Site {
    fn record_path(&self, image: &str) -> PathBuf {
        self.at("imageserver").join(IMAGES).join(image_path(&name(image)))
    }

    fn record(&self, image: &str) -> Record {
        Record::decode(&fs::read(self.record_path(image)).unwrap()).unwrap()
    }

    /// Stops the image server and the dominator, which remembers images; has somebody change the
    /// store; and starts both again.
    fn meanwhile(&mut self, change: impl FnOnce(&Self)) {
        self.fleet.dominator.stop().unwrap();
        self.fleet.imageserver.stop().unwrap();
        change(self);
        self.fleet.imageserver.start_again().unwrap();
        self.fleet.dominator.start_again().unwrap();
        self.fleet.wait_ready().unwrap();
    }

    /// Puts another record in the place of that of `image`.
    fn forge(&mut self, image: &str, record: &Record) {
        let bytes = record.encode().unwrap();
        self.meanwhile(|site| fs::write(site.record_path(image), bytes).unwrap());
    }

    /// Has an operator believe the other content of `image`: the dominator does not by itself.
    fn accept(&mut self, image: &str) {
        self.wait_for(Status::ImageNotReady, "image-changed: ");
        let accepted = self.fleet.domtool(&["accept-image", image, "--why", "deceived"]).unwrap();
        assert!(accepted.status.success(), "{accepted:?}");
    }

    /// Waits until the dominator says that the machine is so, and gives the detail.
    fn wait_for(&mut self, status: Status, detail: &str) {
        eventually(&format!("a machine is {status}: {detail}"), || {
            self.fleet.check().unwrap();
            let subs = self.fleet.statuses().unwrap_or_default();
            let found = subs.iter().any(|sub| sub.status == status && sub.detail.contains(detail));
            found.then_some(()).ok_or(subs)
        });
    }
}

#[test]
fn a_stolen_image_server_installs_nothing_that_is_not_signed() {
    let mut site = Site::start();
    site.add_signed("web/1", "1");
    site.converge("web/1");
    site.add_signed("web/2", "2");
    site.add("evil/2", "evil", false);
    let (honest, evil) = (site.record("web/2"), site.record("evil/2"));
    let services = site.services();
    site.fleet.require(Some("web/2")).unwrap();
    site.fleet.wait_synced("web/2", CONVERGE_MAX, |_| {}).unwrap();
    let after = site.services();
    assert_ne!(services, after);
    site.add_signed("web/3", "3");
    let third = site.record("web/3");

    // Another tree under the name that is wanted, with the signatures of the honest one.
    let forged = |content: Content, notes: Notes| Record {
        image: Image { content, notes },
        totals: evil.totals,
    };
    let content = Content { name: name("web/3"), ..evil.image.content.clone() };
    site.forge("web/3", &forged(content, third.image.notes.clone()));
    site.fleet.require(Some("web/3")).unwrap();
    site.wait_for(Status::SignatureRefused, "web/3 has 0 of 2 signatures that count");
    site.expect("2");

    // The same tree with other triggers; and with another filter.
    let more = TRIGGERS.replace("/etc/.*", "/.*");
    let triggers = model::trigger::Triggers::from_json(&more).unwrap();
    let content = Content { triggers, ..third.image.content.clone() };
    site.forge("web/3", &forged(content, third.image.notes.clone()));
    site.accept("web/3");
    site.wait_for(Status::SignatureRefused, "web/3 has 0 of 2 signatures that count");
    let filter = Some(model::filter::Filter::new(["/var/log/.*", "/etc/.*"]).unwrap());
    let tree = Content { filter, ..third.image.content.clone() };
    site.forge("web/3", &forged(tree, third.image.notes.clone()));
    // The tree itself does not fit that filter, so the dominator refuses first.
    site.wait_for(Status::ImageNotReady, "");

    // No signatures; those of one key; those of the image before.
    let with = |signatures: Vec<Signature>| {
        let notes = Notes { signatures, ..third.image.notes.clone() };
        Record { image: Image { content: third.image.content.clone(), notes }, ..third.clone() }
    };
    let (of_third, of_second) = (&third.image.notes.signatures, &honest.image.notes.signatures);
    site.forge("web/3", &with(Vec::new()));
    site.accept("web/3");
    site.wait_for(Status::SignatureRefused, "no signatures of web/3 were offered");
    site.forge("web/3", &with(of_third[..1].to_vec()));
    site.wait_for(Status::SignatureRefused, "web/3 has 1 of 2 signatures that count");
    site.forge("web/3", &with(of_second.clone()));
    site.wait_for(Status::SignatureRefused, "it is about the image web/2");
    // Old signatures of the right image: it is older than what the machine has.
    let old = ["alice", "bob"].map(|who| site.signature(who, &third.image, 1_000));
    site.forge("web/3", &with(old.to_vec()));
    site.wait_for(Status::SignatureRefused, "and a newer one was accepted before (web/2");

    // A directory of the tree is another one. Neither server nor dominator takes it for what it
    // is called; nor does subd, which is shown in its own tests.
    let root = third.image.content.root;
    let place = site.at("imageserver").join(OBJECTS).join(object_path(&root));
    let bytes = fs::read(&place).unwrap();
    let other =
        fs::read(site.at("imageserver").join(OBJECTS).join(object_path(&evil.image.content.root)));
    let record = third.encode().unwrap();
    site.meanwhile(|site| {
        fs::write(&place, other.unwrap()).unwrap();
        fs::write(site.record_path("web/3"), &record).unwrap();
    });
    site.wait_for(Status::ImageNotReady, "");
    site.expect("2");
    assert_eq!(site.services(), after, "no service was touched");

    // The honest store is back.
    site.meanwhile(|site| {
        fs::write(&place, &bytes).unwrap();
        fs::write(site.record_path("web/3"), &record).unwrap();
    });
    site.fleet.wait_synced("web/3", CONVERGE_MAX, |_| {}).unwrap();
    site.expect("3");
    site.fleet.stop().unwrap();
}
