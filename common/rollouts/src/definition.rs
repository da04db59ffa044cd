//! What operators say about environments: definitions, of which each is a revision, and edits.

use std::collections::BTreeMap;

use model::JsonSchema;
use model::image::ImageName;
use model::json::KeyError;
use model::names::check_name;
use provisioning::version::{Range, Version};
use serde::{Deserialize, Serialize};

use crate::document::Revision;
use crate::selector::Selector;
use crate::strategy::{Approval, Strategy, check_approval, check_strategy};

/// What the machines of an environment must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// This image.
    Image(ImageName),
    /// The image that the machine database names for each: an edit of `RequiredImage` waits as a
    /// new revision. Always true.
    Mdb(bool),
    /// This image beside the one that they have: a sparse one, with files of its own.
    Bundle(ImageName),
    /// The content of computed files of this filegen-server, as images name it: a content revision
    /// waits as a new revision.
    Content(String),
}

/// What environments are about. It never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    Images,
    Bundles,
    Content,
}

impl Source {
    /// True if it adds to the image of a machine.
    #[must_use]
    pub fn is_bundle(&self) -> bool {
        matches!(self, Self::Bundle(_))
    }

    /// Returns what it is about.
    #[must_use]
    pub fn subject(&self) -> Subject {
        match self {
            Self::Image(_) | Self::Mdb(_) => Subject::Images,
            Self::Bundle(_) => Subject::Bundles,
            Self::Content(_) => Subject::Content,
        }
    }

    /// Returns the image that it names.
    #[must_use]
    pub fn image(&self) -> Option<&ImageName> {
        match self {
            Self::Image(image) | Self::Bundle(image) => Some(image),
            Self::Mdb(_) | Self::Content(_) => None,
        }
    }

    /// Returns the filegen-server that it names.
    #[must_use]
    pub fn content(&self) -> Option<&str> {
        match self {
            Self::Content(server) => Some(server),
            _ => None,
        }
    }
}

/// When an edit of the machine database, or a content revision, is carried out, with
/// [`Source::Mdb`] and [`Source::Content`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// When somebody starts the revision.
    #[default]
    Manual,
    /// At once, in a rollout of its own.
    Auto,
}

/// What an operator says about an environment. A revision never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    pub name: String,
    #[serde(default)]
    pub group: Option<String>,
    /// Users of these groups, and these users, may edit it and bring it to machines.
    #[serde(default)]
    pub owner_groups: Vec<String>,
    #[serde(default)]
    pub owner_users: Vec<String>,
    pub select: Selector,
    pub source: Source,
    #[serde(default)]
    pub start: Start,
    /// Environments that come before.
    #[serde(default)]
    pub depends_on: Vec<String>,
    #[serde(default)]
    pub strategy: Strategy,
    #[serde(default)]
    pub approval: Option<Approval>,
    /// Versions by name.
    #[serde(default)]
    pub provides: BTreeMap<String, Version>,
    #[serde(default)]
    pub requires: BTreeMap<String, Range>,
    /// True if two bundles of it can be on a machine at once, so that a former one can stay for
    /// environments that require it.
    #[serde(default)]
    pub disjoint: bool,
}

impl Definition {
    fn check(&self) -> Result<(), KeyError> {
        let name = &self.name;
        check_name(name).map_err(|problem| KeyError::new("name", problem))?;
        self.select.check(&format!("{name}.select"))?;
        if self.source == Source::Mdb(false) {
            return Err(KeyError::new(&format!("{name}.source.mdb"), "can only be true"));
        }
        if self.source.image().is_some_and(ImageName::is_composed) {
            let why = "names more than one image: bundles have environments of their own";
            return Err(KeyError::new(&format!("{name}.source"), why));
        }
        if self.source.image().is_some_and(ImageName::is_nothing) {
            let why = "names no image: let the machine database name none, without an environment";
            return Err(KeyError::new(&format!("{name}.source"), why));
        }
        if let Some(server) = self.source.content() {
            self.check_content(server)?;
        }
        if self.disjoint && !self.source.is_bundle() {
            return Err(KeyError::new(&format!("{name}.disjoint"), "only bundles can be disjoint"));
        }
        check_strategy(name, &self.strategy)?;
        check_approval(name, self.approval.as_ref())
    }

    fn check_content(&self, server: &str) -> Result<(), KeyError> {
        let name = &self.name;
        if server.split_once(':').is_none_or(|(host, port)| host.is_empty() || port.is_empty()) {
            let why = "expected HOST:PORT, as images name the filegen-server";
            return Err(KeyError::new(&format!("{name}.source.content"), why));
        }
        let Strategy { min_image_age_s, requires_from, .. } = &self.strategy;
        if *min_image_age_s > 0 || !requires_from.is_empty() {
            let why = "min_image_age_s and requires_from are for images";
            return Err(KeyError::new(&format!("{name}.strategy"), why));
        }
        Ok(())
    }
}

/// An edit of an environment. The source must be named.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentEdit {
    pub name: String,
    /// The revision that the edit was made from, 0 for a new environment; any if it is left out.
    #[serde(default)]
    pub base: Option<Revision>,
    pub source: Source,
    /// An empty text: no group any more.
    #[serde(default)]
    pub group: Option<String>,
    #[serde(default)]
    pub owner_groups: Option<Vec<String>>,
    #[serde(default)]
    pub owner_users: Option<Vec<String>>,
    #[serde(default)]
    pub select: Option<Selector>,
    #[serde(default)]
    pub start: Option<Start>,
    #[serde(default)]
    pub depends_on: Option<Vec<String>>,
    #[serde(default)]
    pub strategy: Option<Strategy>,
    #[serde(default)]
    pub approval: Option<Approval>,
    #[serde(default)]
    pub provides: Option<BTreeMap<String, Version>>,
    #[serde(default)]
    pub requires: Option<BTreeMap<String, Range>>,
    #[serde(default)]
    pub disjoint: Option<bool>,
}

impl EnvironmentEdit {
    /// Returns the definition after the edit. What is left out stays as in `before`.
    ///
    /// # Errors
    ///
    /// [`KeyError`] names the key that is invalid or missing.
    pub fn apply(self, before: Option<&Definition>) -> Result<Definition, KeyError> {
        let missing = KeyError::new(&format!("{}.select", self.name), "is missing");
        let former = before.cloned();
        let definition = match former {
            Some(former) => Definition {
                name: self.name,
                group: self.group.or(former.group),
                owner_groups: self.owner_groups.unwrap_or(former.owner_groups),
                owner_users: self.owner_users.unwrap_or(former.owner_users),
                select: self.select.unwrap_or(former.select),
                source: self.source,
                start: self.start.unwrap_or(former.start),
                depends_on: self.depends_on.unwrap_or(former.depends_on),
                strategy: self.strategy.unwrap_or(former.strategy),
                approval: self.approval.or(former.approval),
                provides: self.provides.unwrap_or(former.provides),
                requires: self.requires.unwrap_or(former.requires),
                disjoint: self.disjoint.unwrap_or(former.disjoint),
            },
            None => Definition {
                name: self.name,
                group: self.group,
                owner_groups: self.owner_groups.unwrap_or_default(),
                owner_users: self.owner_users.unwrap_or_default(),
                select: self.select.ok_or(missing)?,
                source: self.source,
                start: self.start.unwrap_or_default(),
                depends_on: self.depends_on.unwrap_or_default(),
                strategy: self.strategy.unwrap_or_default(),
                approval: self.approval,
                provides: self.provides.unwrap_or_default(),
                requires: self.requires.unwrap_or_default(),
                disjoint: self.disjoint.unwrap_or_default(),
            },
        };
        let group = definition.group.filter(|group| !group.is_empty());
        let definition = Definition { group, ..definition };
        definition.check()?;
        Ok(definition)
    }
}
