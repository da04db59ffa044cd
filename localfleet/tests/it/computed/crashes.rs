//! A subd is killed in updates that bring another image and other computed content: the dominator
//! brings the machine to `synced` all the same. subd's own tests kill it at each system call.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use localfleet::fleet::daemon_process::Daemon;
use testing::eventually;

use super::{Generators, SECRET, Scenario, add, require, wait_for_content};
use crate::converges::CONVERGE_MAX;
use crate::trees;

/// How long after the update has a journal subd is killed, in milliseconds.
const DELAYS: [u64; 6] = [0, 2, 5, 10, 20, 40];

/// A fleet of one machine. Its updates change many files, and the content of a computed one.
struct Lab {
    scenario: Scenario,
    directory: PathBuf,
    /// The number of updates.
    updates: usize,
    _filegen: Daemon,
}

impl Lab {
    fn start(directory: &Path) -> Self {
        let scenario = Scenario::start(1);
        let source = scenario.fleet.addresses().filegen.to_string();
        let generators = Generators::make(&directory.join("filegen"), &source);
        for version in [1, 2] {
            let tree = directory.join(version.to_string());
            trees::make(&tree, version);
            for name in ["etc/resolv.conf", "etc/site.key"] {
                fs::write(tree.join(name), "a placeholder").unwrap();
            }
            add(&scenario, &format!("test/{version}"), &tree, &generators.list);
        }
        let filegen = scenario.fleet.start_filegen(&generators.config).unwrap();
        let directory = directory.to_owned();
        Self { scenario, directory, updates: 0, _filegen: filegen }
    }

    /// The version of the image of the last update.
    fn version(&self) -> usize {
        1 + self.updates % 2
    }

    /// Orders the other image, and a location that no update had before.
    fn order(&mut self) {
        self.updates += 1;
        let image = format!("test/{}", self.version());
        require(&self.scenario, &image, &[&format!("location-{}", self.updates)]);
    }

    /// Waits until the machine is synced, and fails unless it has the image with its content.
    fn verify(&mut self) {
        let version = self.version();
        let content = format!("# first\nsearch location-{}.example\n", self.updates);
        // The content may follow the image as a change of its own.
        wait_for_content(&self.scenario, &[&content]);
        let image = format!("test/{version}");
        self.scenario.fleet.wait_synced(&image, CONVERGE_MAX, |_| {}).unwrap();
        let tree = self.directory.join(version.to_string());
        for (name, content) in [("etc/resolv.conf", &*content), ("etc/site.key", SECRET)] {
            fs::write(tree.join(name), content).unwrap();
            // The times of computed files are not managed.
            let of_machine = fs::metadata(self.scenario.fleet.subs[0].root.join(name)).unwrap();
            let file = fs::File::options().write(true).open(tree.join(name)).unwrap();
            file.set_modified(of_machine.modified().unwrap()).unwrap();
        }
        self.scenario.verify(&tree);
    }

    /// Carries out an update in which subd is killed. Returns whether it left a journal.
    fn survive(&mut self, delay: Duration) -> bool {
        let sub = &self.scenario.fleet.subs[0];
        let journal = sub.root.join(".subd/journal");
        let has_journal = || fs::read_dir(&journal).unwrap().next().is_some();
        self.order();
        let sub = &mut self.scenario.fleet.subs[0];
        eventually("the update has a journal", || has_journal().then_some(()).ok_or("not yet"));
        std::thread::sleep(delay);
        sub.daemon.kill().unwrap();
        let was_inside = has_journal();
        sub.daemon.start_again().unwrap();
        self.verify();
        was_inside
    }
}

#[test]
fn a_machine_whose_subd_is_killed_in_an_update_with_computed_content_ends_synced() {
    let directory = tempfile::tempdir().unwrap();
    let mut lab = Lab::start(directory.path());
    lab.order();
    lab.verify();
    let inside = DELAYS.map(|delay| lab.survive(Duration::from_millis(delay)));
    println!("killed while there was a journal: {inside:?}");
    assert!(inside.contains(&true));
}
