//! What is seen of machines, images and filegen-servers when rollouts are taken on.

use std::collections::{BTreeMap, BTreeSet};

use model::object::ObjectId;
use model::tree::Time;
use serde::Serialize;

use crate::content::ContentRevision;
use crate::document::{Analysis, MachineTaskState, Revision};

/// What is seen of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The required image as the machine is being brought to it; empty for none.
    pub image: String,
    /// The bundles in the name of that image that are left out of it, because they do not fit.
    pub left_out: BTreeSet<String>,
    /// How the machine is, with that image.
    pub state: MachineTaskState,
    /// The parts of that image that have brought what is unhealthy, as far as that is known.
    pub ill: BTreeSet<String>,
    pub reachable: bool,
    /// True if it has not been tried to reach it yet: nothing is decided meanwhile.
    pub unknown: bool,
    /// True if an operator keeps the machine out: its updates are disabled, or it is rolled back.
    pub held_out: bool,
}

/// What the image server says about an image, beside its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageNotes {
    /// When it was uploaded.
    pub uploaded: Time,
    /// Why it is deprecated, if it is.
    pub deprecated: Option<String>,
}

/// What the analysis is asked, with how a step is called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Question<'a> {
    /// The number of the rollout.
    #[serde(skip)]
    pub number: u64,
    pub rollout: &'a str,
    pub step: &'a str,
    pub environment: &'a str,
    pub revision: Revision,
    /// The machines that were changed.
    pub hosts: Vec<&'a str>,
    /// `analysis` of the strategy.
    pub analysis: &'a BTreeMap<String, String>,
}

/// All that is seen at one moment.
pub trait View {
    /// Returns what is seen of a machine.
    fn machine(&self, hostname: &str) -> Option<Seen>;
    /// Returns the digest of an image, if it is known.
    fn digest(&self, image: &str) -> Option<ObjectId>;
    /// Returns the bundles that do not fit into a composed image, each with the reason; `None`
    /// while that is not known.
    fn left_out(&self, image: &str) -> Option<BTreeMap<String, String>>;
    /// Returns what the image server says about an image, if it is known.
    fn notes(&self, image: &str) -> Option<ImageNotes>;
    /// Returns how a machine is with the content of its computed files of a filegen-server, if it
    /// may have that of this content revision; `None` if it has no such files.
    fn content(
        &self,
        hostname: &str,
        server: &str,
        content: ContentRevision,
    ) -> Option<MachineTaskState>;
    /// Returns the newest content revision of a filegen-server, if it is known.
    fn newest_content(&self, server: &str) -> Option<ContentRevision>;
    /// Returns what the analysis says about the machines that a step has changed, if it has
    /// answered. Has it asked otherwise.
    fn analysis(&mut self, question: Question<'_>) -> Option<Analysis>;
    /// Returns for how long all machines that the step has changed are healthy, in seconds.
    /// `healthy` says whether they are now.
    fn healthy_for_s(&mut self, rollout: u64, step: &str, healthy: bool) -> u64;
}
