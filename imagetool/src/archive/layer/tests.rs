//! How layers change trees, each kind of entry upon each other.

use model::path::TreePath;
use model::tree::text;

use super::*;

/// Entries in the short form of these tests: `d PATH [MODE]`, `f PATH CONTENT`, `l PATH TARGET`,
/// `h PATH TARGET`, `p PATH`, separated by `;`.
fn entries(layer: &str) -> Vec<(TreePath, Node)> {
    let path = |text: &str| TreePath::new(text).unwrap();
    let entry = |line: &str| {
        let words: Vec<&str> = line.trim().split(' ').collect();
        let metadata = Metadata::new(0o644, 0, 0);
        let node = match words[..] {
            ["d", _] => Node::Directory(Metadata::new(0o700, 0, 0)),
            ["d", _, mode] => {
                Node::Directory(Metadata::new(u32::from_str_radix(mode, 8).unwrap(), 7, 7))
            }
            ["f", _, content] => Node::Leaf(Leaf::File(tree::File {
                metadata,
                mtime: tree::Time::default(),
                size_bytes: content.len() as u64,
                object: Algorithm::Blake3.digest(content.as_bytes()).into(),
            })),
            ["l", _, target] => Node::Leaf(Leaf::Symlink(tree::Symlink {
                metadata: Metadata::new(0o777, 0, 0),
                target: model::escape::ByteText(target.as_bytes().to_owned()),
            })),
            ["h", _, target] => Node::Leaf(Leaf::HardLink(path(target))),
            ["p", _] => Node::Leaf(Leaf::Special(tree::Special {
                metadata,
                mtime: tree::Time::default(),
                device: tree::Device::Fifo,
            })),
            _ => panic!("{line}"),
        };
        (path(words[1]), node)
    };
    layer.split(';').filter(|line| !line.trim().is_empty()).map(entry).collect()
}

/// Returns the tree of `layers` one upon the other, in the same short form, or what is refused.
fn laid(layers: &[&str]) -> String {
    let mut layered = LayeredTree::default();
    for text in layers {
        let mut layer = Layer::new(Whiteouts::Applied);
        for (path, node) in entries(text) {
            let name = path.relative().to_owned();
            if let Err(error) = layer.insert(path, node, &name) {
                return format!("{}: {error}", model::escape::escape(&name));
            }
        }
        if let Err(RefusedEntry { name, source }) = layered.apply(layer) {
            return format!("{}: {source}", model::escape::escape(&name));
        }
        // What was laid is a tree like any other, and can be laid upon again.
        let tree = layered.into_builder(Algorithm::Blake3).finish().unwrap();
        layered = LayeredTree::of_tree(&tree).unwrap();
    }
    let contents = ["1", "22", "333", "4444"];
    let short = |(path, node): (TreePath, Node)| match node {
        _ if path.is_root() => None,
        Node::Directory(metadata) => Some(match metadata.uid {
            7 => format!("d {path} {:o}", metadata.mode),
            _ if metadata.mode == 0o755 => format!("D {path}"),
            _ => format!("d {path}"),
        }),
        Node::Leaf(Leaf::File(file)) => {
            let content = contents[usize::try_from(file.size_bytes).unwrap() - 1];
            assert_eq!(file.object.id(), Algorithm::Blake3.digest(content.as_bytes()));
            Some(format!("f {path} {content}"))
        }
        Node::Leaf(Leaf::Symlink(symlink)) => {
            Some(format!("l {path} {}", model::escape::escape(&symlink.target.0)))
        }
        Node::Leaf(Leaf::HardLink(target)) => Some(format!("h {path} {target}")),
        node => Some(
            text::line_of(&path, &node).split(' ').next().unwrap().to_owned()
                + " "
                + &path.to_string(),
        ),
    };
    let tree = layered.into_builder(Algorithm::Blake3).finish().unwrap();
    tree.nodes().filter_map(short).collect::<Vec<_>>().join("; ")
}

#[test]
fn layers_change_trees() {
    #[rustfmt::skip]
    let table: &[(&str, &[&str], &str)] = &[
        ("nothing upon nothing",            &["", ""],                                        ""),
        ("an addition",                     &["f /a 1", "f /b 22"],                           "f /a 1; f /b 22"),
        ("missing parents are made",        &["", "f /a/b/c 1"],                              "D /a; D /a/b; f /a/b/c 1"),
        ("existing parents stay",           &["d /a 750; f /a/x 1", "f /a/b/c 1"],            "d /a 750; D /a/b; f /a/b/c 1; f /a/x 1"),
        ("a file is replaced",              &["f /a 1", "f /a 22"],                           "f /a 22"),
        ("a file becomes a symlink",        &["f /a 1", "l /a b"],                            "l /a b"),
        ("a file becomes a fifo",           &["f /a 1", "p /a"],                              "p /a"),
        ("a symlink becomes a file",        &["l /a b; f /b 1", "f /a 22"],                   "f /a 22; f /b 1"),
        ("a file becomes a directory",      &["f /a 1", "d /a; f /a/b 22"],                   "d /a; f /a/b 22"),
        ("a symlink becomes a directory",   &["l /a b; d /b", "d /a 711; f /a/x 1"],          "d /a 711; f /a/x 1; d /b"),
        ("a directory becomes a file",      &["d /a; f /a/b 1; d /a/c; f /a/c/d 1", "f /a 22"], "f /a 22"),
        ("a directory becomes a symlink",   &["d /a; f /a/b 1; f /a-b 1", "l /a x"],          "l /a x; f /a-b 1"),
        ("there and back",                  &["d /a; f /a/b 1", "f /a 22", "d /a; f /a/c 333"], "d /a; f /a/c 333"),
        ("a directory gets a new mode",     &["d /a 755; f /a/b 1", "d /a 700"],              "d /a 700; f /a/b 1"),
        ("a whiteout",                      &["d /a; f /a/b 1; f /a/c 1", "f /a/.wh.b 1"],    "d /a; f /a/c 1"),
        ("a whiteout of a directory",       &["d /a; f /a/b 1; f /a-b 1", "f /.wh.a 1"],      "f /a-b 1"),
        ("a whiteout of nothing",           &["f /b 1", "f /.wh.a 1; f /x/.wh.a 1"],          "f /b 1"),
        ("a whiteout below a file",         &["f /b 1", "f /b/.wh.a 1"],                      "f /b 1"),
        ("a whiteout takes nothing of its own layer", &["d /a; f /a/b 1", "d /a; f /a/c 22; f /.wh.a 1"], "d /a; f /a/c 22"),
        ("a whiteout and the same again",   &["f /a 1", "f /a 22; f /.wh.a 1"],               "f /a 22"),
        ("a whiteout, and later the same",  &["f /a 1", "f /.wh.a 1", "f /a 22"],             "f /a 22"),
        ("a whiteout in the lowest layer",  &["f /.wh.a 1; f /a 1"],                          "f /a 1"),
        ("an opaque directory",             &["d /a; f /a/b 1; d /a/c; f /a/c/d 1; f /a-b 1", "f /a/.wh..wh..opq 1; f /a/n 22"], "d /a; f /a/n 22; f /a-b 1"),
        ("an opaque directory keeps its own", &["d /a; f /a/b 1", "d /a 711; f /a/b 22; f /a/.wh..wh..opq 1"], "d /a 711; f /a/b 22"),
        ("an opaque root",                  &["f /a 1", "f /.wh..wh..opq 1; f /b 1"],         "f /b 1"),
        ("an opaque nowhere",               &["f /a 1", "f /x/.wh..wh..opq 1; f /a/.wh..wh..opq 1"], "f /a 1"),
        ("what a storage driver left",      &["f /.wh..wh.aufs 1; d /.wh..wh.plnk; f /.wh..wh.plnk/1.2 1; f /a 1"], "f /a 1"),
        ("odd whiteouts",                   &["f /.wh 1; f /.wha 1; f /a.wh.b 1", "f /.wh..wh 1"], "f /.wha 1; f /a.wh.b 1"),
        ("a link into a lower layer",       &["f /b 1", "h /a /b"],                           "f /a 1; h /b /a"),
        ("a link to a link below",          &["f /a 1; h /b /a", "h /c /b"],                  "f /a 1; h /b /a; h /c /a"),
        ("a link to what comes in its layer", &["f /b 1", "h /a /b; f /b 22"],                "f /a 22; h /b /a"),
        ("a link takes the place of its file", &["f /a 1; f /b 22", "h /a /b"],               "f /a 22; h /b /a"),
        ("a link takes the place of a directory", &["d /a; f /a/x 1; f /b 22", "h /a /b"],    "f /a 22; h /b /a"),
        ("one name of a file is replaced",  &["f /a 1; h /b /a; h /c /a", "f /a 22"],         "f /a 22; f /b 1; h /c /b"),
        ("the first name is taken away",    &["f /a 1; h /b /a; h /c /a", "f /.wh.a 1"],      "f /b 1; h /c /b"),
        ("all names go with a directory",   &["d /d; f /d/a 1; h /d/b /d/a; h /z /d/a", "f /.wh.d 1"], "f /z 1"),
        ("a link to a symlink is another",  &["l /a x", "h /b /a"],                           "l /a x; l /b x"),
        ("a link to a fifo is another",     &["h /a /b; p /b"],                               "p /a; p /b"),
        ("a link to what is taken away",    &["f /a 1", "f /.wh.a 1; h /b /a"],               "b: it is a hard link to /a, which is not a regular file"),
        ("a link to nowhere",               &["f /a 1", "h /b /c"],                           "b: it is a hard link to /c, which is not a regular file"),
        ("a link to a directory",           &["d /a", "h /b /a"],                             "b: it is a hard link to /a, which is not a regular file"),
        ("a link to itself, a file below",  &["f /a 1", "h /a /a"],                           "a: it is a hard link to /a, which is not a regular file"),
        ("through a symlink below",         &["d /b; l /a b", "f /a/x 1"],                    "a/x: it is below /a, which is a symlink"),
        ("through a symlink of its own",    &["d /a", "l /a /etc; f /a/x 1"],                 "a/x: it is below /a, which is a symlink"),
        ("below a file",                    &["f /a 1", "f /a/x 1"],                          "a/x: it is below /a, which is a file"),
        ("below a link",                    &["f /b 1", "h /a /b; f /a/x 1"],                 "a/x: it is below /a, which is a hard link"),
        ("twice",                           &["f /a 1; f /a 1"],                              "a: it is in the archive twice"),
        ("a whiteout of no name",           &["f /.wh. 1"],                                   ".wh.: it has the name of a whiteout, but the name that it removes is invalid"),
        ("a whiteout of the directory",     &["f /a/.wh.. 1"],                                "a/.wh..: it has the name of a whiteout, but the name that it removes is invalid"),
        ("a whiteout of the parent",        &["f /a/.wh... 1"],                               "a/.wh...: it has the name of a whiteout, but the name that it removes is invalid"),
        ("a whiteout that is a directory",  &["d /.wh.a"],                                    ".wh.a: it has the name of a whiteout, but it is a directory"),
        ("an entry in a whiteout",          &["f /.wh.a/b 1"],                                ".wh.a/b: it has the name of a whiteout, but it is inside a directory that has the name of one"),
    ];
    for (name, layers, want) in table {
        assert_eq!(laid(layers), *want, "{name}");
    }
}

#[test]
fn an_ordinary_archive_may_have_any_names() {
    let mut layer = Layer::new(Whiteouts::Ordinary);
    for (path, node) in entries("f /.wh.a 1; d /.wh.d; f /.wh.d/.wh..wh..opq 1; f /.wh. 1") {
        layer.insert(path, node, b"").unwrap();
    }
    assert_eq!(layer.len(), 4);
}
