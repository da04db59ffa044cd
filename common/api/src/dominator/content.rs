//! Changes of the content of computed files: what operators see of them, and order about them.
//!
//! A change goes to a few first machines, and to the others when it is verified there.

use core::fmt;
use core::str::FromStr;

use model::JsonSchema;
use model::path::TreePath;
use model::tree::Time;
use serde::{Deserialize, Serialize};

use super::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};

/// What gave machines other content.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ContentCause {
    /// The content revision of the filegen-server with this number.
    Revision(#[serde(with = "model::json::LargeNumber")] u64),
    /// Anything else that changed the content of one path: the records of the machines, or what a
    /// program or web server gave.
    Path(TreePath),
}

/// Identifies a change. Its text is `HOST:PORT/7`, or `HOST:PORT/etc/motd`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct ContentChangeId {
    /// The address of the filegen-server, as images name it.
    pub source: String,
    pub cause: ContentCause,
}

impl fmt::Display for ContentChangeId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            ContentCause::Revision(number) => write!(formatter, "{}/{number}", self.source),
            ContentCause::Path(path) => write!(formatter, "{}{path}", self.source),
        }
    }
}

/// A text that names no change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid change of content `{0}`: expected HOST:PORT/NUMBER or HOST:PORT/PATH")]
pub struct InvalidContentChange(String);

impl FromStr for ContentChangeId {
    type Err = InvalidContentChange;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidContentChange(text.to_owned());
        let is_inside = |at: &usize| *at > 0 && at + 1 < text.len();
        let at = text.find('/').filter(is_inside).ok_or_else(invalid)?;
        let (source, rest) = (text[..at].to_owned(), &text[at..]);
        let cause = match rest[1..].parse() {
            Ok(number) => ContentCause::Revision(number),
            Err(_) => ContentCause::Path(rest.parse().map_err(|_| invalid())?),
        };
        Ok(Self { source, cause })
    }
}

/// How far a change has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ContentStage {
    /// The first machines have it, or get it.
    First,
    /// It was verified on the first machines: the others get it within the budgets.
    Open,
    /// It was stopped, for this reason. No machine gets it.
    Stopped(String),
}

impl ContentStage {
    /// Returns the name of the stage.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::First => "first machines",
            Self::Open => "open",
            Self::Stopped(_) => "stopped",
        }
    }
}

/// A change of the content of computed files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ContentChange {
    pub id: ContentChangeId,
    pub stage: ContentStage,
    /// Since when it has this stage.
    pub since: Time,
    /// The paths with other content.
    pub paths: Vec<TreePath>,
    /// The number of machines that do not get it yet.
    pub waiting: u32,
    /// The host names of the first machines on which it is not verified yet.
    pub trying: Vec<String>,
    /// The number of machines on which it was verified.
    pub verified: u32,
    /// The number of machines whose update to it failed.
    pub failed: u32,
    /// The number of machines whose former content is known, so that they can go back to it.
    pub reversible: u32,
}

impl ContentChange {
    /// Says that the change is stopped, why, and which paths it is about.
    #[must_use]
    pub fn stopped_text(&self) -> Option<String> {
        let ContentStage::Stopped(why) = &self.stage else { return None };
        let paths: Vec<String> = self.paths.iter().map(ToString::to_string).collect();
        let of =
            if paths.is_empty() { "files of a former revision".into() } else { paths.join(", ") };
        Some(format!("the change {} of {of} has stopped: {why}", self.id))
    }
}

/// Returns the changes of content.
pub enum ListContentChanges {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListContentChangesRequest {
    /// The filegen-server; all if empty.
    pub source: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListContentChangesReply {
    /// Sorted by [`ContentChange::id`].
    pub changes: Vec<ContentChange>,
}

impl Method for ListContentChanges {
    const NAME: &'static str = "Dominator.ListContentChanges";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = ListContentChangesRequest;
    type Reply = ListContentChangesReply;
}

/// An order about one change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ContentOrder {
    /// No more machines get it. Those that have it keep it.
    Stop,
    /// Stops it, and takes the machines that have it back to their former content.
    RollBack,
    /// A stopped change begins anew with its first machines.
    Resume,
    /// All machines get it now, within the budgets.
    Open,
}

impl ContentOrder {
    /// Returns the name of the order.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::RollBack => "roll-back",
            Self::Resume => "resume",
            Self::Open => "open",
        }
    }
}

/// Gives an order about a change of content.
pub enum OrderContentChange {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderContentChangeRequest {
    pub id: ContentChangeId,
    pub order: ContentOrder,
    /// The reason; must not be empty.
    pub why: String,
    /// Who asks, if the call has no certificate.
    pub who: String,
}

impl Method for OrderContentChange {
    const NAME: &'static str = "Dominator.OrderContentChange";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = OrderContentChangeRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("change", &request.id)
            .with("order", request.order.name())
            .why(&request.why)
            .who(&request.who)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_change_names_its_server_and_a_revision_or_a_path() {
        let id = |cause| ContentChangeId { source: "files:6972".to_owned(), cause };
        let table = [
            ("files:6972/7", Some(id(ContentCause::Revision(7)))),
            ("files:6972/etc/motd", Some(id(ContentCause::Path("/etc/motd".parse().unwrap())))),
            ("files:6972", None),
            ("files:6972/", None),
            ("/7", None),
            ("files:6972//etc", None),
            ("", None),
        ];
        for (text, expected) in table {
            let parsed = text.parse::<ContentChangeId>();
            assert_eq!(parsed.as_ref().ok(), expected.as_ref(), "{text}");
            assert!(parsed.is_err() || parsed.unwrap().to_string() == text);
        }
    }
}
