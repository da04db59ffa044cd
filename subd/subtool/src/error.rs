//! The errors of subtool.

use std::io;
use std::path::PathBuf;

use api::fault::FaultCode;
use api::planning::PlanError;
use api::subd::{FetchFailure, UpdateOutcome};
use daemon::{EXIT_FAILED, EXIT_MISUSE};
use model::filter::PatternError;
use model::image::ImageName;
use model::path::TreePath;
use rpc::client::{CallError, PeerError};
use rpc::trees::{GetImageError, TreeReadError};

/// An error of subtool.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    #[error("{0}")]
    Misuse(String),
    #[error("invalid address")]
    Address {
        #[from]
        source: PeerError,
    },
    #[error(transparent)]
    Call {
        #[from]
        source: CallError,
    },
    #[error(transparent)]
    Image {
        #[from]
        source: GetImageError,
    },
    #[error("cannot read the tree of the machine")]
    Tree {
        #[from]
        source: TreeReadError,
    },
    #[error("the machine has invalid exclusions")]
    Exclusions {
        #[from]
        source: PatternError,
    },
    #[error("cannot make a plan")]
    Plan {
        #[from]
        source: PlanError,
    },
    #[error("the image of the machine has no task `{task}`")]
    NoTask { task: String },
    #[error("gave up after {seconds} s: {what}")]
    TooLong {
        /// The time of waiting, in seconds.
        seconds: u64,
        what: String,
    },
    #[error(
        "the machine does not scan with the settings of {image}, and its subd is of a release that \
         cannot do so for a preview"
    )]
    OtherScope { image: ImageName },
    #[error("the update is blocked: {}", .0.join("; "))]
    Blocked(Vec<String>),
    #[error("the update is unsafe: {}", .0.join("; "))]
    Unsafe(Vec<String>),
    #[error("the machine cannot get the objects: {0}")]
    Fetch(FetchFailure),
    #[error("the update {}", outcome(.0))]
    Update(UpdateOutcome),
    #[error("the machine still differs after {rounds} updates: {paths}")]
    NotConverging {
        rounds: u32,
        /// Some of the paths that differ.
        paths: String,
    },
    #[error("updates of the machine are not paused")]
    NotPaused,
    #[error("the machine was never updated to an image")]
    NoImage,
    #[error("the health check failed: {0}")]
    Unhealthy(String),
    #[error("{0}")]
    Refused(String),
    #[error("{path} kept changing while it was read")]
    Changing { path: TreePath },
    #[error("cannot write `{}`", path.display())]
    Write { path: PathBuf, source: io::Error },
}

fn outcome(outcome: &UpdateOutcome) -> String {
    match outcome {
        UpdateOutcome::Done => "was carried out".to_owned(),
        UpdateOutcome::NotPrepared(why) => {
            format!("cannot be staged, and nothing was changed: {why}")
        }
        UpdateOutcome::RolledBack(why) => format!("failed, and was undone: {why}"),
        UpdateOutcome::Stuck(why) => format!("failed, and the tree is mixed: {why}"),
        UpdateOutcome::Undone(why) => {
            format!("was undone, because the health check failed: {why}")
        }
    }
}

impl ToolError {
    /// Returns the exit code for the error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Misuse(_) | Self::Address { .. } => EXIT_MISUSE,
            _ => EXIT_FAILED,
        }
    }

    /// Returns hints for the operator.
    pub fn hints(&self) -> Vec<&'static str> {
        match self {
            Self::Address { .. } => vec!["an address is HOST or HOST:PORT"],
            Self::Call { source: source @ CallError::Connect { .. } } => {
                let unreached = "is subd running there? say where: --subd HOST:PORT, or \
                                 DOMINATOR_SUBD";
                Vec::from_iter(source.connect_hint(unreached))
            }
            Self::Call { source } => match source.code() {
                Some(FaultCode::Held) => {
                    vec!["subtool poll shows the pause; subtool resume ends it"]
                }
                Some(FaultCode::Busy) => {
                    vec!["another update or fetch is under way, perhaps of a dominator"]
                }
                _ => Vec::new(),
            },
            Self::Image { source: GetImageError::Call { source, .. } } => {
                let unreached = "is the imageserver running? say where: --imageserver HOST:PORT";
                vec![source.connect_hint(unreached).unwrap_or(unreached)]
            }
            Self::Image { source: GetImageError::NotThere { .. } } => {
                vec!["imagetool list shows the images that there are"]
            }
            Self::OtherScope { .. } => {
                vec!["upgrade its subd; push-image works without this"]
            }
            Self::Unsafe(_) => {
                vec![
                    "show it with subtool show-update; if it is intended, use --force-unsafe",
                    "if the image is wrong, push another one",
                ]
            }
            Self::Fetch(FetchFailure::Sources(_)) => {
                vec!["the machine must reach the object server: --source HOST:PORT as it sees it"]
            }
            Self::NoImage => vec!["subtool cleanup --all removes all objects"],
            Self::NotConverging { .. } => vec!["does something on the machine undo the update?"],
            _ => Vec::new(),
        }
    }
}
