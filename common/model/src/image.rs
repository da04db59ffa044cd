//! Images: a tree by digest, with its filter, triggers and notes.
//!
//! An image has a signed part ([`Content`]), which never changes and has its own digest, and an
//! unsigned part ([`Notes`]), which may change.

pub mod composition;
pub mod computed;
mod encoding;
pub mod leaving;
pub mod required;
pub mod tags;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::JsonSchema;
use crate::filter::{Filter, PatternError};
use crate::object::{Algorithm, ObjectId};
use crate::path::TreePath;
use crate::scope::{Attributes, Coverage, SUBD_DIRECTORY, ScanSettings};
use crate::signing::signers::{self, SignersError};
use crate::signing::{ContentSigner, Signature};
use crate::tree::{Leaf, Node, Time, Tree};
use crate::trigger::{TriggerError, Triggers};

/// The format of a [`Content`] without [`Content::signers`].
pub const FORMAT: u32 = 1;

/// The format of a [`Content`] with [`Content::signers`].
pub const FORMAT_WITH_SIGNERS: u32 = 2;

/// The tag of an image that should no longer be used; its value may name a replacement.
pub const DEPRECATED: &str = "deprecated";

/// The longest image name, in bytes.
pub const NAME_BYTES_MAX: usize = 1_024;

/// Why a text is not an image name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageNameError {
    /// The name is empty.
    #[error("an image name must not be empty")]
    Empty,
    /// The name is too long.
    #[error("an image name has at most {NAME_BYTES_MAX} bytes, this has {length}")]
    TooLong {
        /// Its length, in bytes.
        length: usize,
    },
    /// A component is not allowed.
    #[error("`{name}` is no image name: the component `{component}` {why}")]
    Component {
        /// The name, escaped.
        name: String,
        /// The component, escaped.
        component: String,
        why: &'static str,
    },
    /// The name is that of an image with too many parts.
    #[error("an image is composed of at most {} others, this of {count}", composition::PARTS_MAX)]
    Parts {
        /// How many it has.
        count: usize,
    },
}

/// The longest name of a new image, in bytes.
const NEW_NAME_BYTES_MAX: usize = 255;

/// Why no new image gets this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NewImageNameError {
    #[error("the name of a new image has at most {NEW_NAME_BYTES_MAX} bytes, this has {length}")]
    TooLong {
        /// Its length, in bytes.
        length: usize,
    },
    #[error("`{name}` begins with `-`, as options do: take another name")]
    Option { name: String },
    #[error(
        "`{name}` contains {character:?}, which shells or tables take apart: use letters, digits \
         and ._-+:@,%="
    )]
    Character { name: String, character: char },
}

/// Why an image is not added, although it could be stored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NewImageError {
    #[error(transparent)]
    Name { source: NewImageNameError },
    #[error("filter: {source}")]
    Filter { source: PatternError },
    #[error("trigger of `{service}`, match lines: {source}")]
    Trigger { service: String, source: PatternError },
}

/// The name of an image: a path such as `base/debian-12.7`, without a leading slash; or several of
/// them, for an image that is [composed](composition).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct ImageName(String);

impl ImageName {
    /// Parses a name; one leading slash is dropped.
    ///
    /// # Errors
    ///
    /// [`ImageNameError`] names the component that is not allowed.
    pub fn new(text: &str) -> Result<Self, ImageNameError> {
        let name = text.strip_prefix('/').unwrap_or(text);
        composition::split(name).try_for_each(Self::check)?;
        match composition::split(name).count() {
            count if count > composition::PARTS_MAX => Err(ImageNameError::Parts { count }),
            _ => Ok(Self(name.to_owned())),
        }
    }

    /// Checks the name of one image, which has no leading slash.
    fn check(name: &str) -> Result<(), ImageNameError> {
        if name.is_empty() {
            return Err(ImageNameError::Empty);
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(ImageNameError::TooLong { length: name.len() });
        }
        for component in name.split('/') {
            let why = match component {
                "" => "is empty",
                "." | ".." => "would leave its directory",
                _ if component.len() > 200 => "is longer than 200 bytes",
                _ if component.chars().any(char::is_control) => "holds a control character",
                _ => continue,
            };
            return Err(ImageNameError::Component {
                name: crate::escape::escape(name.as_bytes()),
                component: crate::escape::escape(component.as_bytes()),
                why,
            });
        }
        Ok(())
    }

    /// Refuses a name that shells or tables cannot carry, or that is too long for a file name. Only
    /// new images are checked: those that are stored stay readable and can be deleted.
    ///
    /// # Errors
    ///
    /// [`NewImageNameError`] says what is wrong.
    pub fn check_new(&self) -> Result<(), NewImageNameError> {
        let name = || self.0.clone();
        let is_plain =
            |character: &char| character.is_alphanumeric() || "/._-+:@,%=".contains(*character);
        if self.0.len() > NEW_NAME_BYTES_MAX {
            return Err(NewImageNameError::TooLong { length: self.0.len() });
        }
        if self.0.starts_with('-') {
            return Err(NewImageNameError::Option { name: name() });
        }
        match self.0.chars().find(|character| !is_plain(character)) {
            Some(character) => Err(NewImageNameError::Character { name: name(), character }),
            None => Ok(()),
        }
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the directory of the image; `None` if it is in none.
    #[must_use]
    pub fn directory(&self) -> Option<&str> {
        self.0.rsplit_once('/').map(|(directory, _)| directory)
    }

    /// The components, from the outermost directory to the image itself; at least one.
    pub fn components(&self) -> impl Iterator<Item = &str> {
        self.0.split('/')
    }
}

impl TryFrom<String> for ImageName {
    type Error = ImageNameError;

    fn try_from(text: String) -> Result<Self, ImageNameError> {
        Self::new(&text)
    }
}

impl From<ImageName> for String {
    fn from(name: ImageName) -> Self {
        name.0
    }
}

impl std::str::FromStr for ImageName {
    type Err = ImageNameError;

    fn from_str(text: &str) -> Result<Self, ImageNameError> {
        Self::new(text)
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl fmt::Debug for ImageName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "\"{}\"", self.0)
    }
}

/// The filegen-server that computes the content of a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct ComputedRule {
    pub path: TreePath,
    /// `host:port` of the filegen-server.
    pub source: String,
}

/// How a machine is checked after an update.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HealthCheck {
    /// The program and its arguments, run without a shell.
    pub command: Vec<String>,
    /// How long the check may take to pass, in seconds.
    pub within_seconds: u32,
    /// True to undo the update if the check fails.
    pub undo: bool,
}

impl HealthCheck {
    /// # Errors
    ///
    /// [`ImageError::HealthCheck`] for a check that cannot pass on any machine.
    fn verify(&self) -> Result<(), ImageError> {
        let bad = |why| Err(ImageError::HealthCheck { why });
        match (self.command.first(), self.within_seconds) {
            (None, _) => bad("its command is empty"),
            (Some(program), _) if program.is_empty() => bad("its program has no name"),
            (_, 0) => bad("0 seconds are too few for any command"),
            _ => Ok(()),
        }
    }
}

/// The signed part of an image, which never changes.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema)]
pub struct Content {
    /// The format of this record: [`FORMAT`] or [`FORMAT_WITH_SIGNERS`].
    pub format: u32,
    /// The name of the image.
    pub name: ImageName,
    /// The digest of the tree; its algorithm is that of all digests in the tree.
    pub root: ObjectId,
    /// The paths that each machine keeps; `None` makes the image sparse.
    pub filter: Option<Filter>,
    pub triggers: Triggers,
    /// The computed files of the tree, sorted by path.
    pub computed: Vec<ComputedRule>,
    /// How to check a machine after an update to this image.
    pub health_check: Option<HealthCheck>,
    /// The keys that sign the content of the computed files. If there are any, a machine that
    /// accepts only signed images accepts only such content.
    #[schemars(default)]
    pub signers: Vec<ContentSigner>,
}

/// One package that is installed in an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Package {
    pub name: String,
    pub version: String,
    /// Its installed size, in bytes.
    #[serde(with = "crate::json::LargeNumber")]
    pub size_bytes: u64,
}

/// The part of an image that may change, and is not signed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Notes {
    /// When the image expires; `None` for never.
    pub expires_at: Option<Time>,
    /// Groups that may change or delete it.
    pub owner_groups: Vec<String>,
    /// Users that may change or delete it.
    pub owner_users: Vec<String>,
    /// Labels; `deprecated` has a meaning.
    pub tags: BTreeMap<String, String>,
    pub release_notes: Option<String>,
    /// The log of the build.
    pub build_log: Option<ObjectId>,
    pub packages: Vec<Package>,
    /// Who uploaded it. Set by the image server.
    pub created_by: String,
    pub created_for: String,
    /// When it was uploaded. Set by the image server.
    pub created_on: Time,
    /// The image it was made from.
    pub source_image: Option<ImageName>,
    /// The signatures: at most [`crate::signing::SIGNATURES_MAX`]. The image server checks that
    /// they are for this image, and not whether their keys are trusted.
    #[serde(default)]
    pub signatures: Vec<Signature>,
}

/// An image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Image {
    pub content: Content,
    pub notes: Notes,
}

/// Why an image is not accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The format is unknown.
    #[error(
        "image format {format} is unknown: this release knows {FORMAT}, and with signers of \
         computed files {FORMAT_WITH_SIGNERS}"
    )]
    Format {
        /// The format of the image.
        format: u32,
    },
    /// The tree has another digest than the image says.
    #[error("the image names tree {want}, its tree is {got}")]
    Root { want: ObjectId, got: ObjectId },
    /// The tree holds a path that its own filter leaves to the machines.
    #[error("{path} is in the image, but its filter leaves that path to the machines")]
    Kept { path: TreePath },
    /// The tree holds subd's own directory.
    #[error("{path} is in the image, but {SUBD_DIRECTORY} belongs to subd alone")]
    Subd { path: TreePath },
    /// An entry has an extended attribute that Linux refuses for its kind.
    #[error("{path} has the extended attribute {name}, which no {kind} can have")]
    Attribute {
        path: TreePath,
        /// The attribute, escaped.
        name: String,
        /// The kind of the entry.
        kind: &'static str,
    },
    /// The computed files of the tree are not those that the image lists.
    #[error("the computed files that the image lists are not those of its tree: see {path}")]
    Computed {
        /// The first path that differs.
        path: TreePath,
    },
    /// The keys that sign the content of computed files are bad.
    #[error("bad signers of computed files")]
    Signers {
        #[source]
        source: SignersError,
    },
    /// The triggers are bad.
    #[error("bad triggers")]
    Triggers {
        #[source]
        source: TriggerError,
    },
    /// The health check names no program, or leaves it no time.
    #[error("bad health check: {why}")]
    HealthCheck { why: &'static str },
}

impl Content {
    /// Returns the format of images with these signers of computed files.
    #[must_use]
    pub fn format_for(signers: &[ContentSigner]) -> u32 {
        if signers.is_empty() { FORMAT } else { FORMAT_WITH_SIGNERS }
    }

    /// Returns the digest over the encoding `image-1` or `image-2` of `docs/IMAGE-FORMAT.md`, which
    /// identifies the image and is signed.
    #[must_use]
    pub fn digest(&self) -> ObjectId {
        let start: &[u8] = if self.format == FORMAT { b"image-1\0" } else { b"image-2\0" };
        let mut bytes = start.to_vec();
        let mut item = |tag: u8, content: &[u8]| {
            bytes.push(tag);
            bytes.extend_from_slice(&(content.len() as u64).to_le_bytes());
            bytes.extend_from_slice(content);
        };
        item(1, &self.format.to_le_bytes());
        item(2, self.name.as_str().as_bytes());
        item(3, self.root.to_string().as_bytes());
        if let Some(filter) = &self.filter {
            item(4, b"");
            filter.lines().iter().for_each(|line| item(5, line.as_bytes()));
        }
        for trigger in &self.triggers.0 {
            item(6, trigger.service.as_bytes());
            item(7, trigger.sort_name.as_bytes());
            let flags = [trigger.do_reload, trigger.do_reboot, trigger.high_impact];
            item(8, &flags.map(u8::from));
            item(9, trigger.kind.name().as_bytes());
            trigger.match_lines.lines().iter().for_each(|line| item(10, line.as_bytes()));
        }
        for rule in &self.computed {
            item(11, rule.path.as_bytes());
            item(12, rule.source.as_bytes());
        }
        if let Some(check) = &self.health_check {
            item(13, &check.within_seconds.to_le_bytes());
            item(14, &[u8::from(check.undo)]);
            check.command.iter().for_each(|word| item(15, word.as_bytes()));
        }
        for signer in &self.signers {
            item(16, signer.key.as_bytes());
            signer.paths.iter().for_each(|path| item(17, path.as_bytes()));
        }
        self.root.algorithm().digest(&bytes)
    }

    /// Returns the algorithm of all digests of the image.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.root.algorithm()
    }

    /// Returns true if machines keep all paths that the image does not contain.
    #[must_use]
    pub fn is_sparse(&self) -> bool {
        self.filter.is_none()
    }

    /// Returns how a sub must scan to be compared with this image, whose tree is `tree`.
    #[must_use]
    pub fn scan_settings(&self, tree: &Tree) -> ScanSettings {
        let coverage = match &self.filter {
            Some(filter) => Coverage::Full(filter.clone()),
            None => Coverage::Paths(tree.nodes().map(|(path, _)| path).collect()),
        };
        ScanSettings { algorithm: self.algorithm(), coverage, attributes: Attributes::of(tree) }
    }

    /// Refuses what must not be in a new image, although stored ones have it: a name that shells or
    /// tables take apart, and lines that match no path.
    ///
    /// # Errors
    ///
    /// [`NewImageError`] says what is wrong.
    pub fn check_new(&self) -> Result<(), NewImageError> {
        self.name.check_new().map_err(|source| NewImageError::Name { source })?;
        if let Some(filter) = &self.filter {
            filter.check_new().map_err(|source| NewImageError::Filter { source })?;
        }
        for trigger in &self.triggers.0 {
            let service = || trigger.service.clone();
            let checked = trigger.match_lines.check_new();
            checked.map_err(|source| NewImageError::Trigger { service: service(), source })?;
        }
        Ok(())
    }

    /// Refuses an image that no machine could ever equal, or that this release cannot serve.
    ///
    /// # Errors
    ///
    /// [`ImageError`] names the path.
    pub fn verify(&self, tree: &Tree) -> Result<(), ImageError> {
        if self.format != Self::format_for(&self.signers) {
            return Err(ImageError::Format { format: self.format });
        }
        signers::verify(&self.signers, &self.computed)
            .map_err(|source| ImageError::Signers { source })?;
        if self.root != tree.digest() {
            return Err(ImageError::Root { want: self.root, got: tree.digest() });
        }
        self.triggers.verify().map_err(|source| ImageError::Triggers { source })?;
        self.health_check.as_ref().map_or(Ok(()), HealthCheck::verify)?;
        let mut rules = self.computed.iter();
        for (path, node) in tree.nodes() {
            if path.as_bytes() == SUBD_DIRECTORY.as_bytes() {
                return Err(ImageError::Subd { path });
            }
            // The nodes come parents first, so a match of an ancestor was refused before.
            let kept = |filter: &Filter| !path.is_root() && filter.keeps_below_unkept(&path);
            if self.filter.as_ref().is_some_and(kept) {
                return Err(ImageError::Kept { path });
            }
            if let Some(name) = impossible_attribute(&node) {
                return Err(ImageError::Attribute { path, name, kind: node.kind() });
            }
            if let Node::Leaf(Leaf::Computed(computed)) = node {
                let listed = rules.next();
                if listed.is_none_or(|rule| rule.path != path || rule.source != computed.source) {
                    return Err(ImageError::Computed { path });
                }
            }
        }
        match rules.next() {
            None => Ok(()),
            Some(rule) => Err(ImageError::Computed { path: rule.path.clone() }),
        }
    }
}

/// The first extended attribute of `node` that Linux refuses for its kind.
fn impossible_attribute(node: &Node) -> Option<String> {
    let allows = |name: &[u8]| match node {
        Node::Directory(_) => true,
        Node::Leaf(Leaf::File(_) | Leaf::Computed(_)) => name != b"system.posix_acl_default",
        Node::Leaf(Leaf::Symlink(_)) => {
            !name.starts_with(b"user.") && !name.starts_with(b"system.posix_acl_")
        }
        Node::Leaf(Leaf::Special(_) | Leaf::HardLink(_)) => {
            !name.starts_with(b"user.") && name != b"system.posix_acl_default"
        }
    };
    let mut names = node.metadata()?.xattrs.iter().map(|(name, _)| name);
    names.find(|name| !allows(name)).map(crate::escape::escape)
}

/// The computed files of `tree`, sorted by path, as [`Content::computed`] lists them.
#[must_use]
pub fn computed_rules(tree: &Tree) -> Vec<ComputedRule> {
    tree.nodes()
        .filter_map(|(path, node)| match node {
            Node::Leaf(Leaf::Computed(computed)) => {
                Some(ComputedRule { path, source: computed.source })
            }
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_new_images_can_be_typed_and_listed() {
        let check = |name: &str| ImageName::new(name).unwrap().check_new();
        for name in ["base/debian-12.7", "a_b+c:d@e,f%g=h", "größe/1", "x/-y", &"x".repeat(200)] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        let long = ["x".repeat(200), "y".repeat(55)].join("/");
        assert_eq!(check(&long), Err(NewImageNameError::TooLong { length: 256 }));
        assert_eq!(check("-x"), Err(NewImageNameError::Option { name: "-x".to_owned() }));
        for character in [' ', '\\', '*', '?', '\'', '"', '$', ';', '&', '|', '\u{202e}', '\u{a0}']
        {
            let name = format!("a{character}b");
            assert_eq!(check(&name), Err(NewImageNameError::Character { name, character }));
        }
    }

    #[test]
    fn image_names_are_paths_that_stay_inside() {
        assert_eq!(ImageName::new("/base/debian-12").unwrap().as_str(), "base/debian-12");
        let table = [
            ("", "an image name must not be empty"),
            ("/", "an image name must not be empty"),
            ("a//b", "`a//b` is no image name: the component `` is empty"),
            ("a/../b", "`a/../b` is no image name: the component `..` would leave its directory"),
            (
                "a\u{7}",
                "`a\\x07` is no image name: the component `a\\x07` holds a control character",
            ),
        ];
        for (text, error) in table {
            assert_eq!(ImageName::new(text).unwrap_err().to_string(), error);
        }
        assert!(ImageName::new(&"x".repeat(1_025)).is_err());
    }

    #[test]
    fn attributes_that_no_kernel_sets_are_refused() {
        let refused = |text: &str| {
            let tree = crate::tree::text::from_text(Algorithm::Blake3, text).unwrap();
            let content = Content {
                format: FORMAT,
                name: ImageName::new("any").unwrap(),
                root: tree.digest(),
                filter: None,
                triggers: Triggers::default(),
                computed: Vec::new(),
                health_check: None,
                signers: Vec::new(),
            };
            content.verify(&tree).map_err(|error| error.to_string())
        };
        let table = [
            ("d 755 0:0 /a user.x=1 system.posix_acl_default=1", None),
            ("p 600 0:0 1.000000000 /a system.posix_acl_access=1", None),
            ("l 0:0 /a -> b security.selinux=1", None),
            ("l 0:0 /a -> b user.x=1", Some("user.x, which no symlink can have")),
            ("p 600 0:0 1.000000000 /a user.x=1", Some("user.x, which no fifo can have")),
        ];
        for (text, error) in table {
            let want = error.map(|end| format!("/a has the extended attribute {end}"));
            assert_eq!(refused(text).err(), want, "{text}");
        }
    }

    #[test]
    fn a_health_check_can_pass_somewhere() {
        let table = [
            (&["/bin/true"][..], 1, None),
            (&[], 1, Some("bad health check: its command is empty")),
            (&["", "x"], 1, Some("bad health check: its program has no name")),
            (&["/bin/true"], 0, Some("bad health check: 0 seconds are too few for any command")),
        ];
        for (command, within_seconds, error) in table {
            let command = command.iter().map(|word| (*word).to_owned()).collect();
            let check = HealthCheck { command, within_seconds, undo: false };
            let got = check.verify().map_err(|error| error.to_string());
            assert_eq!(got, error.map_or(Ok(()), |error| Err(error.to_owned())));
        }
    }
}
