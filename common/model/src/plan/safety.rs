//! Finds updates that are too dangerous without an operator's permission.
//!
//! The wrong image, an image made from a half-mounted disk, or an image without the agent would
//! otherwise be installed on the whole fleet.

use crate::path::TreePath;
use crate::plan::Plan;
use crate::tree::{Child, Tree};

/// Machines with fewer scanned entries than this are being installed: everything may change.
pub const ENTRIES_MIN: u64 = 100;

/// Groups of paths: if a machine has one path of a group it must keep one of them.
const VITAL: [(&str, &[&str]); 4] = [
    (
        "the running subd",
        &[
            "/usr/sbin/subd",
            "/usr/local/sbin/subd",
            "/usr/bin/subd",
            "/usr/local/bin/subd",
            "/sbin/subd",
        ],
    ),
    (
        "the unit of subd",
        &[
            "/etc/systemd/system/subd.service",
            "/usr/lib/systemd/system/subd.service",
            "/lib/systemd/system/subd.service",
            "/etc/init.d/subd",
        ],
    ),
    ("the configuration and keys of subd", &["/etc/subd", "/etc/dominator/tls"]),
    (
        "the only init",
        &[
            "/sbin/init",
            "/usr/sbin/init",
            "/usr/lib/systemd/systemd",
            "/lib/systemd/systemd",
            "/bin/systemd",
        ],
    ),
];

/// How much of a machine an image covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All that its filter does not keep.
    Whole,
    /// Its own paths.
    Sparse,
    /// Its own paths, and those of bundles that leave.
    Leaving,
}

/// Returns why `plan`, which turns `have` into `want`, is unsafe; empty if it is safe.
#[must_use]
pub fn dangers(have: &Tree, want: &Tree, plan: &Plan, extent: Extent) -> Vec<String> {
    let mut dangers = Vec::new();
    let (has, wants) = (have.root().totals().entries, want.root().totals().entries);
    let removals = plan.removals();
    if has >= ENTRIES_MIN {
        if removals.saturating_mul(2) > has && extent != Extent::Leaving {
            dangers.push(format!("it would remove {removals} of {has} entries"));
        }
        if extent == Extent::Whole && wants.saturating_mul(2) < has {
            dangers.push(format!("the image has {wants} entries, the machine {has}"));
        }
    }
    for (what, paths) in VITAL {
        let paths: Vec<TreePath> = paths
            .iter()
            .map(|path| path.parse().expect("the paths of the table are paths"))
            .collect();
        let loses = |path: &&TreePath| have.get(path).is_some();
        let keeps = paths.iter().any(|path| want.get(path).is_some());
        if let Some(path) = paths.iter().find(loses)
            && !keeps
        {
            dangers.push(format!("it would take away {what} ({path})"));
        }
    }
    if let (Some(kernel), None) = (kernel(have), kernel(want)) {
        dangers.push(format!("it would take away the only kernel ({kernel})"));
    }
    dangers
}

/// A kernel in `/boot`.
fn kernel(tree: &Tree) -> Option<TreePath> {
    let boot: TreePath = "/boot".parse().expect("the constant is a path");
    let Some(Child::Directory(directory)) = tree.get(&boot) else { return None };
    let entry =
        directory.entries().iter().find(|entry| entry.name.as_bytes().starts_with(b"vmlinuz"))?;
    boot.join(entry.name.as_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Algorithm;
    use crate::plan::{Action, Difference, Operation};
    use crate::tree::text::from_text;

    fn tree(files: usize, more: &[&str]) -> Tree {
        let zero = Algorithm::Blake3.digest(b"");
        let mut text = String::new();
        for number in 0..files {
            text.push_str(&format!("f 644 0:0 0.000000000 0 {zero} /f{number:04}\n"));
        }
        let mut directories = std::collections::BTreeSet::new();
        for path in more {
            let path: TreePath = path.parse().unwrap();
            directories.extend(path.ancestors().skip(1).filter(|path| !path.is_root()));
        }
        for directory in &directories {
            text.push_str(&format!("d 755 0:0 {directory}\n"));
        }
        for path in more {
            text.push_str(&format!("f 644 0:0 0.000000000 0 {zero} {path}\n"));
        }
        from_text(Algorithm::Blake3, &text).unwrap()
    }

    fn removing(count: usize) -> Plan {
        let remove = |number: usize| Operation {
            path: format!("/f{number:04}").parse().unwrap(),
            action: Action::Remove,
            reason: vec![Difference::Extra],
        };
        Plan { operations: (0..count).map(remove).collect(), blocked: Vec::new() }
    }

    #[test]
    fn half_a_machine_is_not_thrown_away_unasked() {
        #[rustfmt::skip]
        let table = [
            // have, want, removed, extent, dangers
            (200, 100, 100, Extent::Whole, vec![]),
            (200, 100, 101, Extent::Whole, vec!["it would remove 101 of 200 entries"]),
            (200,  99, 100, Extent::Whole, vec!["the image has 99 entries, the machine 200"]),
            (200,  10, 190, Extent::Whole, vec!["it would remove 190 of 200 entries",
                                        "the image has 10 entries, the machine 200"]),
            (200,  10,   0, Extent::Sparse,  vec![]),
            (200,   1, 199, Extent::Leaving, vec![]),
            ( 99,   0,  99, Extent::Whole, vec![]),
            (  0, 500,   0, Extent::Whole, vec![]),
        ];
        for (have, want, removed, extent, expected) in table {
            let got = dangers(&tree(have, &[]), &tree(want, &[]), &removing(removed), extent);
            assert_eq!(got, expected, "have {have}, want {want}, removed {removed}");
        }
    }

    #[test]
    fn the_agent_the_init_and_the_kernel_stay() {
        #[rustfmt::skip]
        let table: [(&[&str], &[&str], &[&str]); 8] = [
            (&["/usr/sbin/subd"], &[], &["it would take away the running subd (/usr/sbin/subd)"]),
            (&["/usr/sbin/subd"], &["/usr/local/sbin/subd"], &[]),
            (&[], &["/usr/sbin/subd"], &[]),
            (&["/etc/systemd/system/subd.service"], &[],
             &["it would take away the unit of subd (/etc/systemd/system/subd.service)"]),
            (&["/etc/dominator/tls/key.pem"], &[],
             &["it would take away the configuration and keys of subd (/etc/dominator/tls)"]),
            (&["/sbin/init"], &["/etc/x"], &["it would take away the only init (/sbin/init)"]),
            (&["/boot/vmlinuz-6.1", "/boot/vmlinuz-6.2"], &["/boot/vmlinuz-6.3"], &[]),
            (&["/boot/vmlinuz-6.1"], &["/boot/grub"],
             &["it would take away the only kernel (/boot/vmlinuz-6.1)"]),
        ];
        for (have, want, expected) in table {
            let got = dangers(&tree(5, have), &tree(5, want), &Plan::default(), Extent::Whole);
            assert_eq!(got, expected, "have {have:?}, want {want:?}");
        }
    }
}
