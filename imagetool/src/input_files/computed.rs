//! Computed files: paths of an image whose content a filegen-server makes for each machine.
// tidy: core

use model::path::{PathError, TreePath};
use model::tree::{Computed, Leaf, Metadata, Node, TreeBuilder};
use rpc::client::{Peer, PeerError};

/// The port of a filegen-server, if a rule gives none.
const FILEGEN_PORT: u16 = 6972;

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
    #[error("line {line}: {path} is listed twice")]
    Duplicate { line: usize, path: TreePath },
    #[error("{path} cannot be a computed file: it is a {kind} in the image")]
    NoFile { path: TreePath, kind: &'static str },
    #[error("{path} cannot be a computed file: its directory is not in the image")]
    NoDirectory { path: TreePath },
    #[error("{path} cannot be a computed file: {link} is a hard link to it")]
    Linked { path: TreePath, link: TreePath },
}

/// The `host:port` of the filegen-server for each path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ComputedRules(Vec<(TreePath, String)>);

impl ComputedRules {
    /// Reads lines `PATH HOST:PORT`; empty lines and those that start with `#` are skipped.
    pub fn from_text(text: &str) -> Result<Self, ComputedError> {
        let mut rules: Vec<(TreePath, String)> = Vec::new();
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
            if rules.iter().any(|(before, _)| *before == path) {
                return Err(ComputedError::Duplicate { line, path });
            }
            rules.push((path, source));
        }
        Ok(Self(rules))
    }
}

/// Adds the computed files to a tree. A file of the image keeps its mode, owner and attributes; a
/// new one gets mode 644 and belongs to root.
pub fn apply(rules: &ComputedRules, builder: &mut TreeBuilder) -> Result<(), ComputedError> {
    for (path, source) in &rules.0 {
        let metadata = match builder.get(path) {
            None => Metadata::new(0o644, 0, 0),
            Some(Node::Leaf(Leaf::File(file))) => file.metadata.clone(),
            Some(node) => {
                return Err(ComputedError::NoFile { path: path.clone(), kind: node.kind() });
            }
        };
        let parent = path.parent().unwrap_or_else(TreePath::root);
        if !parent.is_root() && !matches!(builder.get(&parent), Some(Node::Directory(_))) {
            return Err(ComputedError::NoDirectory { path: path.clone() });
        }
        let computed = Computed { metadata, source: source.clone() };
        builder.replace(path.clone(), Node::Leaf(Leaf::Computed(computed)));
    }
    if rules.0.is_empty() {
        return Ok(());
    }
    for (link, node) in builder.iter() {
        if let Node::Leaf(Leaf::HardLink(target)) = node
            && rules.0.iter().any(|(path, _)| path == target)
        {
            return Err(ComputedError::Linked { path: target.clone(), link: link.clone() });
        }
    }
    Ok(())
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
";

    fn apply_to_tree(rules: &str) -> Result<String, String> {
        let rules =
            ComputedRules::from_text(rules).map_err(|error| model::display::error_chain(&error))?;
        let mut builder = TreeBuilder::new(Algorithm::Blake3);
        let tree = TREE.replace("EMPTY", &Algorithm::Blake3.digest(b"").to_string());
        for (path, node) in text::from_text(Algorithm::Blake3, &tree).unwrap().nodes() {
            builder.insert(path, node).unwrap();
        }
        apply(&rules, &mut builder).map_err(|error| model::display::error_chain(&error))?;
        Ok(text::to_text(&builder.finish().unwrap()))
    }

    #[test]
    fn computed_files_take_the_place_of_files() {
        let text = apply_to_tree("# rules\n\n/etc/c files.example\n/etc/new file [::1]:7\n");
        let text = text.unwrap();
        assert!(text.contains("g 600 0:7 files.example:6972 /etc/c\n"), "{text}");
        assert!(text.contains("g 644 0:0 [::1]:7 /etc/new\\x20file\n"), "{text}");
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
            ("/etc/c a:1\n/etc/c b:1", "line 2: /etc/c is listed twice"),
            ("/etc a:1", "/etc cannot be a computed file: it is a directory in the image"),
            ("/etc/b a:1", "/etc/b cannot be a computed file: it is a hard link in the image"),
            ("/etc/a a:1", "/etc/a cannot be a computed file: /etc/b is a hard link to it"),
            ("/x/y a:1", "/x/y cannot be a computed file: its directory is not in the image"),
        ];
        for (rules, error) in table {
            assert_eq!(apply_to_tree(rules), Err(error.to_owned()), "{rules:?}");
        }
    }
}
