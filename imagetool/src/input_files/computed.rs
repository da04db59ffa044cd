//! Computed files: paths of an image whose content a filegen-server makes for each machine.
//!
//! The tree has a regular file in the place of each, whose mode, owner and attributes the computed
//! file takes over. Its content is ignored.
// tidy: core

use std::collections::BTreeMap;

use model::filter::Filter;
use model::image::ComputedRule;
use model::path::{PathError, TreePath};
use model::tree::{Child, Computed, Leaf, Metadata, Node, Tree, TreeBuilder, TreeError};
use rpc::client::{Peer, PeerError};

/// The port of a filegen-server, if a rule gives none.
pub const FILEGEN_PORT: u16 = 6972;

/// An invalid list of computed files.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ComputedError {
    #[error("line {line}: `{text}` is not PATH HOST:PORT")]
    Line { line: usize, text: String },
    #[error("line {line}")]
    Path { line: usize, source: PathError },
    #[error("line {line}")]
    Source { line: usize, source: PeerError },
    #[error("line {line}: {path} is named in line {first} already")]
    Duplicate { line: usize, path: TreePath, first: usize },
    #[error("line {line}: {path} is kept by the filter, in its line `{pattern}`")]
    Kept { line: usize, path: TreePath, pattern: String },
    #[error("line {line}: {path} is not in the tree")]
    Missing { line: usize, path: TreePath },
    #[error("line {line}: {path} is not in the tree: {above} is a {kind}")]
    NoDirectory { line: usize, path: TreePath, above: TreePath, kind: &'static str },
    #[error("line {line}: {path} is a {kind}, not a regular file")]
    NoFile { line: usize, path: TreePath, kind: &'static str },
    #[error("line {line}: {path} has several hard links, such as {link}")]
    Linked { line: usize, path: TreePath, link: TreePath },
    #[error("the computed files do not fit into the tree")]
    Tree { source: TreeError },
}

/// The computed files of a new image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ComputedRules(Vec<NumberedRule>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct NumberedRule {
    /// The number of the line, from 1.
    line: usize,
    rule: ComputedRule,
}

impl ComputedRules {
    /// Reads lines `PATH HOST:PORT`; empty lines and those that start with `#` are skipped.
    pub fn from_text(text: &str) -> Result<Self, ComputedError> {
        let mut rules: Vec<NumberedRule> = Vec::new();
        let mut lines: BTreeMap<TreePath, usize> = BTreeMap::new();
        for (index, content) in text.lines().enumerate() {
            let line = index + 1;
            let content = content.trim();
            if content.is_empty() || content.starts_with('#') {
                continue;
            }
            let bad = || ComputedError::Line { line, text: content.to_owned() };
            // A path may have spaces; an address cannot.
            let (path, source) = content.rsplit_once(char::is_whitespace).ok_or_else(bad)?;
            let path = TreePath::new(path.trim_end())
                .map_err(|source| ComputedError::Path { line, source })?;
            let source = Peer::parse(source, FILEGEN_PORT)
                .map_err(|source| ComputedError::Source { line, source })?
                .authority();
            if let Some(first) = lines.insert(path.clone(), line) {
                return Err(ComputedError::Duplicate { line, path, first });
            }
            rules.push(NumberedRule { line, rule: ComputedRule { path, source } });
        }
        Ok(Self(rules))
    }

    /// Returns `tree` with these computed files. `filter` is that of the image, and `tree` no
    /// longer has what it keeps. A file that is computed already gets the new source.
    pub fn apply(&self, tree: &Tree, filter: Option<&Filter>) -> Result<Tree, ComputedError> {
        let links = if self.0.is_empty() { BTreeMap::new() } else { links(tree) };
        let mut computed = BTreeMap::new();
        for NumberedRule { line, rule: ComputedRule { path, source } } in &self.0 {
            if let Some(pattern) = filter.and_then(|filter| keeping_line(filter, path)) {
                return Err(ComputedError::Kept { line: *line, path: path.clone(), pattern });
            }
            if let Some(link) = links.get(path) {
                let (path, link) = (path.clone(), link.clone());
                return Err(ComputedError::Linked { line: *line, path, link });
            }
            let metadata = placeholder(tree, path, *line)?;
            computed.insert(path.clone(), Computed { metadata, source: source.clone() });
        }
        with_computed(tree, computed).map_err(|source| ComputedError::Tree { source })
    }
}

/// Returns `tree` with those of the computed files for which it has a regular file of one name.
pub fn apply_to_files(rules: &[ComputedRule], tree: &Tree) -> Result<Tree, TreeError> {
    let links = if rules.is_empty() { BTreeMap::new() } else { links(tree) };
    let computed = rules.iter().filter_map(|ComputedRule { path, source }| match tree.get(path) {
        Some(Child::Leaf(Leaf::File(file))) if !links.contains_key(path) => {
            let (metadata, source) = (file.metadata, source.clone());
            Some((path.clone(), Computed { metadata, source }))
        }
        _ => None,
    });
    with_computed(tree, computed.collect())
}

/// Returns the metadata that a computed file at `path` takes over.
fn placeholder(tree: &Tree, path: &TreePath, line: usize) -> Result<Metadata, ComputedError> {
    let path = path.clone();
    match tree.get(&path) {
        Some(Child::Leaf(Leaf::File(file))) => Ok(file.metadata),
        Some(Child::Leaf(Leaf::Computed(computed))) => Ok(computed.metadata),
        Some(child) => Err(ComputedError::NoFile { line, path, kind: child.node().kind() }),
        None => {
            let leaf = path.ancestors().skip(1).find_map(|above| match tree.get(&above) {
                Some(Child::Leaf(leaf)) => Some((above, Node::Leaf(leaf).kind())),
                _ => None,
            });
            Err(match leaf {
                Some((above, kind)) => ComputedError::NoDirectory { line, path, above, kind },
                None => ComputedError::Missing { line, path },
            })
        }
    }
}

/// Returns the first line of `filter` that keeps `path`.
fn keeping_line(filter: &Filter, path: &TreePath) -> Option<String> {
    let keeps = |line: &&String| Filter::new([line]).is_ok_and(|one| one.keeps(path));
    if filter.keeps(path) { filter.lines().iter().find(keeps).cloned() } else { None }
}

/// Returns another name for each path that has several.
fn links(tree: &Tree) -> BTreeMap<TreePath, TreePath> {
    let mut links = BTreeMap::new();
    for (link, node) in tree.nodes() {
        if let Node::Leaf(Leaf::HardLink(file)) = node {
            links.entry(file.clone()).or_insert_with(|| link.clone());
            links.insert(link, file);
        }
    }
    links
}

/// Returns `tree` with `computed` in the place of files.
fn with_computed(
    tree: &Tree,
    mut computed: BTreeMap<TreePath, Computed>,
) -> Result<Tree, TreeError> {
    if computed.is_empty() {
        return Ok(tree.clone());
    }
    let mut builder = TreeBuilder::new(tree.algorithm());
    for (path, node) in tree.nodes() {
        let replaced = computed.remove(&path).map(|file| Node::Leaf(Leaf::Computed(file)));
        builder.insert(path, replaced.unwrap_or(node))?;
    }
    builder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::object::Algorithm;
    use model::tree::text;

    const TREE: &str = "\
d 755 0:0 /
d 755 0:0 /etc
f 600 0:7 0.000000000 0 EMPTY /etc/a
h /etc/b -> /etc/a
f 600 0:7 0.000000000 0 EMPTY /etc/c
f 640 1:2 0.000000000 0 EMPTY /etc/c\\x20d user.x=1
g 644 0:0 old:1 /etc/e
l 0:0 /lib -> usr/lib
d 755 0:0 /usr
";

    fn tree() -> Tree {
        let empty = Algorithm::Blake3.digest(b"").to_string();
        text::from_text(Algorithm::Blake3, &TREE.replace("EMPTY", &empty)).unwrap()
    }

    fn applied(rules: &str, filter: Option<&Filter>) -> Result<Tree, String> {
        let rules = ComputedRules::from_text(rules);
        let applied = rules.and_then(|rules| rules.apply(&tree(), filter));
        applied.map_err(|error| model::display::error_chain(&error))
    }

    fn changed_lines(got: &Tree) -> Vec<String> {
        let before = text::to_text(&tree());
        let got = text::to_text(got);
        got.lines().filter(|line| !before.contains(line)).map(str::to_owned).collect()
    }

    #[test]
    fn computed_files_take_over_all_but_the_content_of_files() {
        let rules = "# rules\n\n/etc/c files.example\n/etc/c d\t[::1]:7\n/etc/e new:1\n";
        let got = applied(rules, Some(&Filter::new(["/etc/other"]).unwrap())).unwrap();
        assert_eq!(
            changed_lines(&got),
            [
                "g 600 0:7 files.example:6972 /etc/c",
                "g 640 1:2 [::1]:7 /etc/c\\x20d user.x=1",
                "g 644 0:0 new:1 /etc/e",
            ]
        );
        assert_eq!(applied("# none\n", None), Ok(tree()));
    }

    #[test]
    fn refuses_what_cannot_be_computed() {
        let table = [
            ("/etc/c", "line 1: `/etc/c` is not PATH HOST:PORT"),
            ("\netc/c a:1", "line 2: path `etc/c` is not absolute"),
            (
                "/etc/c a:b",
                "line 1: `a:b` is not HOST or HOST:PORT: the port is not a number up to 65535",
            ),
            ("/etc/c a:1\n\n/etc/c b:1", "line 3: /etc/c is named in line 1 already"),
            ("/etc a:1", "line 1: /etc is a directory, not a regular file"),
            ("/ a:1", "line 1: / is a directory, not a regular file"),
            ("/lib a:1", "line 1: /lib is a symlink, not a regular file"),
            ("#\n/etc/b a:1", "line 2: /etc/b has several hard links, such as /etc/a"),
            ("/etc/a a:1", "line 1: /etc/a has several hard links, such as /etc/b"),
            ("/etc/x a:1", "line 1: /etc/x is not in the tree"),
            ("/x/y a:1", "line 1: /x/y is not in the tree"),
            ("/lib/x/y a:1", "line 1: /lib/x/y is not in the tree: /lib is a symlink"),
            ("/etc/c/x a:1", "line 1: /etc/c/x is not in the tree: /etc/c is a file"),
            ("/var/x a:1", "line 1: /var/x is kept by the filter, in its line `/var$`"),
            ("/usr/x a:1", "line 1: /usr/x is kept by the filter, in its line `/usr/.*`"),
        ];
        let filter = Filter::new(["/home/.*", "/var$", "/usr/.*"]).unwrap();
        for (rules, error) in table {
            assert_eq!(applied(rules, Some(&filter)), Err(error.to_owned()), "{rules:?}");
        }
    }

    #[test]
    fn of_the_rules_of_another_image_those_for_files_are_applied() {
        let rule = |path: &str| ComputedRule {
            path: TreePath::new(path).unwrap(),
            source: "files:1".to_owned(),
        };
        let rules = ["/etc", "/etc/a", "/etc/b", "/etc/c", "/etc/e", "/none"].map(rule);
        let got = apply_to_files(&rules, &tree()).unwrap();
        assert_eq!(changed_lines(&got), ["g 600 0:7 files:1 /etc/c"]);
        assert_eq!(apply_to_files(&[], &tree()), Ok(tree()));
    }
}
