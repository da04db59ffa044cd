//! Images that are composed of others: a base, and *bundles* that add to it.
//!
//! The name of a composed image has those of its parts with ` + ` in between, such as
//! `base/12 + logd/7`. No image server has such an image: whoever needs it composes it, and gets
//! the same one.
//!
//! A machine without a base has bundles alone. Its image has the first part [`NOTHING`], which has
//! no files and is on no image server. When a bundle leaves such an image, its files go
//! ([`super::leaving`]).
//!
//! # Invariants
//!
//! * The first part is there whole. A bundle is there whole, or it is left out with a reason.
//! * No path is that of two parts, but those of directories; these have equal metadata in both.
//! * The filter and the health check are those of the first part. So that no other part needs one,
//!   bundles are sparse, and bring the health checks of their tasks.

use std::fmt;
use std::sync::{Arc, LazyLock};

use super::required::RequiredImage;
use super::{ComputedRule, Content, FORMAT, ImageName, ImageNameError};
use crate::filter::Filter;
use crate::object::Algorithm;
use crate::path::TreePath;
use crate::tree::{Child, Directory, Entry, Tree, TreeError};
use crate::trigger::Triggers;

/// What is between the names of parts. Names of new images have no blanks.
const SEPARATOR: &str = " + ";

/// The name of the first part of an image that has bundles alone. No new image can have it.
pub const NOTHING: &str = "(nothing)";

/// The most parts of an image.
pub const PARTS_MAX: usize = 32;

/// Why a bundle cannot be added to what comes before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    #[error("it has a filter, and only the first part may have one")]
    Filter,
    #[error("it has a health check: give one to its tasks instead")]
    HealthCheck,
    #[error("its digests are {own}, and those of {first} are {other}")]
    Algorithm { own: Algorithm, first: ImageName, other: Algorithm },
    #[error("{path} is kept by the filter of {first}")]
    Kept { path: TreePath, first: ImageName },
    #[error("{path} is in {other} too")]
    Shared { path: TreePath, other: ImageName },
    #[error("the directory {path} has another mode, owner or attribute in {other}")]
    Directory { path: TreePath, other: ImageName },
    #[error("together they are no tree: {error}")]
    Tree { error: TreeError },
}

/// A bundle that is not there, because it does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Its place among the parts.
    pub index: usize,
    pub bundle: ImageName,
    pub why: Misfit,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "conflict: {} is left out: {}", self.bundle, self.why)
    }
}

impl ImageName {
    /// Returns the name of the image that is composed of these.
    ///
    /// # Errors
    ///
    /// [`ImageNameError::Empty`] without parts, [`ImageNameError::Parts`] for over [`PARTS_MAX`].
    pub fn composed<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Result<Self, ImageNameError> {
        Self::new(&parts.into_iter().map(Self::as_str).collect::<Vec<_>>().join(SEPARATOR))
    }

    /// True if the image is composed of others.
    #[must_use]
    pub fn is_composed(&self) -> bool {
        self.0.contains(SEPARATOR)
    }

    /// Returns the name of the image without files.
    #[must_use]
    pub fn nothing() -> Self {
        Self(NOTHING.to_owned())
    }

    /// True if it is the image without files.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.0 == NOTHING
    }

    /// True if it is the image without files, or one of bundles alone.
    #[must_use]
    pub fn is_without_base(&self) -> bool {
        split(&self.0).next() == Some(NOTHING)
    }

    /// True if it is an image of bundles alone.
    #[must_use]
    pub fn has_only_bundles(&self) -> bool {
        self.is_without_base() && !self.is_nothing()
    }

    /// Returns the names of the parts; that of the image itself if it is not composed.
    pub fn parts(&self) -> impl Iterator<Item = Self> {
        split(&self.0).map(|part| Self(part.to_owned()))
    }
}

/// Returns the names of the parts of an image, as texts.
pub fn split(name: &str) -> impl Iterator<Item = &str> {
    name.split(SEPARATOR)
}

/// Returns the image without files.
#[must_use]
pub fn nothing() -> Arc<RequiredImage> {
    static IMAGE: LazyLock<Arc<RequiredImage>> =
        LazyLock::new(|| Arc::new(nothing_in(Tree::empty(Algorithm::default()))));
    Arc::clone(&IMAGE)
}

/// Returns the image without files, with this tree, which has only a root.
fn nothing_in(tree: Tree) -> RequiredImage {
    let content = Content {
        format: FORMAT,
        name: ImageName::nothing(),
        root: tree.digest(),
        filter: None,
        triggers: Triggers::default(),
        computed: Vec::new(),
        health_check: None,
        signers: Vec::new(),
    };
    RequiredImage::new(content, tree)
}

/// Returns the parts, of which the image without files has the root of the first bundle.
fn with_root(parts: Vec<Arc<RequiredImage>>) -> Vec<Arc<RequiredImage>> {
    match &parts[..] {
        [first, bundle, ..] if first.name().is_nothing() => {
            let (algorithm, root) = (bundle.tree.algorithm(), bundle.tree.root().metadata());
            let root = Directory::new(algorithm, root.clone(), Vec::new());
            let root = root.expect("an empty directory breaks no rule");
            let first = Arc::new(nothing_in(Tree::new(Arc::new(root))));
            [first].into_iter().chain(parts[1..].iter().cloned()).collect()
        }
        _ => parts,
    }
}

/// Composes an image of these parts, the first one first.
///
/// # Errors
///
/// [`ImageNameError::Empty`] without parts, [`ImageNameError::Parts`] for over [`PARTS_MAX`].
pub fn compose(parts: Vec<Arc<RequiredImage>>) -> Result<RequiredImage, ImageNameError> {
    let name = ImageName::composed(parts.iter().map(|part| part.name()))?;
    let parts = with_root(parts);
    let [first, bundles @ ..] = &parts[..] else { return Err(ImageNameError::Empty) };
    if bundles.is_empty() {
        return Ok(RequiredImage::clone(first));
    }
    let (tree, left_out) = merged(first, bundles);
    let is_used = |index: &usize| left_out.iter().all(|left_out| left_out.index != *index);
    let used = || (0..parts.len()).filter(is_used).map(|index| &parts[index].content);
    let mut computed: Vec<ComputedRule> = used().flat_map(|part| part.computed.clone()).collect();
    computed.sort();
    let content = Content {
        format: FORMAT,
        name,
        root: tree.digest(),
        triggers: Triggers(used().flat_map(|part| part.triggers.0.clone()).collect()),
        computed,
        // Those of each part sign the files of that part alone.
        signers: Vec::new(),
        ..first.content.clone()
    };
    Ok(RequiredImage { left_out, parts, ..RequiredImage::new(content, tree) })
}

/// Returns the bundles that do not fit into an image of these parts, without composing it whole.
#[must_use]
pub fn left_out(parts: Vec<Arc<RequiredImage>>) -> Vec<LeftOut> {
    with_root(parts)
        .split_first()
        .map(|(first, bundles)| merged(first, bundles).1)
        .unwrap_or_default()
}

/// Returns the tree of an image and bundles, and the bundles that do not fit.
fn merged(first: &Arc<RequiredImage>, bundles: &[Arc<RequiredImage>]) -> (Tree, Vec<LeftOut>) {
    let mut tree = first.tree.clone();
    let (mut used, mut left_out) = (vec![first], Vec::new());
    for (before, bundle) in bundles.iter().enumerate() {
        match with_bundle(&tree, &used, bundle) {
            Ok(with_it) => {
                tree = with_it;
                used.push(bundle);
            }
            Err(why) => {
                let bundle = bundle.name().clone();
                left_out.push(LeftOut { index: before + 1, bundle, why });
            }
        }
    }
    (tree, left_out)
}

/// Returns `tree`, which is composed of `used`, with a bundle.
fn with_bundle(
    tree: &Tree,
    used: &[&Arc<RequiredImage>],
    bundle: &RequiredImage,
) -> Result<Tree, Misfit> {
    let first = used[0];
    let Content { filter, health_check, .. } = &bundle.content;
    if filter.is_some() {
        return Err(Misfit::Filter);
    }
    if health_check.is_some() {
        return Err(Misfit::HealthCheck);
    }
    let (own, other) = (bundle.tree.algorithm(), tree.algorithm());
    if own != other {
        return Err(Misfit::Algorithm { own, first: first.name().clone(), other });
    }
    if let Some(filter) = &first.content.filter
        && let Some(path) = first_kept(filter, &bundle.tree)
    {
        return Err(Misfit::Kept { path, first: first.name().clone() });
    }
    let merged = merge(tree.root(), bundle.tree.root(), &TreePath::root());
    merged.map(Tree::new).map_err(|clash| clash.named(used))
}

/// Returns the first path of `tree` that machines keep.
fn first_kept(filter: &Filter, tree: &Tree) -> Option<TreePath> {
    let mut paths = tree.nodes().map(|(path, _)| path).filter(|path| !path.is_root());
    // Parents come first, so a match of an ancestor was found before.
    paths.find(|path| filter.keeps_below_unkept(path))
}

/// Why two directories cannot be one.
enum Clash {
    Shared(TreePath),
    Directory(TreePath),
    Tree(TreeError),
}

impl Clash {
    /// Names the part that is in the way.
    fn named(self, used: &[&Arc<RequiredImage>]) -> Misfit {
        let holder = |path: &TreePath| {
            let holder = used.iter().rev().find(|part| part.tree.get(path).is_some());
            holder.unwrap_or(&used[0]).name().clone()
        };
        match self {
            Self::Shared(path) => Misfit::Shared { other: holder(&path), path },
            Self::Directory(path) => Misfit::Directory { other: holder(&path), path },
            Self::Tree(error) => Misfit::Tree { error },
        }
    }
}

/// Returns the directory at `path` with the entries of both.
fn merge(
    left: &Arc<Directory>,
    right: &Arc<Directory>,
    path: &TreePath,
) -> Result<Arc<Directory>, Clash> {
    if left.metadata() != right.metadata() {
        return Err(Clash::Directory(path.clone()));
    }
    let mut entries = Vec::with_capacity(left.entries().len() + right.entries().len());
    for entry in left.entries() {
        let child = match (&entry.child, right.get(entry.name.as_bytes())) {
            (_, None) => entry.child.clone(),
            (Child::Directory(own), Some(Child::Directory(other))) => {
                Child::Directory(merge(own, other, &path.join_name(entry.name.as_bytes()))?)
            }
            (_, Some(_)) => return Err(Clash::Shared(path.join_name(entry.name.as_bytes()))),
        };
        entries.push(Entry { name: entry.name.clone(), child });
    }
    let is_new = |entry: &&Entry| left.get(entry.name.as_bytes()).is_none();
    entries.extend(right.entries().iter().filter(is_new).cloned());
    let algorithm = left.digest().algorithm();
    let merged = Directory::new(algorithm, left.metadata().clone(), entries);
    merged.map(Arc::new).map_err(Clash::Tree)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::HealthCheck;
    use crate::image::computed_rules;
    use crate::scope::Coverage;
    use crate::tree::Metadata;
    use crate::tree::text::{from_text, to_text};

    fn name(text: &str) -> ImageName {
        ImageName::new(text).unwrap()
    }

    fn file(path: &str) -> String {
        format!("f 644 0:0 1.000000000 3 blake3:{} {path}\n", "07".repeat(32))
    }

    fn image(of: &str, filter: Option<&[&str]>, text: &str) -> RequiredImage {
        let tree = from_text(Algorithm::Blake3, text).unwrap();
        let service = of.split('/').next().unwrap();
        let triggers = format!(r#"[{{"MatchLines": ["/opt/.*"], "Service": "{service}"}}]"#);
        let content = Content {
            format: FORMAT,
            name: name(of),
            root: tree.digest(),
            filter: filter.map(|lines| Filter::new(lines).unwrap()),
            triggers: Triggers::from_json(&triggers).unwrap(),
            computed: computed_rules(&tree),
            health_check: None,
            signers: Vec::new(),
        };
        content.verify(&tree).unwrap();
        RequiredImage::new(content, tree)
    }

    fn base() -> RequiredImage {
        let text = format!("d 755 0:0 /etc\n{}d 755 0:0 /opt\n", file("/etc/passwd"));
        image("base/1", Some(&["/var/.*"]), &text)
    }

    /// A bundle with these files, in directories of the base.
    fn bundle(of: &str, files: &[&str]) -> RequiredImage {
        let text: String = files.iter().map(|path| file(path)).collect();
        image(of, None, &format!("d 755 0:0 /etc\nd 755 0:0 /opt\n{text}"))
    }

    fn composed(parts: &[&RequiredImage]) -> RequiredImage {
        let parts = parts.iter().map(|part| Arc::new(RequiredImage::clone(part)));
        compose(parts.collect()).unwrap()
    }

    fn image_with_computed() -> RequiredImage {
        image("c/1", None, "d 755 0:0 /etc\ng 644 0:0 files:6972 /etc/motd\n")
    }

    fn services(image: &RequiredImage) -> Vec<&str> {
        image.content.triggers.0.iter().map(|trigger| &*trigger.service).collect()
    }

    #[test]
    fn names_of_composed_images_have_those_of_their_parts() {
        let parts = |text: &str| name(text).parts().collect::<Vec<_>>();
        assert_eq!(parts("base/1 + logd/7"), [name("base/1"), name("logd/7")]);
        assert_eq!(parts("base/1+logd"), [name("base/1+logd")]);
        let both = [name("base/1"), name("logd/7")];
        assert_eq!(ImageName::composed(&both).unwrap(), name("base/1 + logd/7"));
        assert!(name("base/1 + logd/7").is_composed() && !name("base/1").is_composed());
        assert!(ImageName::composed(&[]).is_err());
        for bad in ["a + ", " + a", "a +  + b", "a + ../b", "a + /b", "/a + b/"] {
            assert!(ImageName::new(bad).is_err(), "{bad}");
        }
        let many = |count: usize| ImageName::composed(&vec![name(&"x".repeat(200)); count]);
        assert!(many(PARTS_MAX).is_ok());
        assert_eq!(many(PARTS_MAX + 1), Err(ImageNameError::Parts { count: PARTS_MAX + 1 }));
    }

    #[test]
    fn bundles_add_their_files_and_triggers_to_a_base() {
        let (logd, metricd) = (bundle("logd/7", &["/opt/logd"]), bundle("metricd/1", &["/opt/m"]));
        let image = composed(&[&base(), &logd, &metricd]);
        assert_eq!(image.left_out, []);
        let text = format!(
            "d 755 0:0 /\nd 755 0:0 /etc\n{}d 755 0:0 /opt\n{}{}",
            file("/etc/passwd"),
            file("/opt/logd"),
            file("/opt/m")
        );
        assert_eq!(to_text(&image.tree), text);
        assert_eq!(services(&image), ["base", "logd", "metricd"]);
        assert_eq!(image.content.filter, base().content.filter);
        assert_eq!(image.content.verify(&image.tree).ok(), Some(()));
        let scan = image.content.scan_settings(&image.tree);
        assert_eq!(image.scan, scan);
        let computed = image_with_computed();
        let rules = composed(&[&base(), &computed, &logd]).content.computed;
        assert_eq!(rules, computed.content.computed);
        // The order of bundles does not matter to the tree, and what is shared stays shared.
        let other = composed(&[&base(), &metricd, &logd]);
        assert_eq!(other.tree, image.tree);
        let etc = |image: &RequiredImage| image.tree.get(&"/etc".parse().unwrap());
        assert_eq!(etc(&image), etc(&base()));
        // Without a base the image is sparse.
        let alone = composed(&[&logd, &metricd]);
        assert!(alone.content.is_sparse());
        assert_eq!(composed(&[&logd]).digest, logd.digest);
    }

    #[test]
    fn an_image_of_bundles_alone_begins_with_nothing() {
        let (logd, nothing) = (bundle("logd/7", &["/opt/logd"]), nothing());
        assert_eq!(to_text(&nothing.tree), "d 755 0:0 /\n");
        assert!(nothing.name().check_new().is_err(), "no image server has it");
        let alone = composed(&[&nothing, &logd]);
        assert_eq!(alone.name().as_str(), "(nothing) + logd/7");
        assert_eq!((&alone.tree, &*alone.left_out), (&logd.tree, &[][..]));
        assert!(alone.content.is_sparse());
        // Its root and algorithm are those of the bundles.
        let root = Directory::new(Algorithm::Sha512, Metadata::new(0o700, 1, 1), Vec::new());
        let tree = Tree::new(Arc::new(root.unwrap()));
        let content = Content { root: tree.digest(), ..bundle("odd/1", &[]).content };
        let odd = RequiredImage::new(content, tree);
        let (alone, parts) = (composed(&[&nothing, &odd]), [Arc::clone(&nothing), Arc::new(odd)]);
        assert_eq!((alone.tree, alone.left_out), (parts[1].tree.clone(), Vec::new()));
        assert_eq!(left_out(parts.to_vec()), []);
        let is_without_base = |text: &str| name(text).is_without_base();
        assert!(is_without_base("(nothing)") && is_without_base("(nothing) + logd/7"));
        assert!(!is_without_base("logd/7") && !is_without_base("logd/7 + (nothing)"));
    }

    #[test]
    fn the_files_of_bundles_that_leave_are_scanned_and_not_wanted() {
        let (one, two) = (bundle("one/1", &["/opt/1"]), bundle("two/1", &["/opt/2"]));
        let text = format!("d 755 0:0 /opt\nd 755 0:0 /opt/x\n{}", file("/opt/x/f"));
        let deep = image("deep/1", None, &format!("{text}d 755 0:0 /var\nd 755 0:0 /var/x\n"));
        let nothing = nothing();
        let before = composed(&[&nothing, &one, &deep]);
        let table = [
            // What remains, what is scanned too.
            (composed(&[&nothing, &two, &one]), "deep/1"),
            (composed(&[&nothing, &two]), "one/1 deep/1"),
            (RequiredImage::clone(&nothing), "one/1 deep/1"),
            (before.clone(), ""),
            (composed(&[&base(), &two]), ""),
            (two.clone(), ""),
        ];
        for (image, expected) in &table {
            let names = image.name().leaving(before.name());
            let names: Vec<String> = names.into_iter().map(String::from).collect();
            assert_eq!(names.join(" "), *expected, "{}", image.name());
        }
        let after = table[2].0.after(&before).unwrap();
        // The directories of a system stay.
        let tree =
            "d 755 0:0 /\nd 755 0:0 /etc\nd 755 0:0 /opt\nd 755 0:0 /var\nd 755 0:0 /var/x\n";
        assert_eq!(to_text(&after.tree), tree);
        assert_eq!((after.digest, after.leaving.len()), (nothing.digest, 2));
        let all = ["/", "/etc", "/opt", "/opt/1", "/opt/x", "/opt/x/f", "/var", "/var/x"];
        let all = all.map(|path| path.parse().unwrap()).into();
        assert_eq!(after.scan.coverage, Coverage::Paths(all));
        // What was left out was never there.
        let clash = composed(&[&nothing, &one, &bundle("clash/1", &["/opt/1"])]);
        assert_eq!(clash.left_out.len(), 1);
        assert_eq!(nothing.after(&clash).unwrap().leaving.len(), 1);
    }

    #[test]
    fn a_bundle_that_does_not_fit_is_left_out() {
        let first = || name("base/1");
        let path = |text: &str| text.parse::<TreePath>().unwrap();
        let sha = from_text(Algorithm::Sha512, "d 755 0:0 /opt\n").unwrap();
        let of_sha = Content { root: sha.digest(), ..bundle("logd/7", &[]).content };
        let logd = || bundle("logd/7", &["/opt/logd"]);
        let mut checked = logd();
        checked.content.health_check =
            Some(HealthCheck { command: vec!["/x".to_owned()], within_seconds: 1, undo: true });
        let table = [
            (image("logd/7", Some(&[]), ""), Misfit::Filter),
            (checked, Misfit::HealthCheck),
            (
                RequiredImage::new(of_sha, sha),
                Misfit::Algorithm {
                    own: Algorithm::Sha512,
                    first: first(),
                    other: Algorithm::Blake3,
                },
            ),
            (
                image("logd/7", None, "d 755 0:0 /var\nd 755 0:0 /var/log\n"),
                Misfit::Kept { path: path("/var/log"), first: first() },
            ),
            (
                bundle("logd/7", &["/etc/passwd"]),
                Misfit::Shared { path: path("/etc/passwd"), other: first() },
            ),
            (
                bundle("logd/7", &["/opt/m"]),
                Misfit::Shared { path: path("/opt/m"), other: name("metricd/1") },
            ),
            (
                image("logd/7", None, "d 700 0:0 /opt\n"),
                Misfit::Directory { path: path("/opt"), other: name("metricd/1") },
            ),
            (
                image("logd/7", None, &file("/opt")),
                Misfit::Shared { path: path("/opt"), other: name("metricd/1") },
            ),
        ];
        let metricd = bundle("metricd/1", &["/opt/m"]);
        let without = composed(&[&base(), &metricd]);
        for (bundle, why) in table {
            let image = composed(&[&base(), &metricd, &bundle, &self::bundle("z/1", &["/opt/z"])]);
            let left_out = [LeftOut { index: 2, bundle: name("logd/7"), why }];
            assert_eq!(image.left_out, left_out);
            assert_eq!(services(&image), ["base", "metricd", "z"], "{left_out:?}");
            let again = composed(&[&without, &self::bundle("z/1", &["/opt/z"])]);
            assert_eq!(image.tree, again.tree, "{left_out:?}");
        }
        // One that is there twice counts once.
        let image = composed(&[&base(), &metricd, &metricd]);
        let why = Misfit::Shared { path: path("/opt/m"), other: name("metricd/1") };
        assert_eq!(image.left_out, [LeftOut { index: 2, bundle: name("metricd/1"), why }]);
        let used: Vec<String> = image.used_parts().map(|part| part.name().to_string()).collect();
        assert_eq!(used, ["base/1", "metricd/1"]);
        let image = composed(&[&base(), &bundle("logd/7", &["/etc/passwd"])]);
        let said = "conflict: logd/7 is left out: /etc/passwd is in base/1 too";
        assert_eq!(image.left_out[0].to_string(), said);
    }
}
