//! Checks a new image before anything is sent: refuses it or warns its maker.
//!
//! Trees that no machine could equal are refused by [`model::image::Content::verify`], here and on
//! the server. The checks here apply only to images for whole machines: paths that every machine
//! needs, and files that differ on each machine. Sparse images touch only their own paths, so they
//! pass both.
// tidy: core

use std::str::FromStr;

use model::filter::Filter;
use model::machine_specific::{MACHINE_SPECIFIC, MachineSpecific};
use model::path::{PathError, TreePath};
use model::tree::{Child, Leaf, Tree};

/// The paths that an image for whole machines must have by default.
pub const REQUIRED_PATHS: &str = "/etc,/etc/passwd,/usr,/usr/bin";

/// Paths without which an image is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequiredPaths(Vec<TreePath>);

impl FromStr for RequiredPaths {
    type Err = PathError;

    /// Parses paths that are separated by commas; an empty text gives no paths.
    fn from_str(text: &str) -> Result<Self, PathError> {
        let paths = text.split(',').map(str::trim).filter(|path| !path.is_empty());
        paths.map(TreePath::new).collect::<Result<_, _>>().map(Self)
    }
}

/// The image lacks required paths.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the image has no {}, which every machine needs", listed(.missing))]
pub struct RequiredError {
    /// The required paths that are missing.
    pub missing: Vec<TreePath>,
    /// The only top-level directory, if it looks like the root of a system.
    pub nested: Option<TreePath>,
}

/// Refuses a tree for whole machines that lacks a required path which its filter does not keep.
pub fn check_required_paths(
    tree: &Tree,
    filter: Option<&Filter>,
    required: &RequiredPaths,
) -> Result<(), RequiredError> {
    let Some(filter) = filter else { return Ok(()) };
    let is_missing = |path: &&TreePath| !filter.keeps(path) && !exists(tree, path);
    let missing: Vec<TreePath> = required.0.iter().filter(is_missing).cloned().collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(RequiredError { missing, nested: nested(tree) })
}

/// Returns true if something is at `path`; symlinks on the way are not followed.
fn exists(tree: &Tree, path: &TreePath) -> bool {
    path.is_root() || tree.get(path).is_some()
}

/// Returns the only top-level directory if it contains the system, as in an archive that was made
/// one level too high.
fn nested(tree: &Tree) -> Option<TreePath> {
    let [only] = tree.root().entries() else { return None };
    let Child::Directory(directory) = &only.child else { return None };
    directory.get(b"etc")?;
    TreePath::root().join(only.name.as_bytes()).ok()
}

/// Warnings about an image, with filter lines that would prevent them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Warnings {
    pub warnings: Vec<String>,
    pub filter_lines: Vec<String>,
}

impl Warnings {
    /// Adds what `other` says.
    pub fn extend(&mut self, other: Self) {
        self.warnings.extend(other.warnings);
        self.filter_lines.extend(other.filter_lines);
    }
}

/// Returns warnings about effects of the image on machines that are probably not intended. `tree`
/// no longer contains what the filter keeps.
pub fn warnings(tree: &Tree, filter: Option<&Filter>) -> Warnings {
    let mut warnings = Warnings::default();
    let Some(filter) = filter else { return warnings };
    let (mut given, mut lost) = (Vec::new(), Vec::new());
    for one in MACHINE_SPECIFIC.iter().filter(|one| one.is_expected) {
        let path = |text: &str| TreePath::new(text).expect("the table has paths");
        let probe = path(one.probe);
        let is_out_of_reach =
            || filter.keeps(&probe) || one.with.is_some_and(|with| !exists(tree, &path(with)));
        let entries = entries_of(tree, one, &probe);
        let is_computed = |child: &Child| matches!(child, Child::Leaf(Leaf::Computed(_)));
        // Where some of several files are computed, a line for all would keep those too, and the
        // image would be refused.
        let (entry, shown, line) = match entries.iter().any(is_computed) {
            true => (tree.get(&probe), one.probe.to_owned(), format!("{}$", escaped(one.probe))),
            false => (entries.into_iter().next(), one.shown.to_owned(), one.line.to_owned()),
        };
        match entry.map_or(Shipped::Absent, |child| shipped(&child, one)) {
            Shipped::Common => continue,
            Shipped::Absent if is_out_of_reach() => continue,
            Shipped::OwnVersion => given.push(shown),
            Shipped::Absent => lost.push(shown),
        }
        warnings.filter_lines.push(line);
    }
    if !given.is_empty() {
        let text = format!("every machine would get the image's {}", given.join(", "));
        warnings.warnings.push(text);
    }
    if !lost.is_empty() {
        let text = format!("every machine would lose its own {}", lost.join(", "));
        warnings.warnings.push(text);
    }
    for (directory, line) in [("/proc", "/proc/.*"), ("/sys", "/sys/.*")] {
        let path = TreePath::new(directory).expect("the constants are paths");
        let below = match tree.get(&path) {
            Some(Child::Directory(directory)) => directory.totals().entries,
            _ => 0,
        };
        if below > 0 {
            warnings.warnings.push(format!(
                "{directory} is not empty: was the image made of a running system? Machines would \
                 get these files below what the kernel mounts there"
            ));
            warnings.filter_lines.push(line.to_owned());
        }
    }
    warnings
}

/// What an image has of a file that differs on each machine.
enum Shipped {
    /// It has an entry that is right for all machines: a symlink or a computed file.
    Common,
    /// It has a file of its own.
    OwnVersion,
    /// It has none.
    Absent,
}

fn shipped(child: &Child, machine_specific: &MachineSpecific) -> Shipped {
    match child {
        Child::Leaf(Leaf::Symlink(_) | Leaf::Computed(_)) => Shipped::Common,
        // An image that contains a configuration of subd does so on purpose.
        _ if machine_specific.shown == "/etc/subd/*" => Shipped::Common,
        _ => Shipped::OwnVersion,
    }
}

/// Returns the entries that `machine_specific` is about, sorted by path.
fn entries_of(tree: &Tree, machine_specific: &MachineSpecific, probe: &TreePath) -> Vec<Child> {
    let Some(prefix) = machine_specific.shown.strip_suffix('*') else {
        return tree.get(probe).into_iter().collect();
    };
    let parent = probe.parent().unwrap_or_else(TreePath::root);
    let Some(Child::Directory(directory)) = tree.get(&parent) else { return Vec::new() };
    let start = prefix.rsplit('/').next().unwrap_or(prefix).as_bytes();
    let entries = directory.entries().iter();
    let matching = entries.filter(|entry| entry.name.as_bytes().starts_with(start));
    matching.map(|entry| entry.child.clone()).collect()
}

/// Returns the expression for `path`, whose only special characters are dots.
fn escaped(path: &str) -> String {
    path.replace('.', "\\.")
}

fn listed(paths: &[TreePath]) -> String {
    let paths: Vec<String> = paths.iter().map(TreePath::to_string).collect();
    paths.join(", ")
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;
    use model::tree::text::from_text;

    use super::*;

    fn tree(text: &str) -> Tree {
        let empty = format!("0.000000000 0 {}", Algorithm::Blake3.digest(b""));
        from_text(Algorithm::Blake3, &text.replace("EMPTY", &empty)).unwrap()
    }

    const SYSTEM: &str = "\
d 755 0:0 /etc
f 644 0:0 EMPTY /etc/fstab
f 644 0:0 EMPTY /etc/hostname
g 644 0:0 files:6972 /etc/machine-id
f 644 0:0 EMPTY /etc/passwd
d 755 0:0 /etc/ssh
f 600 0:0 EMPTY /etc/ssh/ssh_host_rsa_key
d 755 0:0 /etc/subd
f 600 0:0 EMPTY /etc/subd/config.toml
d 755 0:0 /proc
d 755 0:0 /usr
d 755 0:0 /usr/bin
";

    #[test]
    fn an_image_for_whole_machines_has_what_they_need() {
        let required: RequiredPaths = REQUIRED_PATHS.parse().unwrap();
        let none: Filter = Filter::new::<&str>([]).unwrap();
        let check = |tree: &Tree, filter: &Filter| {
            let checked = check_required_paths(tree, Some(filter), &required);
            checked.map_err(|error| (error.to_string(), error.nested))
        };
        assert_eq!(check(&tree(SYSTEM), &none), Ok(()));
        let partly = tree("d 755 0:0 /etc\nd 755 0:0 /usr\n");
        let text = "the image has no /etc/passwd, /usr/bin, which every machine needs".to_owned();
        assert_eq!(check(&partly, &none), Err((text, None)));
        // What machines keep the image need not have.
        assert_eq!(check(&partly, &Filter::new(["/etc/passwd", "/usr/.*"]).unwrap()), Ok(()));
        let nested = tree("d 755 0:0 /root\nd 755 0:0 /root/etc\n");
        let (_, place) = check(&nested, &none).unwrap_err();
        assert_eq!(place, Some("/root".parse().unwrap()));
        assert_eq!(check_required_paths(&nested, None, &required), Ok(()));
        assert_eq!(check_required_paths(&nested, Some(&none), &"".parse().unwrap()), Ok(()));
        assert!("etc".parse::<RequiredPaths>().is_err());
    }

    #[test]
    fn what_is_another_on_each_machine_is_told_with_the_line_to_add() {
        let none: Filter = Filter::new::<&str>([]).unwrap();
        let found = warnings(&tree(SYSTEM), Some(&none));
        assert_eq!(
            found.warnings,
            [
                "every machine would get the image's /etc/fstab, /etc/hostname, \
                 /etc/ssh/ssh_host_*",
                "every machine would lose its own /etc/dominator/tls/*",
            ]
        );
        let lines =
            ["/etc/fstab$", "/etc/hostname$", "/etc/ssh/ssh_host_.*", "/etc/dominator/tls$"];
        assert_eq!(found.filter_lines, lines);
        let filter = Filter::new(lines).unwrap();
        let without = tree(SYSTEM).without(|path| filter.keeps(path)).unwrap();
        assert_eq!(warnings(&without, Some(&filter)), Warnings::default());
        // One key of several is kept.
        let few = ["/etc/[^s].*", "/etc/subd$", "/etc/ssh/ssh_host_ed25519_key$"];
        let few = Filter::new(few).unwrap();
        let keys = "every machine would get the image's /etc/ssh/ssh_host_*".to_owned();
        let bare =
            tree("d 755 0:0 /etc\nd 755 0:0 /etc/ssh\nf 600 0:0 EMPTY /etc/ssh/ssh_host_key\n");
        assert_eq!(warnings(&bare, Some(&few)).warnings, [keys]);
        assert_eq!(warnings(&tree(SYSTEM), None), Warnings::default());
    }

    #[test]
    fn where_some_files_are_computed_the_advice_is_about_the_others() {
        let warned = |files: &str, lines: &[&str]| {
            let tree = tree(&format!(
                "d 755 0:0 /etc\nd 755 0:0 /etc/dominator\nd 755 0:0 /etc/dominator/tls\n\
                 g 644 0:0 files:6972 /etc/dominator/tls/ca.pem\n{files}"
            ));
            let others = ["/etc/[^d].*"].iter().chain(lines);
            warnings(&tree, Some(&Filter::new(others).unwrap()))
        };
        let key = "f 600 0:0 EMPTY /etc/dominator/tls/key.pem\n";
        let advice = |warning: &str| Warnings {
            warnings: vec![warning.to_owned()],
            filter_lines: vec!["/etc/dominator/tls/key\\.pem$".to_owned()],
        };
        let lost = advice("every machine would lose its own /etc/dominator/tls/key.pem");
        assert_eq!(warned("", &[]), lost);
        let given = advice("every machine would get the image's /etc/dominator/tls/key.pem");
        assert_eq!(warned(key, &[]), given);
        assert_eq!(warned("", &["/etc/dominator/tls/key\\.pem$"]), Warnings::default());
        let computed = key.replace("f 600 0:0 EMPTY", "g 600 0:0 files:6972");
        assert_eq!(warned(&computed, &[]), Warnings::default());
    }

    #[test]
    fn the_lines_that_are_advised_end_the_warnings() {
        let all = Filter::new(MACHINE_SPECIFIC.iter().map(|one| one.line)).unwrap();
        let bare = tree("d 755 0:0 /etc\nd 755 0:0 /proc\nf 644 0:0 EMPTY /proc/1\n");
        let found = warnings(&bare, Some(&all));
        assert_eq!(found.filter_lines, ["/proc/.*"]);
        let none = Filter::new::<&str>([]).unwrap();
        let lost = &warnings(&bare, Some(&none)).warnings[0];
        assert_eq!(
            lost,
            "every machine would lose its own /etc/fstab, /etc/hostname, /etc/machine-id, \
             /etc/dominator/tls/*, /etc/subd/*"
        );
    }
}
